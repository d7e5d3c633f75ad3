"""The prepare task: text to packed rows on one process, published as the run's result."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sm_llm.data.prepare.prepare_rows import prepare
from sm_llm.runs.events.events import DataPrepared, Progress
from sm_llm.spec.tasks import PrepareTask
from sm_llm.worker.checkpoint.earlier import begins_alone
from sm_llm.worker.publishing.publish_final import publish_final, result_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.job import JobSpec
    from sm_llm.worker.context import WorkerContext

_LINE_SECONDS = 5.0


def run(context: WorkerContext, job: JobSpec) -> None:
    """Prepare ``job.task`` (its sources are local). One process works; the others have nothing to do."""
    task = job.task
    assert isinstance(task, PrepareTask)
    if not begins_alone(context):
        return
    folder = result_folder(context)
    account = prepare(task, folder, _Reporter(context))
    context.emit(DataPrepared(account))
    for message in _worth_a_notice(account):
        context.notice(message, level="warning")
    meta = {"kind": "rows", "seq_length": task.seq_length, "spec_digest": context.job.spec_digest}
    publish_final(context, context.store, folder, lambda value: [value], meta)


def _worth_a_notice(account: Mapping[str, Any]) -> list[str]:
    """What a person should see of an account: documents that were not used, with an example, and its own notices."""
    documents = account["documents"]
    rejected = [
        f"{count} rejected: {reason.replace('_', ' ')}, first in {documents['first_rejected'][reason]}"
        for reason, count in documents["rejected"].items()
        if count
    ]
    return [*rejected, *account["notices"]]


class _Reporter:
    """Every report to the event log, and a printed line now and then."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._printed = -_LINE_SECONDS
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        self._context.emit(progress)
        now = time.monotonic()
        # A new phase is printed at once.
        if progress.phase == self._phase and now - self._printed < _LINE_SECONDS:
            return
        self._phase, self._printed = progress.phase, now
        share = f" ({100 * progress.done / progress.total:.0f}%)" if progress.total else ""
        self._context.log(f"{progress.phase}: {progress.done:,.0f} {progress.unit}{share} {progress.detail}".rstrip())
