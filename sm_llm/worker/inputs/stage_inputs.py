"""Brings a job's inputs to the node: one process per node copies, the others wait for its marker."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from sm_llm.errors import SmLlmError, StorageError
from sm_llm.runs.events.events import Progress
from sm_llm.spec.references import sources
from sm_llm.storage.files import write_atomically
from sm_llm.storage.hub.hub_addresses import is_hub
from sm_llm.storage.publication.result import pointed, result_address
from sm_llm.storage.syncing.sync import sync
from sm_llm.storage.uri import open_store
from sm_llm.worker.inputs.hub_source import bring_from_hub, hub_stream, pinned, with_pinned_stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.spec.job import JobSpec
    from sm_llm.storage.base import Store
    from sm_llm.storage.syncing.sync_settings import SyncReport
    from sm_llm.worker.context import WorkerContext

CHECKPOINT_SOURCE = "task.start.checkpoint"
WAIT_SECONDS = 4 * 3600.0
_POLL_SECONDS = 0.05


def stage_inputs(context: WorkerContext) -> JobSpec:
    """The job with every source replaced by a folder or file on this node.

    A source that the backend mounted as a channel is read from there and a plain path where it lies. Anything with
    a scheme (``file://…``, ``hf://…``) is copied into scratch and verified; a stream from the hub gets the commit that
    its revision stands for in this run. A checkpoint to start from stays an address: it is found and verified by its
    commit, not copied as files. Raises ``StorageError``, on every process of the node, if a copy fails.
    """
    mounted = {uri: name for name, uri in context.job.channels.items()}
    locations: dict[str, str] = {}
    for path, uri in sources(context.job.spec).items():
        if path == CHECKPOINT_SOURCE or uri in locations:
            continue
        if uri in mounted:
            # A link is followed: its own name has no suffix, and messages shall name the user's file.
            locations[uri] = str(channel(context, mounted[uri]).resolve())
        elif "://" in uri:
            locations[uri] = str(stage(context, uri))
        elif (found := result_address(uri)) != uri:
            locations[uri] = found  # a folder has its run's result below the commit, and perhaps no link to it
    # Validated again as a whole: the paths are checked like those that a user writes.
    job = _with_sources(context.job.spec, locations)
    if (stream := hub_stream(job)) is None:
        return job
    return with_pinned_stream(job, once_per_node(context, f"{stream}.commit", lambda: pinned(context, stream).commit))


def channel(context: WorkerContext, name: str) -> Path:
    """The folder of an input channel; a copy of a run's result, where all that the channel brings is its pointer."""
    folder = context.container.channel(name)
    address = pointed(folder)
    return folder if address is None else stage(context, address)


def _with_sources(job: JobSpec, locations: dict[str, str]) -> JobSpec:
    task: dict[str, Any] = job.task.model_dump()
    for path, uri in sources(job).items():
        if uri in locations:
            _put(task, path.split(".")[1:], locations[uri])
    return job.model_copy(update={"task": type(job.task).model_validate(task)})


def _put(tree: Any, path: list[str], value: str) -> None:
    for key in path[:-1]:
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    last = path[-1]
    tree[int(last) if isinstance(tree, list) else last] = value


def stage(context: WorkerContext, uri: str, *, wait_seconds: float = WAIT_SECONDS) -> Path:
    """A copy of the file ``uri``, or of everything below the folder ``uri``, in this node's scratch.

    The node's first process copies, the others wait for it at most ``wait_seconds``.
    """
    target = _staged_path(context, uri)

    def copy() -> str:
        return bring_from_hub(context, uri, target) if is_hub(uri) else _copy(context, uri, target)

    return target / once_per_node(context, uri, copy, wait_seconds=wait_seconds)


def once_per_node(
    context: WorkerContext, what: str, action: Callable[[], str], *, wait_seconds: float = WAIT_SECONDS
) -> str:
    """The result of ``action`` in the node's first process, on all processes of the node.

    The first one then writes a marker, for which the others wait. It carries the outcome, so that nobody waits for
    what has failed.
    """
    # Named by the attempt: scratch is kept between attempts, and an older marker would count at once.
    marker = _staged_path(context, what).with_suffix(f".{context.job.attempt}.done")
    if context.process.is_node_leader:
        try:
            result = action()
        except (SmLlmError, OSError) as error:
            # The others raise as well, instead of waiting for hours.
            write_atomically(marker, f"failed: {context.hidden(str(error))}")
            raise
        write_atomically(marker, f"complete: {result}")
        return result
    outcome, _, detail = _await(marker, wait_seconds).partition(": ")
    if outcome != "complete":
        raise StorageError(f"staging {what} failed in the node's first process: {detail}")
    return detail


def _staged_path(context: WorkerContext, what: str) -> Path:
    return context.scratch / "inputs" / hashlib.sha256(what.encode()).hexdigest()[:16]


def _copy(context: WorkerContext, uri: str, target: Path) -> str:
    """Copy a folder (returns "") or a single file (returns its name), by the transfer agent where it is in S3."""
    options = context.job.spec.storage_options.model_dump()
    uri = result_address(uri, options)
    store = open_store(uri, options)
    parent, _, name = uri.rstrip("/").rpartition("/")
    # A prefix in S3 is no object: only asking for the key distinguishes a file from a folder.
    is_file = open_store(parent, options).head(name) is not None
    report = context.agent.call(bring, store, target, options, progress=_reporter(context, uri))
    context.log(f"staged {uri}: {report.copied_size:,} bytes copied, {report.unchanged_size:,} were here already")
    return name if is_file else ""


def bring(store: Store, target: Path, options: dict[str, Any], *, progress: Callable[[int], None]) -> SyncReport:
    """``storage.syncing.sync`` of what is at a store's address; the bytes it moves are reported one after the other."""
    reported = 0

    def count(done: int, _: int) -> None:
        nonlocal reported
        # ``sync`` reports totals, the transfer agent adds up increments.
        progress(done - reported)
        reported = done

    return sync(store.uri, target, options=options, progress=count)


def _reporter(context: WorkerContext, uri: str) -> Callable[[int], None]:
    done = 0

    def count(increment: int) -> None:
        nonlocal done
        done += increment
        context.emit(Progress("staging", done, None, "bytes", uri))

    return count


def _await(marker: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while not marker.exists():
        if time.monotonic() > deadline:
            raise StorageError(f"{marker}: the node's first process has not finished copying within {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
    return marker.read_text(encoding="utf-8")
