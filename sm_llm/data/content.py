"""The digest of training data: whether a checkpoint would be continued on the rows that it was trained on.

Names of folders and files do not count, only the files' contents in the order in which they are read. Data of up to
``WHOLE_BYTES`` are read whole: any other byte gives another digest. Of larger data all sizes count and
``SAMPLES`` blocks that are spread evenly over all of it, so that the cost stays bounded: other data, rows that were
added, removed or written anew are seen, a few tokens edited in place at equal length may not be.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.data.describe import data_files
from sm_llm.data.peek import line_files
from sm_llm.errors import DataError
from sm_llm.spec.training import JsonRowsData, RowsData, StreamData
from sm_llm.storage.checksum import crc64_bytes, crc64_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.spec.training import DataSpec

WHOLE_BYTES = 256 << 20
SAMPLES = 1024
BLOCK_BYTES = 64 << 10
_READERS = 16


def data_digest(data: DataSpec, *, whole_bytes: int = WHOLE_BYTES) -> str | None:
    """16 hex digits for the training rows, or the text files, of ``data``, whose places are local.

    None where there is nothing to read: random tokens, and streams whose files lie elsewhere. Raises ``DataError``.
    """
    try:
        files = _files(data)
        return files_digest(files, whole_bytes=whole_bytes) if files else None
    except OSError as error:
        raise DataError(f"the training data cannot be read: {error}") from error


def repeated_files(data: RowsData | JsonRowsData) -> tuple[int, int]:
    """How many files with rows to validate on hold rows to train on, of how many: the same files, or copies.

    Of equally large files the first and the last block are compared. What cannot be read is no copy.
    """
    if data.validation is None:
        return 0, 0
    try:
        train, validation = _files(data), _files(data.model_copy(update={"train": data.validation}))
        sizes: dict[int, list[Path]] = {}
        for file in train:
            sizes.setdefault(file.stat().st_size, []).append(file)
        found = [it for it in validation if any(_is_copy(it, other) for other in sizes.get(it.stat().st_size, ()))]
    except (OSError, DataError):  # the checks of the two folders report it
        return 0, 0
    return len(found), len(validation)


def _is_copy(first: Path, second: Path) -> bool:
    """Whether two files of one size are one file, or begin and end alike."""
    last = max(0, (length := first.stat().st_size) - BLOCK_BYTES)
    ends = {0, last} if length else set()
    return first.samefile(second) or (bool(ends) and all(_block(first, it) == _block(second, it) for it in ends))


def tokenizer_digest(folder: str | None) -> str | None:
    """16 hex digits for the ``tokenizer.json`` of a local folder; None without one. Raises ``DataError``."""
    path = None if folder is None else Path(folder) / "tokenizer.json"
    try:
        return crc64_file(path) if path is not None and path.is_file() else None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def files_digest(files: Sequence[Path], *, whole_bytes: int = WHOLE_BYTES) -> str:
    """The digest of files in this order. Raises ``OSError``."""
    sizes = [file.stat().st_size for file in files]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="digest") as pool:
        if sum(sizes) <= whole_bytes:
            found = list(pool.map(crc64_file, files))
        else:
            found = list(pool.map(_block, *zip(*_samples(files, sizes), strict=True)))
    return crc64_bytes(json.dumps([sizes, found]).encode())


def _samples(files: Sequence[Path], sizes: Sequence[int]) -> list[tuple[Path, int]]:
    """(file, offset) of blocks at equal distances, the first and the last ones among them."""
    last = sum(sizes) - BLOCK_BYTES
    wanted = [last * number // (SAMPLES - 1) for number in range(SAMPLES)]
    found, begin = [], 0
    for file, size in zip(files, sizes, strict=True):
        found += [(file, at - begin) for at in wanted if begin <= at < begin + size]
        begin += size
    return found


def _block(file: Path, offset: int) -> str:
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        return crc64_bytes(stream.read(BLOCK_BYTES))


def _files(data: DataSpec) -> list[Path]:
    if isinstance(data, RowsData):
        return data_files(Path(data.train))
    if isinstance(data, JsonRowsData):
        return line_files(Path(data.train))
    if isinstance(data, StreamData) and data.data_files is not None:
        patterns = [data.data_files] if isinstance(data.data_files, str) else data.data_files
        return [path for it in patterns if "://" not in it for path in matching_files(it)]
    return []


def matching_files(pattern: str) -> list[Path]:
    """The files here that a pattern of a stream's ``data_files`` matches, in the order of their names."""
    from glob import glob

    # Sorted, because the order of a listing differs between file systems.
    return [path for path in map(Path, sorted(glob(pattern, recursive=True))) if path.is_file()]
