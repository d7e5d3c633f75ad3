"""Training jobs that exist: their state, their end in the run's record, their logs, and how they are stopped."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import SubmitError
from sm_llm.launcher.attempt_outcome import Evidence, failures_in_events, first_failure, judge, record_outcome, stopped
from sm_llm.launcher.aws_account import Expired, aws_errors
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.sagemaker.account import NoSuchJob, describe, split_native
from sm_llm.launcher.backends.sagemaker.jobs.cloudwatch import CloudWatchCache
from sm_llm.launcher.backends.sagemaker.jobs.no_logs import NoStream
from sm_llm.launcher.backends.sagemaker.jobs.states import billable_seconds, native_state, seconds, used_seconds
from sm_llm.launcher.backends.sagemaker.request.distribution import TEE
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG
from sm_llm.launcher.observe.logs import read_logs
from sm_llm.runs.events.events import read_events
from sm_llm.runs.outcome import STARTING_SECONDS
from sm_llm.runs.run_states import RunState
from sm_llm.storage.uri import flattened
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sm_llm.launcher.aws_account import AwsAccount
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore

POLL_SECONDS = 5.0
"""Between two reads of the logs of a job that runs."""


def state_of(run_store: RunStore, record: RunRecord, connect: Callable[[str], AwsAccount]) -> NativeState:
    """The state of the newest attempt in ``record``. A job that has ended is settled there, once and for all."""
    last = record.attempts[-1]
    region, name = split_native(last.native_id)
    try:
        with leaving_alone(run_store):
            job = describe(connect(region), name)
    except NoSuchJob:
        # The attempt is claimed before its job is created, and another process may read of it in between.
        if abs(time.time() - last.started) < STARTING_SECONDS:
            return NativeState(RunState.PENDING, "its training job is being created")
        return _gone(run_store, record.run_id, last)
    native = native_state(job, time.time())
    return _settle(run_store, record.run_id, last, native, job) if native.state.is_final else native


@contextmanager
def leaving_alone(run_store: RunStore) -> Iterator[None]:
    """Expired credentials are the client's trouble, not the job's: print how to come back."""
    try:
        yield
    except Expired as error:
        raise SubmitError(
            f"{error}. The job continues; come back to it with: sm-llm logs {quoted(run_store.uri)} --follow"
        ) from error


def _gone(run_store: RunStore, run_id: str, attempt: Attempt) -> NativeState:
    run_store.refresh(f"events/attempt-{attempt.number}-")
    return NativeState.of(
        record_outcome(run_store, attempt, stopped(run_store, run_id, "its training job was never created"))
    )


def _settle(
    run_store: RunStore, run_id: str, attempt: Attempt, native: NativeState, job: Mapping[str, Any]
) -> NativeState:
    # First the events, which hold the cause; a store that does not answer leaves the attempt unsettled.
    run_store.refresh(f"events/attempt-{attempt.number}-")
    found = _evidence(run_store.paths, attempt.number, native, seconds(job["CreationTime"]))
    bill = {"billable_seconds": billable_seconds(job), "used_seconds": used_seconds(job)}
    return NativeState.of(
        record_outcome(run_store, attempt, judge(run_store, run_id, attempt.number, found), bill=bill)
    )


def _evidence(paths: RunPaths, number: int, native: NativeState, created: float) -> Evidence:
    """What is known of an ended job. Reports from before it was ``created`` are those of an earlier job."""
    failures = [it for it in failures_in_events(paths, number) if it[0] >= created]
    events = (it for it in read_events(paths.events) if it["attempt"] == number and it["time"] >= created)
    stops = [str(it["reason"]) for it in events if it["kind"] == "stopped"]
    stop = stops[-1] if stops else None
    return Evidence(native.state, native.detail, None, first_failure(failures), stop, since=created)


def stop_job(run_store: RunStore, attempt: Attempt, *, now: bool, connect: Callable[[str], AwsAccount]) -> None:
    """Ask the processes to stop through the run's storage, and SageMaker to end the job in its 120 s.

    The training toolkit passes no signal on, so the first is what they heed; ``now`` leaves it out.
    """
    region, name = split_native(attempt.native_id)
    if not now:
        run_store.request_stop(attempt.number)
    with leaving_alone(run_store), aws_errors(f"cannot stop training job {name}"):
        connect(region).client("sagemaker").stop_training_job(TrainingJobName=name)


def logs_of(
    run_store: RunStore, attempt: int, wanted: LogFilter, still_running: Callable[[], bool],
    connect: Callable[[str], AwsAccount],
) -> Iterator[str]:  # fmt: skip
    """Wanted lines of an attempt's hosts, rank 0's first; then new ones while ``still_running``."""
    native_id = next(it.native_id for it in run_store.record().attempts if it.number == attempt)
    region, name = split_native(native_id)
    # Copied into the folder of the run on this machine: the lines are then read as those of a local run.
    cache = CloudWatchCache(connect(region), name, run_store.paths.logs(attempt))
    if wanted.prefix:
        with leaving_alone(run_store):
            wanted = _as_printed(wanted, describe(connect(region), name))

    absence = NoStream(connect(region), name, run_store.uri)

    def check() -> bool:
        alive = still_running()  # asked before the rest, so that the last lines are never missed
        with leaving_alone(run_store):
            cache.pull()
            if not cache.has_streams:
                absence.note()
        return alive

    return read_logs(run_store.paths, attempt, wanted, still_running=check, poll=POLL_SECONDS)


def _as_printed(wanted: LogFilter, job: Mapping[str, Any]) -> LogFilter:
    """The filter for a host whose lines do not hold their rank, as those of an older release: all lines of the host."""
    return wanted if TEE in job.get("Environment", {}) else replace(wanted, prefix="")


def run_of(native: str, connect: Callable[[str], AwsAccount]) -> str | None:
    """The address of the run that a training job is an attempt of, by its tag; None for a job that is not ours."""
    region, name = split_native(native)
    account = connect(region)
    try:
        # Tags are listed by ARN, and the account in it may be another one's.
        arn = describe(account, name)["TrainingJobArn"]
    except NoSuchJob:
        return None
    with aws_errors(f"cannot read the tags of training job {name}"):
        pages = account.client("sagemaker").get_paginator("list_tags").paginate(ResourceArn=arn)
        tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
    return flattened(tags[RUN_TAG]) if RUN_TAG in tags else None
