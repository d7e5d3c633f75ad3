"""Starts one attempt of a run, for every backend: claim, change, submit, record; a failure rolls all of it back."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import job_run_store
from sm_llm.errors import LaunchRefused, StorageError, SubmitError
from sm_llm.launcher.backend import workflows_of
from sm_llm.runs.run_paths import RunPaths
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sm_llm.launcher.backend import Backend, Submission
    from sm_llm.runs.run_record import Attempt
    from sm_llm.runs.run_store import RunStore


class MayRun(SubmitError):
    """A job was created, or nobody knows whether it was: its attempt stays claimed."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Change:
    """What one attempt changes of its run: made once the attempt is claimed, undone if it could not be started.

    ``undo`` is called also where ``make`` stopped half-way.
    """

    make: Callable[[], None] = _nothing
    undo: Callable[[], None] = _nothing


def submit_job(target: Backend, submission: Submission, change: Change | None = None) -> str:
    """Start the attempt that ``submission`` describes; returns its native id.

    Raises ``SubmitError``; then nothing runs and the run is as it was, or (``MayRun``) the attempt is kept for a job.
    """
    run_store, number = job_run_store(submission.job), submission.job.attempt
    with target.starting(run_store, number, submission) as attempt:
        return _start(run_store, attempt, change or Change(), partial(target.submit, submission))


def submit_workflow(target: Backend, run_store: RunStore, number: int, change: Change | None = None) -> str:
    """Start attempt ``number`` of the workflow recorded in ``run_store``; the same for its one native job."""
    with target.starting(run_store, number, None) as attempt:
        return _start(
            run_store, attempt, change or Change(), partial(workflows_of(target).submit_workflow, run_store, number)
        )


def assert_ended(target: Backend, run_store: RunStore) -> None:
    """Raise ``LaunchRefused`` while an earlier attempt of the run has not ended, as its platform knows."""
    record = run_store.record()
    if record.attempts and not (state := target.describe(run_store).state).is_final:
        native = record.attempts[-1].native_id
        follow = f"Follow it with: sm-llm logs -f {quoted(run_store.uri)}, or start another run with --new"
        raise LaunchRefused(f"{record.run_id} is {state.value} already ({native}). {follow}")


def _start(run_store: RunStore, attempt: Attempt, change: Change, submit: Callable[[], str]) -> str:
    with claimed(run_store, attempt, change):
        native_id = submit()
    _record(run_store, attempt, native_id)
    return native_id


def keep_request(submission: Submission) -> None:
    """Store what is sent in the run's own storage, in place of what a try that was refused has left."""
    store, key = job_run_store(submission.job).store, RunPaths.request_key(submission.job.attempt)
    body = (json.dumps(submission.request, indent=2) + "\n").encode()
    if not store.put_if_absent(key, body) and store.get(key) != body:
        store.delete([key])
        store.put_if_absent(key, body)


@contextmanager
def claimed(
    run_store: RunStore, attempt: Attempt, change: Change | None = None, *, exists: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Claim ``attempt`` and make its ``change``; an error inside rolls both back, unless its native job ``exists``.

    Raises ``SubmitError`` where another launch was first; then nothing was changed.
    """
    change = change or Change()
    # The claim comes before the change: of two launches at once only the one that has the attempt changes the run.
    run_store.claim(attempt)
    try:
        change.make()
        yield
    except MayRun:  # a job that nobody can find in the record could never be stopped, so its attempt stays there
        raise
    except BaseException:  # Ctrl-C, too
        # The job of an estimator may exist although the SDK raised an error.
        if not exists() and not _has_begun(run_store, attempt):
            _roll_back(run_store, attempt, change)
        raise


def _has_begun(run_store: RunStore, attempt: Attempt) -> bool:
    """Whether the native job has put itself into the record, whose end it then records, too."""
    held = run_store.record().attempt(attempt.number)
    return held is not None and held.native_id != attempt.native_id


def _roll_back(run_store: RunStore, attempt: Attempt, change: Change) -> None:
    # The claim goes last: until then no other launch sees a run that is half changed.
    try:
        change.undo()
    finally:
        run_store.unclaim(attempt.number)


def _record(run_store: RunStore, attempt: Attempt, native_id: str) -> None:
    """Put the native id into the record where it is not yet: a claim in S3 holds one that was known, and a job on this
    machine has put itself there; a folder's record holds no claims."""
    begun = attempt.model_copy(update={"native_id": native_id})
    try:
        held = run_store.record().attempt(attempt.number)
        if held is None or held.is_claim:
            run_store.update(lambda record: record.with_attempt(begun))
    except StorageError as error:
        raise MayRun(f"{native_id} was started, but the run's record does not hold it: {error}") from error
