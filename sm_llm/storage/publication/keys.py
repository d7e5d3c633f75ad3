"""Where a publication lies below a run's folder: the keys of saves, parts and commits, and back from keys to steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

COMMITS = "ckpt/commits/"
# At most 18 digits, so that a step fits into 64 bits.
_COMMIT = re.compile(r"ckpt/commits/(?:step-([0-9]{1,18})|final)\.json")
_SAVE = re.compile(r"(?:ckpt/step-([0-9]{1,18})|final)/([0-9a-f]{32})/")


@dataclass(frozen=True)
class Slot:
    """What is published: the checkpoint of ``step``, or (``step`` None) the run's final result.

    At most one commit exists per slot. Digits are padded to eight for the eye; steps are compared as numbers.
    """

    step: int | None

    def __str__(self) -> str:
        return "the final result" if self.step is None else f"step {self.step}"

    @property
    def commit_key(self) -> str:
        return f"{COMMITS}final.json" if self.step is None else f"{COMMITS}step-{self.step:08d}.json"

    @property
    def prefix(self) -> str:
        """Prefix of every save of this slot."""
        return "final/" if self.step is None else f"ckpt/step-{self.step:08d}/"

    def save_prefix(self, save_id: str) -> str:
        return f"{self.prefix}{save_id}/"

    def data_prefix(self, save_id: str) -> str:
        return f"{self.save_prefix(save_id)}data/"

    def kept_key(self, save_id: str) -> str:
        """Where a save that another one has beaten to its slot has its own manifest, if it is kept all the same."""
        return f"{self.save_prefix(save_id)}kept.json"

    def part_key(self, save_id: str, node: int) -> str:
        return f"{self.save_prefix(save_id)}part-{node}.json"


FINAL = Slot(None)


def slot_of_commit(key: str) -> Slot | None:
    """The slot a commit's key names, by number (``step-9`` and ``step-00000009`` are the same), or None."""
    match = _COMMIT.fullmatch(key)
    return match and Slot(int(match[1]) if match[1] else None)


def save_of_key(key: str) -> tuple[Slot, str, str] | None:
    """(slot, save id, prefix as found) of any key inside a save, or None."""
    match = _SAVE.match(key)
    return match and (Slot(int(match[1]) if match[1] else None), match[2], match[0])
