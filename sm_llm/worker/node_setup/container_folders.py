"""The folders and files that a worker expects, on a node where no platform has made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

STEPPED = ("train", "script")
"""Task kinds that look for a stop file between two steps; others end at once when they are asked."""


def make_container_folders(base: Path) -> None:
    """Create the folders and files of the container contract; what an earlier start reported is removed."""
    for folder in ("input/config", "input/data", "model", "output/data", "code", "scratch"):
        (base / folder).mkdir(0o700, parents=True, exist_ok=True)
    for report in ("failure", "stopped"):
        # The base is the same after a restart: an old report would be taken for this start's.
        (base / "output" / report).unlink(missing_ok=True)
    (base / "input/config/hyperparameters.json").write_text("{}", encoding="utf-8")
