"""Publishes a task's result as the run's final commit."""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_llm.contract.failure import Cause, cause_of
from sm_llm.errors import RunFailed, StorageError
from sm_llm.runs.events.checkpoints import FinalPublished
from sm_llm.storage.files import write_atomically
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.publication.publish import upload_part
from sm_llm.storage.publication.result import leave_pointers, pointers
from sm_llm.storage.uri import is_s3, join
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.manifest import CommitManifest
    from sm_llm.storage.publication.publish import CommitResult, Gather
    from sm_llm.worker.context import WorkerContext

RESULT_FOLDER = "result"
PATIENCE_SECONDS = 900.0
"""How long a store in S3 that fails is tried again; then the attempt fails, and the next one publishes the result."""
PAUSE_SECONDS = 10.0
"""Between two tries."""


def result_folder(context: WorkerContext) -> Path:
    """A fresh place in scratch where the leader writes the result before it is sealed."""
    folder = context.scratch / RESULT_FOLDER
    if context.process.is_leader:
        # What an attempt that was killed on this node has left would become part of this result.
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(_sealed(folder), ignore_errors=True)
    return folder


def publish_final(
    context: WorkerContext,
    store: Store,
    folder: Path,
    gather: Gather,
    meta: Mapping[str, Any],
    *,
    varying: Collection[str] = (),
) -> str | None:
    """Publish what the leader wrote to ``folder``; returns the address of the files, on the leader.

    A collective over ``gather``: rank 0 brings all files. A store in S3 that fails is tried again for a while: the work
    is done, and all that it needs is a store. ``varying`` are files that differ between equal results.
    Raises ``StorageError`` on every process if it fails, ``RunFailed`` if another result holds the place (``settled``).
    """
    sealed = publication.seal(folder, _sealed(folder)) if context.process.is_leader else None
    deadline = time.monotonic() + PATIENCE_SECONDS
    tried: set[str] = set()
    while True:
        try:
            published = _publish_once(context, store, sealed, gather, meta, tried)
            break
        except StorageError as error:
            # All processes hold the same error, but the clock and the kind of store are rank 0's to judge: if one
            # raised while another tried again, the latter would wait in its next collective in vain.
            is_leader = context.process.is_leader
            if not gather(is_leader and _may_pass(store, error) and time.monotonic() < deadline)[0]:
                raise
            if is_leader:
                context.notice(f"{error}. It is tried again for {PATIENCE_SECONDS / 60:.0f} minutes", "warning")
            time.sleep(PAUSE_SECONDS)
    commit = settled(context, store, published, tried, varying)
    if sealed is None:
        return None
    shutil.rmtree(sealed, ignore_errors=True)
    return announce(context, store, commit)


def settled(
    context: WorkerContext, store: Store, published: CommitResult, tried: Collection[str], varying: Collection[str] = ()
) -> CommitManifest:
    """The commit of the run's result, where it holds what this job has made. All processes call it with one outcome.

    ``tried`` are ids of this job's own saves. Two jobs of one address may run at once, and the first one that ends
    holds the place: an equal result stands for this job's own. Another one does not: this job's is kept beside it.
    Raises ``RunFailed`` then, with the address of what was kept.
    """
    commit, lost, is_leader = published.commit, published.lost, context.process.is_leader
    if commit is not None and (lost is None or commit.save_id in tried):
        if is_leader and lost is not None and lost.save_id != commit.save_id:  # the answer to an earlier try was lost
            publication.discard(store, lost.save)
        return commit
    assert lost is not None
    if commit is not None and commit.run_id == lost.run_id and _content(commit, varying) == _content(lost, varying):
        if is_leader:
            publication.discard(store, lost.save)
            context.notice("another job of this run has published first, and its result is equal to this job's")
        return commit
    if is_leader:
        try:
            publication.keep(store, lost)
        except StorageError as error:
            context.notice(f"a later garbage collection may delete this job's result: {error}", "warning")
    uri = join(store.uri, lost.save.data_prefix.rstrip("/"))
    raise RunFailed(
        f"the result was not published: {published.reason}, and it is not what this job has made. Two jobs have run at "
        f"one address. This job's own result is kept: sm-llm sync {quoted(uri, './result')}"
    )


def _content(manifest: CommitManifest, varying: Collection[str]) -> set[tuple[str, int, str]]:
    return {(it.path, it.size, it.crc64nvme) for it in manifest.files if it.path not in varying}


def announce(context: WorkerContext, store: Store, commit: CommitManifest) -> str:
    """Report a result that was committed: in the model folder, which the platform archives whole, under the stable
    address, and in events and log. Returns the address of the files.

    It may be done again: an attempt that finds the result of one that was killed reports it in its own container.
    """
    uri = join(store.uri, commit.save.data_prefix.rstrip("/"))
    for path, text in pointers(store, commit).items():
        write_atomically(context.container.model / path, text)
    leave_pointers(store, commit)
    context.emit(FinalPublished(uri, commit.size))
    context.log(f"published: {uri} ({commit.size / 2**20:.1f} MiB)")
    return uri


def _publish_once(
    context: WorkerContext, store: Store, sealed: Path | None, gather: Gather, meta: Mapping[str, Any], tried: set[str]
) -> CommitResult:
    process = context.process
    own = publication.new_save(context.job.run_id, None, world_size=process.world_size, node_count=1)
    # Every process draws a save; rank 0's is used. Each try has a new one, for no key is ever written twice.
    save = gather(own)[0]
    tried.add(save.save_id)
    return publication.publish(
        store,
        save,
        sealed,
        node=0,
        leader=process.is_leader,
        gather=gather,
        meta=meta,
        upload=partial(context.agent.call, upload_part),
    )


def _may_pass(store: Store, error: StorageError) -> bool:
    """Whether to wait for the store: a folder does not fix itself, nor does a full disk."""
    return is_s3(store.uri) and cause_of(error) is not Cause.DISK_FULL


def _sealed(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sealed")
