"""SageMaker's states in our words: capacity, downloading, training, interrupted, out of time, failed."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.backend import NativeState
from sm_llm.runs.run_states import RunState
from sm_llm.terminal import duration

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDARY: dict[str, tuple[RunState, str]] = {
    "Starting": (RunState.PENDING, "waiting for capacity"),
    "LaunchingMLInstances": (RunState.PENDING, "waiting for capacity"),
    "Pending": (RunState.PENDING, "waiting for capacity"),
    "PreparingTrainingStack": (RunState.PENDING, "preparing the instances"),
    "DownloadingTrainingImage": (RunState.PENDING, "pulling the image"),
    "Downloading": (RunState.PENDING, "downloading input channels"),
    "Training": (RunState.RUNNING, ""),
    "Updating": (RunState.RUNNING, "changing the warm pool"),
    "Uploading": (RunState.RUNNING, "uploading what is left in SageMaker's own folders"),
    "Interrupted": (RunState.RESTARTING, "spot capacity was taken away; waiting for more"),
    "Restarting": (RunState.RESTARTING, "SageMaker starts the job again after an internal issue"),
    "Stopping": (RunState.RUNNING, "stopping"),
    "Stopped": (RunState.STOPPED, "stopped on request"),
    "MaxRuntimeExceeded": (RunState.INTERRUPTED, "the time limit backend.max_run_seconds was reached"),
    "MaxWaitTimeExceeded": (RunState.INTERRUPTED, "no spot capacity came within backend.max_wait_seconds"),
    "Completed": (RunState.COMPLETED, ""),
    "Failed": (RunState.FAILED, ""),
}
"""Secondary status -> our state and words; every one of the service's, which a test compares with its model."""

STOPPING_BOUND_SECONDS = 1800
"""A job gets 120 s to stop, and some minutes to clear up; longer than this it is stuck."""
# Words in the service's messages, which have no code for it.
_CAPACITY = ("capacity", "unable to provision")


def native_state(job: Mapping[str, Any], now: float) -> NativeState:
    """The state of a job as ``DescribeTrainingJob`` returns it, ``now`` in seconds since the epoch."""
    secondary = str(job.get("SecondaryStatus", ""))
    # The service may have a state that this release does not know: nothing is concluded from it.
    if secondary not in SECONDARY:
        return NativeState(RunState.UNKNOWN, f"{job.get('TrainingJobStatus')} / {secondary}")
    state, words = SECONDARY[secondary]
    if state is RunState.FAILED:
        return NativeState(state, _failure(str(job.get("FailureReason") or "no reason was given")))
    if secondary == "Stopping":
        return NativeState(state, _stopping(job, now))
    message = _last_message(job)
    if state is RunState.PENDING and any(word in message.lower() for word in _CAPACITY):
        words = f"waiting for capacity: {message}"
    return NativeState(state, words)


def used_seconds(job: Mapping[str, Any]) -> int | None:
    """Seconds that the nodes ran, all of them together; None before the job has ended, or where it never began."""
    begun, ended = job.get("TrainingStartTime"), job.get("TrainingEndTime")
    if (used := job.get("TrainingTimeInSeconds")) is None:
        if begun is None or ended is None:
            return None
        used = seconds(ended) - seconds(begun)
    # The service counts the time of the job, not that of each node.
    return int(used) * node_count(job)


def billable_seconds(job: Mapping[str, Any]) -> int | None:
    """Seconds that are billed, of all nodes together; None while nobody knows."""
    billed = job.get("BillableTimeInSeconds")
    return None if billed is None else int(billed) * node_count(job)


def node_count(job: Mapping[str, Any]) -> int:
    """Nodes of a job."""
    resources = job.get("ResourceConfig", {})
    groups = resources.get("InstanceGroups") or []
    return sum(group["InstanceCount"] for group in groups) or int(resources.get("InstanceCount") or 1)


def seconds(moment: Any) -> float:
    """A time of the service, a ``datetime`` or a number, as seconds since the epoch."""
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)


def _failure(reason: str) -> str:
    """The service's reason without its frame: whose issue it is first, then the first line that names it."""
    kind, _, rest = reason.partition(": ")
    # The service reports a lack of capacity in several forms.
    if kind == "CapacityError" or any(word in reason.lower() for word in _CAPACITY):
        return f"capacity: {reason}"
    if kind in ("AlgorithmError", "ExecuteUserScriptError"):
        # The toolkit's own kind may follow that of the service.
        return rest.removeprefix("ExecuteUserScriptError:").strip() or reason
    return f"SageMaker: {reason}" if kind in ("InternalServerError", "ClientError") else reason


def _stopping(job: Mapping[str, Any], now: float) -> str:
    """How long a job has been stopping; past the bound what a support case needs."""
    last = (job.get("SecondaryStatusTransitions") or [{}])[-1]
    if "StartTime" not in last:
        return "stopping"
    waited = now - seconds(last["StartTime"])
    if waited <= STOPPING_BOUND_SECONDS:
        return f"stopping for {duration(waited)}"
    since = datetime.fromtimestamp(seconds(last["StartTime"])).astimezone().isoformat(timespec="seconds")
    return (
        f"stuck in Stopping for {duration(waited)}. Open a support case with this text: Training job "
        f"{job.get('TrainingJobArn')} was asked to stop and has been in status Stopping since {since} "
        f"({node_count(job)} x {job.get('ResourceConfig', {}).get('InstanceType')}); please end it, and check its bill"
    )


def _last_message(job: Mapping[str, Any]) -> str:
    transitions = job.get("SecondaryStatusTransitions") or []
    return str(transitions[-1].get("StatusMessage") or "") if transitions else ""
