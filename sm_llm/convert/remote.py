"""Where a conversion reads and writes: checkpoints of runs, and S3, streamed or by way of a folder on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.convert.files.streamed_file import StreamedFile
from sm_llm.convert.hf_source import BESIDE, SOURCE
from sm_llm.convert.work import DESTINATION, MANIFEST
from sm_llm.errors import ConversionRefused, Issue
from sm_llm.models.safetensors_folder import INDEX_FILE, SINGLE_FILE
from sm_llm.owned import temporary_folder
from sm_llm.runs.run_store import run_store_at
from sm_llm.storage.engines.ranged_object import RangedObject
from sm_llm.storage.publication.find import find_newest, verify
from sm_llm.storage.publication.keys import COMMITS
from sm_llm.storage.publication.restore import fetch
from sm_llm.storage.syncing.sync import sync
from sm_llm.storage.uri import is_s3, join, open_store, run_and_step
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.manifest import CommitManifest, FileEntry
    from sm_llm.storage.s3.s3_options import S3Options

# Of a checkpoint: several times its weights.
_NOT_WEIGHTS = "optim"


@dataclass(frozen=True)
class RunCheckpoint:
    """A published checkpoint of a run."""

    store: Store
    commit: CommitManifest

    @property
    def location(self) -> str:
        """Where its files are."""
        return join(self.store.uri, self.commit.save.data_prefix.rstrip("/"))

    def check(self) -> None:
        """Compare files on this machine with their checksums in the commit. Raises ``ConversionRefused``."""
        weights = self.commit.model_copy(update={"files": tuple(filter(_holds_weights, self.commit.files))})
        if problems := verify(self.store, weights, deep=True):
            remedy = "Convert another step: sm-llm checkpoints lists them"
            raise ConversionRefused([Issue("checkpoint-damaged", SOURCE, problems[0], self.location, remedy)])

    def fetch(self, folder: Path) -> Path:
        """Copy it from S3, checked. Raises ``CheckpointError`` for other content than was published."""
        return fetch(self.store, self.commit, folder, select=_holds_weights)


def _holds_weights(entry: FileEntry) -> bool:
    return _NOT_WEIGHTS not in entry.path.split("/")


def checkpoint_of(source: str, options: S3Options | None) -> RunCheckpoint | None:
    """The checkpoint ``RUN@STEP``, or the newest one of ``RUN``; None where ``source`` is no run.

    The newest is the one with the highest step whose commit fits its files. Raises ``ConversionRefused`` for a step
    that is not there, or is damaged, ``CheckpointError`` where no checkpoint can be used, ``StorageError``.
    """
    if "://" in source and not is_s3(source):
        return None
    source = source if is_s3(source) else str(Path(source).expanduser())
    # A folder may have a name of this form.
    run, step = (source, None) if not is_s3(source) and Path(source).is_dir() else run_and_step(source)
    if not is_s3(run) and not Path(run).is_dir():
        return None
    store = open_store(run, options)
    if not store.holds(COMMITS):
        return None
    run_store = run_store_at(run, options)
    run_id = run_store.record().run_id if run_store.exists() else None
    newest = find_newest(store, run_id=run_id, allow_step=None if step is None else lambda it: it == step)
    if newest.commit is None:
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        remedy = f"List them: sm-llm checkpoints {quoted(run)}"
        raise ConversionRefused([Issue("run-lacks-checkpoint", SOURCE, f"{run} does not have {which}", remedy=remedy)])
    found = RunCheckpoint(store, newest.commit)
    if not is_s3(run):
        found.check()
    return found


@dataclass(frozen=True)
class ConversionCopies:
    """Where the places of one conversion that are in S3 have their copies."""

    source: str
    destination: str
    config: str | None
    folder: Path
    options: S3Options | None = field(repr=False, default=None)
    checkpoint: RunCheckpoint | None = None
    """Of a run, if the source is one."""
    streamed: dict[Path, StreamedFile] = field(default_factory=dict, repr=False)
    """Files of the source that have no copy, once it was fetched."""

    def fetch(self, *, streams: bool) -> tuple[str, str, str | None]:
        """Source, destination and config on this machine; what is in S3 is copied there first.

        ``streams``: the source is a Hugging Face folder, whose safetensors are not copied but streamed.
        Raises ``ConversionRefused`` for a destination that holds something else, ``StorageError``.
        """
        # Then what the destination holds may be this very conversion's.
        is_continued = self.folder.exists()
        if is_s3(self.destination) and not is_continued and open_store(self.destination, self.options).holds():
            remedy = "Name a new prefix, or delete what is there"
            raise ConversionRefused(
                [Issue("destination-holds-objects", DESTINATION, "holds objects already", self.destination, remedy)]
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        is_streamed = streams and is_s3(self.source) and self._stream(open_store(self.source, self.options))
        source = str(self._source) if is_streamed else self._fetched(self.source, "source")
        config = None if self.config is None else self._fetched(self.config, "config")
        return source, str(self._target) if is_s3(self.destination) else self.destination, config

    def _fetched(self, address: str, name: str) -> str:
        if not is_s3(address):
            return address
        if self.checkpoint is not None and address == self.source:
            return str(self.checkpoint.fetch(self.folder / name))
        sync(address, self.folder / name, options=self.options)
        return str(self.folder / name)

    def _stream(self, store: Store) -> bool:
        """Make the source's folder here: small files, and headers of its safetensors. False where it has none."""
        held = {it.key for it in store.list("")}
        if not held & {INDEX_FILE, SINGLE_FILE}:
            return False
        self._source.mkdir(exist_ok=True)
        # Whole: they are small, and the conversion copies them to its result.
        for name in sorted(held & {INDEX_FILE, *BESIDE}):
            store.get_file(name, self._source / name)
        for name in sorted(held & {SINGLE_FILE, *self._indexed_files()}):
            path = self._source / name
            self.streamed[path] = StreamedFile(path, RangedObject(store, name))
        return True

    def _indexed_files(self) -> set[str]:
        """The files that the index names; none where it is damaged, which whoever opens the folder reports."""
        try:
            content = json.loads((self._source / INDEX_FILE).read_text(encoding="utf-8"))
            return {str(it) for it in content["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return set()

    @property
    def _source(self) -> Path:
        return self.folder / "source"

    @property
    def _target(self) -> Path:
        return self.folder / "converted"

    def deliver(self) -> None:
        """Bring what was written to S3, the manifest last, and delete the copies. Raises ``StorageError``."""
        if is_s3(self.destination):
            # By the manifest, which comes last, a reader knows that a conversion is whole.
            files = {"one_weight_format": False, "options": self.options}
            sync(self._target, self.destination, exclude=[MANIFEST], **files)  # type: ignore[arg-type]
            if (self._target / MANIFEST).exists():
                sync(self._target, self.destination, include=[MANIFEST], **files)  # type: ignore[arg-type]
        shutil.rmtree(self.folder)


def staging_of(
    source: str, destination: str, config: str | None, scratch: str | Path | None, options: S3Options | None,
    checkpoint: RunCheckpoint | None,
) -> ConversionCopies | None:  # fmt: skip
    """The copies that a conversion needs; None where all of its places are on this machine."""
    locations = [source, destination, *([] if config is None else [config])]
    if not any(is_s3(it) for it in locations):
        if scratch is not None:
            remedy = "Leave it out: source and destination are folders here"
            raise ConversionRefused(
                [Issue("scratch-without-effect", "scratch (--scratch)", "has no effect", str(scratch), remedy)]
            )
        return None
    above = temporary_folder() if scratch is None else Path(scratch).expanduser().absolute()
    name = hashlib.sha256("\n".join(locations).encode()).hexdigest()[:16]
    return ConversionCopies(source, destination, config, above / f"convert-{name}", options, checkpoint)
