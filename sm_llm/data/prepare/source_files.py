"""Which files the sources of a preparation consist of, and the documents of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.data.describe import is_dataset, read_json
from sm_llm.data.prepare.documents import Collector
from sm_llm.data.prepare.readers import READERS
from sm_llm.errors import DataError
from sm_llm.runs.run_folders import files_outside_runs, runs_sentence
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sm_llm.data.prepare.documents import Documents, Rejections

BUILTIN_PREFIX = "builtin:"
# Longest first, in case that one suffix is the end of another.
SUFFIXES = tuple(sorted((kind for kind in READERS if kind.startswith(".")), key=len, reverse=True))


@dataclass(frozen=True)
class SourceFile:
    """One file (or saved dataset, or builtin text) to read; ``size`` in bytes on disk."""

    path: Path
    kind: str
    size: int

    def documents(self, text_field: str, rejections: Rejections) -> Iterator[Documents]:
        """The usable documents in order. Raises ``DataError`` if no row has ``text_field`` or the file is broken."""
        collector = Collector(str(self.path), rejections)
        for line, value, fraction in READERS[self.kind](self.path, text_field, collector):
            if batch := collector.add(line, value, fraction):
                yield batch
        # Only behind the last row: before it, a later row could still have the field.
        collector.check_field(text_field)
        if last := collector.flush(1.0):
            yield last


def find_files(sources: list[str], notice: Callable[[str], None]) -> list[SourceFile]:
    """Every readable file of the sources, folders walked recursively in order of path.

    Files of other kinds inside a folder are left out and reported through ``notice``; a source with nothing readable
    is a ``DataError`` that lists what was found and what can be read.
    """
    return [file for source in sources for file in _of_source(source, notice)]


def _of_source(source: str, notice: Callable[[str], None]) -> list[SourceFile]:
    if source.startswith(BUILTIN_PREFIX):
        return [_builtin(source)]
    path = Path(source.removeprefix("file://"))
    if not path.exists():
        raise DataError(f"{source}: no such file or folder")
    if path.is_file():
        return [_single(path)]
    return _folder(path, notice)


def _builtin(source: str) -> SourceFile:
    if source not in READERS:
        known = ", ".join(kind for kind in READERS if kind.startswith(BUILTIN_PREFIX))
        raise DataError(f"{source}: no such built-in text; there is {known}")
    # The size of the text is only needed for progress: an estimate.
    return SourceFile(Path(source), source, 465_000)


def _single(path: Path) -> SourceFile:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: cannot read this kind of file; readable are {', '.join(sorted(SUFFIXES))}")
    return SourceFile(path, kind, path.stat().st_size)


def _folder(folder: Path, notice: Callable[[str], None]) -> list[SourceFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(read_json(folder / "dataset_dict.json").get("splits", []))
        raise DataError(f"{folder}: a saved dataset with several splits ({splits}); name one, e.g. {folder}/train")
    if is_dataset(folder):
        return [SourceFile(folder, "dataset", sum(p.stat().st_size for p in folder.glob("*.arrow")))]
    present, runs = files_outside_runs(folder)
    paths = [path for path in present if not is_hidden(path, folder)]
    files = [_single(path) for path in paths if _kind(path)]
    others = sorted({path.suffix or path.name for path in paths if not _kind(path)})
    if not files:
        found = f"{counted(len(paths), 'file')} of other kinds ({', '.join(others)})" if paths else "nothing"
        found += f" beside {counted(len(runs), 'run folder')}" if runs else ""
        raise DataError(f"{folder}: {found} found; readable are {', '.join(sorted(SUFFIXES))}")
    if others:
        notice(f"{folder}: {counted(len(paths) - len(files), 'file')} of other kinds left out ({', '.join(others)})")
    if runs:
        notice(runs_sentence(folder, folder, runs))
    if hidden := len(present) - len(paths):
        notice(f"{folder}: {counted(hidden, 'hidden file')} left out (names that begin with . or _)")
    return files


def is_hidden(path: Path, folder: Path) -> bool:
    """Whether a file below ``folder`` is one that programs keep for themselves (``.x``, ``_SUCCESS``)."""
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def _kind(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
