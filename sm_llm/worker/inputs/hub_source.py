"""Sources on the hub: what of a repository a job reads, on this node's disk, at the commit that the run has pinned."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.runs.events.events import Progress
from sm_llm.spec.references import sources
from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.hub.hub_addresses import parse_hub
from sm_llm.storage.hub.hub_fetch import EXCLUDE, FolderTarget, bring_files, select
from sm_llm.storage.hub.hub_ledger import Ledger, ledger_prefix
from sm_llm.storage.syncing.selection import Selection, matches
from sm_llm.storage.uri import open_store
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.spec.job import JobSpec
    from sm_llm.storage.hub.hub_addresses import HubFile, HubSnapshot
    from sm_llm.worker.context import WorkerContext

_LINE_SECONDS = 5.0


_EVENT_SECONDS = 0.5

# What transformers looks for; config.json is read for the kind of tokenizer, too.
_PARTS = {
    "task.model.path": ("config.json", "generation_config.json"),
    "task.tokenizer": (
        "config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
        "*.tiktoken", "chat_template*",
    ),
}  # fmt: skip


def bring_from_hub(context: WorkerContext, uri: str, target: Path) -> str:
    """Fetch what the job reads of ``uri`` below ``target``; returns the path there that ``uri`` means.

    All nodes and all attempts of the run get the same commit. Raises ``StorageError``.
    """
    snapshot = pinned(context, uri)
    files, _ = select(snapshot, wanted(context.job.spec, uri, snapshot))
    report_source(context, snapshot, files)
    target.mkdir(parents=True, exist_ok=True)
    bring_files(snapshot, files, FolderTarget(target), FetchReporter(context, "staging", uri))
    return snapshot.address.path


def pinned(context: WorkerContext, uri: str) -> HubSnapshot:
    """The commit that ``uri`` stands for in this run, recorded in its storage with the checksum of every file."""
    store = open_store(context.job.run_uri, context.job.spec.storage_options.model_dump())
    return Ledger(store, ledger_prefix(uri)).pin(parse_hub(uri))


def wanted(job: JobSpec, uri: str, snapshot: HubSnapshot) -> Selection:
    """The files that the fields naming ``uri`` need: a config, a tokenizer, or all but other formats of the weights."""
    fields = [path for path, source in sources(job).items() if source == uri]
    # Such a field reads weights or data: of these everything may be needed.
    if any(path not in _PARTS for path in fields):
        return Selection(exclude=EXCLUDE)
    patterns = {pattern for path in fields for pattern in _PARTS[path]}
    known = [pattern for pattern in sorted(patterns) if any(matches(pattern, it.path) for it in snapshot.files)]
    return Selection(include=known, exclude=EXCLUDE)


def hub_stream(job: JobSpec) -> str | None:
    """The address of the data set that a job streams from the hub, if it does."""
    if not isinstance(job.task, TrainTask) or job.task.data.format != "stream":
        return None
    dataset = job.task.data.dataset
    return dataset if dataset.startswith("hf://") else None


def with_pinned_stream(job: JobSpec, commit: str) -> JobSpec:
    """The job with its stream's revision replaced by a commit."""
    uri, task = hub_stream(job), job.task
    assert uri is not None
    assert isinstance(task, TrainTask)
    address = replace(parse_hub(uri), revision=commit)
    data = task.data.model_copy(update={"dataset": address.uri})
    return job.model_copy(update={"task": task.model_copy(update={"data": data})})


class FetchReporter:
    """Bytes done and in all: to the event log twice a second, and in a printed line now and then."""

    def __init__(self, context: WorkerContext, phase: str, detail: str) -> None:
        self._context, self._phase, self._detail = context, phase, detail
        self._emitted = 0.0
        self._printed = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        # Progress comes far more often than an event is of use, and its end must not be missed.
        if now - self._emitted >= _EVENT_SECONDS or done == total:
            self._emitted = now
            self._context.emit(Progress(self._phase, done, total, "bytes", self._detail))
        if now - self._printed >= _LINE_SECONDS and total:
            self._printed = now
            share = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB ({100 * done / total:.0f}%)"
            self._context.log(f"{self._phase}: {share}")


def report_source(context: WorkerContext, snapshot: HubSnapshot, files: list[HubFile]) -> None:
    """Log which commit an address stands for, and how much of it is meant."""
    size = sum(file.size for file in files) / 2**20
    context.notice(
        f"{snapshot.address.uri} is commit {snapshot.commit}: {counted(len(files), 'file')}, {size:,.1f} MiB"
    )
