"""The marker of verified files: it saves reading, and believes nothing that was touched."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.storage.publication import restore as restoring
from sm_llm.storage.publication.publish import fetch
from sm_llm.storage.publication.verified import Verified
from sm_llm.storage.transfer import CopyTransfer

if TYPE_CHECKING:
    from pathlib import Path


class Counting(CopyTransfer):
    """Counts what it fetches."""

    fetched = 0

    def download(self, store: Any, copies: Any, progress: Any) -> dict[str, str]:
        self.fetched += len(copies)
        return super().download(store, copies, progress)


def test_what_was_verified_is_neither_fetched_nor_read_again(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, marker, transfer = bench.publish(10).commit, tmp_path / "out.verified", Counting()
    fetch(bench.store, commit, tmp_path / "out", transfer=transfer, marker=marker)
    first = transfer.fetched
    assert first == len(commit.files)

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("read a file that is verified")

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "crc64_file", refuse)
        fetch(bench.store, commit, tmp_path / "out", transfer=transfer, marker=marker)
    assert transfer.fetched == first


@pytest.mark.parametrize("how", ["altered", "replaced", "shortened", "marker"])
def test_what_was_touched_since_is_fetched_again(bench: Any, tmp_path: Path, how: str) -> None:
    commit, marker, transfer = bench.publish(10).commit, tmp_path / "out.verified", Counting()
    fetch(bench.store, commit, tmp_path / "out", transfer=transfer, marker=marker)
    first, path = transfer.fetched, tmp_path / "out" / commit.files[0].path
    before, body = path.stat(), path.read_bytes()
    changed = bytes([body[0] ^ 1]) + body[1:]
    if how == "replaced":
        path.unlink()
    path.write_bytes(body[:-1] if how == "shortened" else changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of writing can be set back
    if how == "marker":
        marker.write_text(marker.read_text()[:-3])
    fetch(bench.store, commit, tmp_path / "out", transfer=transfer, marker=marker)
    assert transfer.fetched == first + 1
    assert path.read_bytes() == body


def test_a_file_that_has_vanished_is_neither_noted_nor_held(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    verified = Verified(tmp_path / "marker")
    with pytest.raises(FileNotFoundError):
        verified.note(gone, "checksum")
    assert not verified.holds(gone, "checksum")
