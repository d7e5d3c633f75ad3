"""What an earlier job has left in this job's run: its result, or a beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import RunFailed
from sm_llm.runs.events.checkpoints import NothingDone
from sm_llm.runs.events.events import AttemptStarted
from sm_llm.storage.hub.hub_ledger import LEDGERS
from sm_llm.storage.publication.publish import find_final
from sm_llm.storage.publication.result import leave_pointers, remove_pointers
from sm_llm.storage.publication.retire import retire_all
from sm_llm.storage.stored_names import usable
from sm_llm.storage.uri import join
from sm_llm.terminal import quoted
from sm_llm.worker.publishing.publish_final import announce
from sm_llm.worker.versions import versions

if TYPE_CHECKING:
    from sm_llm.worker.context import WorkerContext


def begins_alone(context: WorkerContext) -> bool:
    """Whether this process does the work of a task of one process, whose attempt is logged then.

    The others have nothing to do, and neither has an attempt after one that was killed once it had published.
    """
    if not context.process.is_leader:
        return False
    context.emit(AttemptStarted(context.process.world_size, "cpu", None, versions()))
    return not is_published(context)


def begin_anew(context: WorkerContext, reason: str) -> None:
    """Set all that another job has published in this run aside, and the pins of what it read. The leader's business.

    Raises ``StorageError``.
    """
    other = str(context.replaced_job).rpartition("/")[2]
    # Commits first: without them nothing of the other job is found any more, should this be cut short.
    found = retire_all(context.store, label=other)
    # The pins would give this job the versions of sources that the other one has read.
    ledgers = usable((it.key for it in context.store.list(LEDGERS)), context.store.uri)
    remove_pointers(context.store)
    context.store.delete(ledgers)
    reported = (
        f"This run starts from step 0; the commits of what {other} published ({found}) are in ckpt/retired/{other}"
    )
    context.notice(f"{reason}. {reported}", "warning")


def replace_finished(context: WorkerContext) -> None:
    """Begin anew where another job has finished this run: a pipeline starts a job only if no cached step stands in.

    The leader's business, before anything is read. Raises ``StorageError``.
    """
    if context.replaced_job is not None and find_final(context.store, run_id=context.job.run_id) is not None:
        begin_anew(context, f"the result of {context.replaced_job} does not stand in for this job: no cache was hit")


def is_published(context: WorkerContext) -> bool:
    """Whether this very job, or an earlier attempt of its run, has published the result. The leader's business.

    Then the attempt does nothing but report both. Raises ``RunFailed`` for the result of another specification.
    """
    final = find_final(context.store, run_id=context.job.run_id)
    if final is None:
        return False
    uri = join(context.store.uri, final.save.data_prefix.rstrip("/"))
    digest, own = final.meta.get("spec_digest"), context.job.spec_digest
    # Else a changed job would end at once and report the result of other settings as its own.
    if digest not in (None, own):
        # The result is whole all the same, and its address has to exist.
        leave_pointers(context.store, final)
        raise RunFailed(
            f"{uri} is the result of another specification ({str(digest)[:12]}, this job has {own[:12]}). "
            f"Begin another run: sm-llm rerun {quoted(context.store.uri)}, or in fit the option --new"
        )
    # The attempt that created the commit may have been killed before it reported that, and its container is gone.
    announce(context, context.store, final)
    reason = "the result of this run is published already; there is nothing to do"
    context.log(reason)
    context.emit(NothingDone(reason, uri))
    return True
