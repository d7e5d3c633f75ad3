"""Whether a checkpoint is continued as what it is: the same model, order of data and course of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.contract.identity import (
    DATA_CONTENT,
    TOKENIZER_CONTENT,
    Identity,
    WaysOut,
    differences,
    identity,
    is_partial,
    length_issue,
    recorded_identity,
    refusals,
)
from sm_llm.data.content import data_digest, tokenizer_digest
from sm_llm.errors import CheckpointError, DataError
from sm_llm.spec.training import CheckpointStart
from sm_llm.spec.validation.runner import without_duplicates

if TYPE_CHECKING:
    from sm_llm.worker.checkpoint.start_resolver import Start
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.runtime.collectives import ControlGroup
    from sm_llm.worker.training.job_setup import Setup


def own_identity(context: WorkerContext, setup: Setup, control: ControlGroup) -> Identity:
    """What this job's checkpoints are states of. A collective: every node reads its own copy of the data.

    Raises ``DataError`` on all processes if one cannot read them, or if the nodes have different data.
    """
    # An error is kept, not raised: every process must come to the exchange below.
    contents, error = None, None
    if context.process.is_node_leader:
        try:
            contents = (data_digest(setup.task.data), tokenizer_digest(setup.task.tokenizer))
        except DataError as caught:
            error = caught
    if problem := control.outcome(error):
        raise DataError(str(problem))
    found = {it for it in control.gather(contents) if it is not None}
    if len(found) > 1:
        raise DataError("task.data: the nodes have different training data or tokenizers. Give all of them the same")
    # Exactly one is left: every node leader gave one, or an error was raised.
    data, tokenizer = found.pop()
    return identity(
        setup.task,
        setup.config,
        setup.derived,
        setup.layout,
        contents={DATA_CONTENT: data, TOKENIZER_CONTENT: tokenizer},
        rows=setup.train.count,
    )


def check_continuation(context: WorkerContext, start: Start, now: Identity, setup: Setup) -> None:
    """Compare a checkpoint with the job that is to continue it, before anything is built.

    What differs and may is reported by name. Raises ``CheckpointError``, all issues at once, for another model, for
    another order of data that nobody has asked for, for a schedule of another length that nobody has stated, and for
    fewer steps than are done.
    """
    found = differences(recorded_identity(start.meta), now)
    task_start = setup.task.start
    issues = refusals(
        found,
        now,
        start.step,
        WaysOut(str(start.uri or context.store.uri) if not start.is_own else context.store.uri),
        is_own=start.is_own,
        allow_other_data=isinstance(task_start, CheckpointStart) and task_start.allow_other_data,
        is_stated=setup.task.optim.schedule_steps is not None,
    )
    own = recorded_identity(start.meta) if start.is_own else None
    if (issue := length_issue(setup.task, setup.total_steps, start.step, may_equal=True, own=own)) is not None:
        # The length comes first, without what it already covers.
        issues = [issue, *without_duplicates(issues, [issue])]
    if issues:
        listed = "\n".join(f"  - {issue}" for issue in issues)
        raise CheckpointError(f"the checkpoint of step {start.step} cannot be continued like this:\n{listed}")
    # Such a checkpoint is accepted, or no run of that release could be continued.
    if is_partial(start.meta):
        words = "was saved by an earlier release, which recorded neither model nor data: only numbers were compared"
        context.notice(f"the checkpoint of step {start.step} {words}", "warning")
    # In this run it is what a restart after the last save looks like; from another run it is probably not meant.
    if start.step == setup.total_steps:
        words = "has done all steps that are asked for: nothing is trained, its model is published as it is"
        context.notice(f"the checkpoint of step {start.step} {words}", "info" if start.is_own else "warning")
    if found:
        context.notice(f"continued with changes: {'; '.join(map(str, found))}")
