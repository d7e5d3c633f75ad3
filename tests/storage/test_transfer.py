"""Files that have arrived are verified while the next ones come."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage import transfer
from sm_llm.storage.base import Copy
from sm_llm.storage.transfer import download_and_settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Coming:
    """A transfer that only records what it is asked for."""

    name = "coming"

    def __init__(self, before: Callable[[Sequence[Copy]], None] = lambda _: None) -> None:
        self.before = before

    def download(self, store: Any, copies: Sequence[Copy], progress: Any) -> dict[str, str]:
        self.before(copies)
        return {copy.key: f"checksum of {copy.key}" for copy in copies}


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """Five files of 10 bytes, in batches of two."""
    monkeypatch.setattr(transfer, "_BATCH_FILES", 2)
    monkeypatch.setattr(transfer, "_BATCH_BYTES", 20)
    return [Copy(name, tmp_path / name, 10, "") for name in "abcde"]


def move(coming: Coming, copies: list[Copy], settle: Any) -> list[str]:
    return [it.key for it in download_and_settle(coming, None, copies, lambda _: None, settle)]  # type: ignore[arg-type]


def test_a_batch_is_settled_while_the_next_one_comes(copies: list[Copy]) -> None:
    first_is_settled, batches, reported = threading.Event(), [], {}

    def come(batch: Sequence[Copy]) -> None:
        batches.append("".join(it.key for it in batch))
        assert len(batches) == 1 or first_is_settled.wait(120), "the transfer waits in vain for the verification"

    def settle(copy: Copy, checksum: str | None) -> bool:
        reported[copy.key] = checksum
        first_is_settled.set()
        return copy.key not in "bd"

    assert move(Coming(come), copies, settle) == ["b", "d"]
    assert batches == ["ab", "cd", "e"]
    assert reported == {name: f"checksum of {name}" for name in "abcde"}


def test_what_had_arrived_before_an_error_is_settled(copies: list[Copy]) -> None:
    settled = threading.Semaphore(0)

    def come(batch: Sequence[Copy]) -> None:
        if batch[0].key == "c":
            assert settled.acquire(timeout=240)
            assert settled.acquire(timeout=240)
            raise StorageError("the store does not answer")

    with pytest.raises(StorageError, match="does not answer"):
        move(Coming(come), copies, lambda *_: settled.release() or True)


def test_an_error_of_the_disk_is_raised(copies: list[Copy]) -> None:
    def settle(copy: Copy, _: str | None) -> bool:
        raise OSError(28, f"No space left for {copy.key}")

    with pytest.raises(OSError, match="No space left for a"):
        move(Coming(), copies, settle)
