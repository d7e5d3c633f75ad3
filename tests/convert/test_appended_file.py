"""Files that are written past the page cache: every byte in its place, also where the file system refuses that."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.convert.files import appended_file
from sm_llm.convert.files.appended_file import AppendedFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BUFFER, BLOCK = 2 << 20, 4096
BODY = os.urandom(2 * BUFFER + (1 << 16) + BLOCK + 7)


def flags_of_writes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each write that follows leaves out the page cache."""
    found: list[bool] = []
    write = os.pwrite

    def noted(descriptor: int, piece: Any, position: int) -> int:
        found.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return write(descriptor, piece, position)

    monkeypatch.setattr(os, "pwrite", noted)
    return found


def takes_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def refusing_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file system of the test has it."""


def without_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")


def refusing_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    call = fcntl.fcntl

    def refuse(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such flag here")
        return call(descriptor, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def refusing_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device has blocks of 1,000 bytes, so the kernel refuses such writes."""
    monkeypatch.setattr(appended_file, "_BLOCK", 1000)


CASES = [refusing_nothing, without_flag, refusing_the_flag, refusing_writes]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("piece", [997, 1 << 18, len(BODY)])
def test_every_byte_is_in_its_place(
    case: Callable[[Any], None], piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case(monkeypatch)
    for size in (0, 1, BLOCK, (1 << 16) + 1, BUFFER - 1, BUFFER, BUFFER + BLOCK, len(BODY)):
        file = AppendedFile(tmp_path / f"{size}")
        for begin in range(0, size, piece):
            file.write(memoryview(BODY)[begin : min(begin + piece, size)])
            assert file.size == min(begin + piece, size)
        assert file.close() == size
        assert (tmp_path / f"{size}").read_bytes() == BODY[:size]


def test_blocks_leave_out_the_page_cache_and_the_end_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_offered = takes_direct_writes(tmp_path)
    found = flags_of_writes(monkeypatch)
    file = AppendedFile(tmp_path / "a")
    file.write(BODY)
    file.close()
    assert found == [is_offered, is_offered, *([True, False] if is_offered else [False])]


def test_a_full_disk_is_an_error_and_no_reason_for_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = flags_of_writes(monkeypatch)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = AppendedFile(tmp_path / "a")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write(BODY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        file.abort()
    assert found == [takes_direct_writes(tmp_path)] * 2


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(FileExistsError):
        AppendedFile(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"before"
