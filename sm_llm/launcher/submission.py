"""Starts one attempt of a run, for every backend: claim, change, submit, record; a failure rolls all of it back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import job_home
from sm_llm.errors import StorageError, SubmitError
from sm_llm.launcher.backends.base import workflows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.backends.base import Backend, Submission
    from sm_llm.runs.run_home import RunHome
    from sm_llm.runs.run_record import Attempt


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
    home, number = job_home(submission.job), submission.job.attempt
    with target.starting(home, number, submission) as claimed:
        return _start(home, claimed, change or Change(), partial(target.submit, submission))


def submit_workflow(target: Backend, home: RunHome, number: int, change: Change | None = None) -> str:
    """Start attempt ``number`` of the workflow recorded in ``home``; the same for its one native job."""
    with target.starting(home, number, None) as claimed:
        return _start(home, claimed, change or Change(), partial(workflows_of(target).submit_workflow, home, number))


def _start(home: RunHome, claimed: Attempt, change: Change, submit: Callable[[], str]) -> str:
    home.claim(claimed)
    try:
        change.make()
        native_id = submit()
    except MayRun:
        raise
    except BaseException:  # Ctrl-C, too
        if not _has_begun(home, claimed):
            _roll_back(home, claimed, change)
        raise
    _record(home, claimed, native_id)
    return native_id


def _has_begun(home: RunHome, claimed: Attempt) -> bool:
    """Whether the native job has put itself into the record, whose end it then records, too."""
    held = home.record().attempt(claimed.number)
    return held is not None and held.native_id != claimed.native_id


def _roll_back(home: RunHome, claimed: Attempt, change: Change) -> None:
    # The claim goes last: until then no other launch sees a run that is half changed.
    try:
        change.undo()
    finally:
        home.unclaim(claimed.number)


def _record(home: RunHome, claimed: Attempt, native_id: str) -> None:
    """Put the native id into the record where it is not yet: a claim in S3 holds one that was known, and a job on this
    machine has put itself there; a folder's record holds no claims."""
    begun = claimed.model_copy(update={"native_id": native_id})
    try:
        held = home.record().attempt(claimed.number)
        if held is None or held.is_claim:
            home.update(lambda record: record.with_attempt(begun))
    except StorageError as error:
        raise MayRun(f"{native_id} was started, but the run's record does not hold it: {error}") from error
