"""What the places that a task reads must hold: a file for a folder, other files or empty ones are refused at plan time.

``WANTED`` has a row for every field of a task that names a place (``spec.base.Source``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.data.compressed import DamagedGzip
from sm_llm.data.content import matching_files
from sm_llm.data.describe import DATASET_INFO, STATE, assert_rows, describe_rows, read_json
from sm_llm.data.peek import LINE_SUFFIXES, assert_line_rows
from sm_llm.errors import DataError, Issue
from sm_llm.launcher.planning.draft import tokenizer_vocabulary
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.spec.references import source_fields
from sm_llm.spec.tasks import TrainTask, training_of
from sm_llm.spec.training import STREAM_BUILDERS, StreamData
from sm_llm.storage.uri import run_and_step
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sm_llm.spec.job import JobSpec

_TOKENIZER = "tokenizer.json"
_CONFIG = "config.json"
_TEXTS = (".txt", ".jsonl", ".jsonl.gz", ".parquet", ".arrow")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".distcp")


@dataclass(frozen=True)
class SourceKind:
    """What a place must hold."""

    what: str
    """In words, with an article."""
    remedy: str = ""
    names: tuple[str, ...] = ()
    """Files that all lie directly in the folder."""
    suffixes: tuple[str, ...] = ()
    """Ends of names, one of which a file below the folder has."""
    is_file: bool = False
    """Whether a single file is as good as a folder."""
    is_elsewhere: bool = False
    """Whether another check reads the place, and reports that it is missing: one that knows more of it."""
    read: Callable[[Path], object] | None = None
    """Reads what a plan can afford to read; raises ``DataError``."""


def _read_text(location: Path) -> None:
    from sm_llm.data.prepare.source_files import find_files

    try:
        files = find_files([str(location)], lambda _: None)
    except DataError as error:
        raise DataError(f"has no text to read: {error}") from None
    if not any(file.size for file in files):
        raise DataError(f"has no text to read: {counted(len(files), 'empty file')}")


def _read_tokenizer(folder: Path) -> None:
    size = tokenizer_vocabulary(folder)
    if size is None:
        raise DataError(f"has no {_TOKENIZER}")
    if size == 0:
        raise DataError(f"{folder / _TOKENIZER}: holds no tokens, so it is no tokenizer")


def _read_config(location: Path) -> None:
    read_json(location if location.is_file() else location / _CONFIG)


def _read_rows(folder: Path) -> None:
    describe_rows(folder)
    assert_rows(folder)


_ROWS = SourceKind(
    "a folder of rows, as the prepare task writes it", "Write rows with the prepare task", (STATE, DATASET_INFO),
    read=_read_rows,
)  # fmt: skip
_LINES = SourceKind(
    f"a folder of line files ({', '.join(LINE_SUFFIXES)})", "Of text make rows with the prepare task",
    suffixes=LINE_SUFFIXES, read=assert_line_rows,
)  # fmt: skip
_OF_TOKENIZER = SourceKind(f"a folder with {_TOKENIZER}", "", (_TOKENIZER,), read=_read_tokenizer)

WANTED: dict[tuple[str, str], SourceKind] = {
    ("RowsData", "train"): _ROWS,
    ("RowsData", "validation"): _ROWS,
    ("JsonRowsData", "train"): _LINES,
    ("JsonRowsData", "validation"): _LINES,
    ("TrainTask", "tokenizer"): _OF_TOKENIZER,
    ("PrepareTask", "tokenizer"): _OF_TOKENIZER,
    ("PrepareTask", "sources"): SourceKind("files or folders of text", suffixes=_TEXTS, is_file=True, read=_read_text),
    # The config is read whatever it lies in, also on the hub.
    ("ModelSpec", "path"): SourceKind(f"a folder with {_CONFIG}", "", (_CONFIG,), is_file=True, is_elsewhere=True),
    # The weights are compared with the config, tensor by tensor, by a check of their own.
    ("PretrainedStart", "pretrained"): SourceKind(
        "a folder of weights, as save_pretrained writes it", "", (), (".safetensors", ".pt"), read=lambda _: None
    ),
    ("CheckpointStart", "checkpoint"): SourceKind("a run, or RUN@STEP", is_elsewhere=True),
    ("ConvertTask", "source"): SourceKind("a folder of weights", "", suffixes=_WEIGHTS),
    ("ConvertTask", "config"): SourceKind(f"{_CONFIG}, or its folder", "", (_CONFIG,), is_file=True, read=_read_config),
    ("ScriptTask", "source"): SourceKind("a folder with the program", is_elsewhere=True),
}
"""Class and field -> what its place must hold."""


def wanted_at(job: JobSpec) -> dict[str, SourceKind]:
    """Dotted path -> what the place there must hold, for every place that the task reads."""
    return {path: WANTED[type(block).__name__, name] for path, block, name, _ in source_fields(job.task)}


def source_issues(job: JobSpec) -> Iterator[Issue]:
    """Places on this machine that are not there, or hold something else than what is read from them.

    Absolute paths of a backend whose jobs see other folders than this machine are left to the job.
    """
    for path, block, name, value in source_fields(job.task):
        wanted = WANTED[type(block).__name__, name]
        location = local_folder(run_and_step(value)[0] if name == "checkpoint" else value)
        if location is None or wanted.is_elsewhere or (value.startswith("/") and not job.backend.sees_this_machine):
            continue
        if location.exists():
            yield from _issues(path, value, location, wanted)
        else:
            yield Issue("source-not-found", path, "is not there", value, f"Check the path; give {wanted.what}")
    yield from _stream_issues(job)


def _stream_issues(job: JobSpec) -> Iterator[Issue]:
    """The files of a stream on this machine; those of a data set on the hub are its own."""
    training = training_of(job.task)
    data = training.data if training is not None else None
    if not isinstance(data, StreamData):
        return
    holder = "task" if isinstance(job.task, TrainTask) else "task.training"
    if data.dataset not in STREAM_BUILDERS:
        folder = None if "://" in data.dataset else local_folder(data.dataset)
        if folder is not None and folder.exists():
            problem = "is a place on this machine, and not a data set on the hub"
            remedy = "Write the builder, for example json, and its files: task.data.data_files=FOLDER/*.jsonl"
            yield Issue("stream-dataset-local", f"{holder}.data.dataset", problem, data.dataset, remedy)
        return
    patterns = [data.data_files] if isinstance(data.data_files, str) else data.data_files or []
    for pattern in patterns:
        path, is_seen = f"{holder}.data.data_files", pattern.startswith("/") or job.backend.runs_here
        if "://" in pattern or (is_seen and not job.backend.sees_this_machine):
            continue
        if not is_seen:
            problem, remedy = "is relative to a folder of this machine", "Give the absolute path, or an address"
            yield Issue("stream-files-out-of-reach", path, problem, pattern, remedy)
        elif not (files := matching_files(pattern)):
            yield Issue("stream-files-not-found", path, "matches no file", pattern, "Check the path and the pattern")
        elif not any(file.stat().st_size for file in files):
            problem = f"holds nothing: {counted(len(files), 'empty file')}"
            yield Issue("stream-files-empty", path, problem, pattern, "Check the path and the pattern")


def _issues(path: str, value: str, location: Path, wanted: SourceKind) -> Iterator[Issue]:
    give = wanted.remedy or f"Give {wanted.what}"
    if location.is_file() and not wanted.is_file:
        is_in_it = location.name in wanted.names or location.name.endswith(wanted.suffixes or ("\0",))
        remedy = f"Give the folder that holds it: {location.parent}" if is_in_it else give
        yield no_folder(path, value, wanted, "a file", remedy)
    elif wanted.read is not None:
        try:
            wanted.read(location)
        except DamagedGzip as error:
            yield Issue("source-unreadable", path, error.problem, value, error.remedy)
        except (DataError, OSError) as error:
            yield Issue("source-unreadable", path, str(error), value, give)
    elif location.is_dir() and (problem := lacking(wanted, list(_listing(location)))):
        yield wrong_content(path, value, wanted, problem)


def no_folder(path: str, value: str, wanted: SourceKind, found: str, remedy: str) -> Issue:
    """The issue of a file, or an object, in the place of a folder."""
    return Issue("source-is-a-file", path, f"is {found}, where {wanted.what} is wanted", value, remedy)


def wrong_content(path: str, value: str, wanted: SourceKind, problem: str) -> Issue:
    """The issue of a folder that lacks what is read from it."""
    return Issue("source-content-wrong", path, problem, value, wanted.remedy or f"Give {wanted.what}")


def _listing(folder: Path) -> Iterator[tuple[str, int]]:
    from sm_llm.runs.run_folders import files_outside_runs

    return ((it.relative_to(folder).as_posix(), it.stat().st_size) for it in files_outside_runs(folder)[0])


def lacking(wanted: SourceKind, files: Sequence[tuple[str, int]]) -> str:
    """What a folder of these files (name below it, size) lacks, in words; empty if it lacks nothing."""
    found: dict[str, Any] = dict(files)
    if missing := [name for name in wanted.names if name not in found]:
        return f"has no {' and no '.join(missing)}{_instead(files)}"
    fitting = [(name, size) for name, size in files if wanted.suffixes and name.endswith(wanted.suffixes)]
    if wanted.suffixes and not fitting:
        return f"has no file that ends in {', '.join(wanted.suffixes)}{_instead(files)}"
    if fitting and not any(size for _, size in fitting):
        return f"holds nothing: {counted(len(fitting), 'empty file')}"
    return ""


def _instead(files: Sequence[tuple[str, int]]) -> str:
    kinds = sorted({"." + name.rpartition("/")[2].rpartition(".")[2] for name, _ in files})
    shown = f"{', '.join(kinds[:4])}{', …' if len(kinds) > 4 else ''}"
    return f"; it has {counted(len(files), 'file')} ({shown})" if files else "; it is empty"
