"""Sources on the hub: what of a repository a job reads, on this node's disk, at the commit that the run has pinned."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.spec.loading.references import sources
from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.hub.hub_addresses import parse_hub
from sm_llm.storage.hub.hub_fetch import EXCLUDE, FolderTarget, bring_files, select
from sm_llm.storage.hub.hub_ledger import Ledger, ledger_prefix
from sm_llm.storage.syncing.selection import Selection, matches
from sm_llm.storage.uri import open_store
from sm_llm.worker.tasks.fetch import FetchReporter, tell_source

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.spec.job import JobSpec
    from sm_llm.storage.hub.hub_addresses import HubSnapshot
    from sm_llm.worker.context import WorkerContext

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
    tell_source(context, snapshot, files)
    target.mkdir(parents=True, exist_ok=True)
    bring_files(snapshot, files, FolderTarget(target), FetchReporter(context, "staging", uri))
    return snapshot.address.path


def pinned(context: WorkerContext, uri: str) -> HubSnapshot:
    """The commit that ``uri`` stands for in this run, recorded in its storage with the checksum of every file."""
    store = open_store(context.job.run_uri, context.job.spec.storage_options.model_dump())
    return Ledger(store, ledger_prefix(uri)).pin(parse_hub(uri))


def wanted(job: JobSpec, uri: str, snapshot: HubSnapshot) -> Selection:
    """The files that the fields naming ``uri`` need: a config, a tokenizer, or all but other formats of the weights."""
    fields = [path for path, place in sources(job).items() if place == uri]
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
