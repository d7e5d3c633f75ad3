"""Feeds experiment trackers from the event log, in a thread of the first process that never disturbs the training."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from sm_llm.contract.job_file import job_run_store
from sm_llm.errors import StorageError
from sm_llm.runs.events.events import TrackerOpened, event_files, newest_per_step, read_file
from sm_llm.spec.tasks import TrainTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.spec.training import TrackersSpec
    from sm_llm.worker.context import WorkerContext

    Opener = Callable[[], "ExperimentTracker"]

POLL_SECONDS = 1.0
CLOSE_SECONDS = 10.0
"""How long a finished training waits for its trackers; a failed one waits less, for others wait for its end."""
# A failed process must end soon: the others wait for it.
CLOSE_AFTER_ERROR_SECONDS = 2.0

# Folder in scratch for the events of earlier attempts that are fetched from S3.
_EARLIER = "earlier-events"

# As text, so that only the chosen ones are imported: their libraries are optional.
_TRACKERS = {
    "tensorboard": "sm_llm.worker.trackers.tensorboard_tracker:TensorBoardTracker",
    "mlflow": "sm_llm.worker.trackers.mlflow_tracker:MlflowTracker",
    "wandb": "sm_llm.worker.trackers.wandb_tracker:WandbTracker",
}
_NAMES = {
    "step": {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate"},
    "validation": {"validation_loss": "validation/loss", "perplexity": "validation/perplexity"},
    "throughput": {
        "tokens_per_second": "speed/tokens_per_second",
        "tokens_per_second_per_device": "speed/tokens_per_second_per_device",
        "mfu": "speed/mfu",
        "step_seconds": "speed/step_seconds",
        "data_wait_seconds": "speed/data_wait_seconds",
        "device_memory_bytes": "memory/device_bytes",
        "host_memory_bytes": "memory/host_bytes",
    },
}


class ExperimentTracker(Protocol):
    """One tracker that takes the events of one run."""

    id: str
    """The run's id there: the same in all attempts."""
    uri: str | None
    """Where a person finds it."""

    def refill(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Events of earlier attempts, one of each kind and step, ascending: add what the tracker has not got.

        It may have lost the last ones when its process was killed.
        """

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        """New events in the order they were written. Raises whatever the tracker's library raises."""

    def close(self, *, completed: bool) -> None:
        """Send what is left; ``completed`` is whether the run has published its result."""


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """What trackers show of an event: name -> number, NaN and infinity included; empty for events without numbers."""
    names = _NAMES.get(event["kind"], {})
    return {shown: float(event[name]) for name, shown in names.items() if event.get(name) is not None}


def shown_names() -> list[str]:
    """Every name that ``numbers`` gives."""
    return [shown for names in _NAMES.values() for shown in names.values()]


def earlier_events(context: WorkerContext, step: int) -> list[Mapping[str, Any]]:
    """What earlier attempts have measured up to ``step``, which this one continues: the newest of each kind and step.

    Raises ``StorageError`` if they are in S3 and it does not answer.
    """
    attempt, run_store = context.job.attempt, job_run_store(context.job)
    own = f"events/attempt-{attempt}-"
    run = run_store.copied(
        "events/attempt-", lambda name: "-rank0." in name and own not in name, context.scratch / _EARLIER
    )  # fmt: skip
    files = [path for number, writer, path in event_files(run.events) if number < attempt and writer == "rank0"]
    # A step that was done again after a rollback is in the log twice: the newest counts.
    events = [event for path in files for _, event in read_file(path) if event["kind"] in _NAMES]
    newest = [event for kind in _NAMES for event in newest_per_step(events, kind) if event["step"] <= step]
    return sorted(newest, key=lambda event: int(event["step"]))


def shown_spec(context: WorkerContext) -> dict[str, Any]:
    """The specification as trackers may show it: without environment variables, which may be nobody's business."""
    return context.job.spec.model_dump(mode="json", exclude={"environment"})


@contextmanager
def forwarded_events(context: WorkerContext) -> Iterator[None]:
    """Feed the job's trackers while the block runs, on the first process; a job without trackers costs nothing."""
    task = context.job.spec.task
    wanted = context.process.is_leader and isinstance(task, TrainTask)
    # Only the first process has the events of all.
    openers = load_openers(task.logging.sinks, context) if wanted and isinstance(task, TrainTask) else {}
    if not openers:
        yield
        return
    feed = EventForwarder(context, openers)
    feed.start()
    seconds = CLOSE_AFTER_ERROR_SECONDS
    try:
        yield
        seconds = CLOSE_SECONDS
    finally:
        feed.close(seconds)


def load_openers(spec: TrackersSpec, context: WorkerContext) -> dict[str, Opener]:
    """How to open every tracker that is asked for.

    Their libraries are imported here, by the main thread: two threads that import parts of one package at once can
    deadlock. A library that cannot be imported is reported, and left.
    """
    found: dict[str, Opener] = {}
    for name, tracker in _TRACKERS.items():
        block = getattr(spec, name)
        if block is None:
            continue
        try:
            module, _, kind = tracker.partition(":")
            found[name] = partial(getattr(import_module(module), kind), block, context)
        except Exception as error:
            _report(context, name, error)
    return found


def _report(context: WorkerContext, name: str, error: Exception) -> None:
    cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    context.notice(f"{name} gets no more numbers of this attempt ({cause}); the training continues", "warning")


class EventForwarder:
    """Reads the leader's event file as it grows and passes new events on; one that fails is reported and left."""

    def __init__(
        self, context: WorkerContext, openers: Mapping[str, Opener], *, poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._context = context
        self._openers = dict(openers)
        self._poll_seconds = poll_seconds
        self._log: Path = context.run.event_file(context.job.attempt, "rank0")
        self._offset = 0
        self._trackers: dict[str, ExperimentTracker] = {}
        self._completed = False
        self._is_refilled = context.job.attempt == 1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)

    def start(self) -> None:
        """Begin. The trackers are opened with the first event: by then the task has loaded its own libraries."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Pass on what is left and close the trackers; wait at most ``seconds`` for that."""
        self._closing.set()
        # The thread is a daemon: a tracker that hangs cannot keep the process alive beyond this.
        self._thread.join(seconds)
        if self._thread.is_alive():
            waiting = ", ".join(self._trackers) or "trackers"
            self._context.notice(
                f"{waiting}: not done after {seconds:.0f} s; the run's own events have it all", "warning"
            )

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._closing.wait(self._poll_seconds)  # asked before reading: the last events are never missed
            if events := list(self._new_events()):
                self._pass_on(events)
        for name, tracker in list(self._trackers.items()):
            self._try(name, partial(tracker.close, completed=self._completed))

    def _pass_on(self, events: Sequence[Mapping[str, Any]]) -> None:
        # Each is opened once: one that failed is not tried with every event.
        unopened, self._openers = self._openers, {}
        for name, opener in unopened.items():
            self._try(name, partial(self._open, name, opener))
        start = next((event for event in events if event["kind"] == "start_chosen"), None)
        # Before this attempt's own numbers, so that every tracker gets steps in ascending order.
        if start is not None and not self._is_refilled:
            self._is_refilled = True
            self._refill(int(start["step"]))
        for name, tracker in list(self._trackers.items()):
            self._try(name, partial(tracker.take, events))

    def _refill(self, step: int) -> None:
        """Before the first number of this attempt: what its predecessors measured and a tracker may have lost."""
        try:
            events = earlier_events(self._context, step)
        except StorageError as error:
            self._context.notice(f"trackers may lack steps of earlier attempts: {error}", "warning")
            return
        for name, tracker in list(self._trackers.items()):
            if events:
                self._try(name, partial(tracker.refill, events))

    def _open(self, name: str, opener: Opener) -> None:
        tracker = opener()
        self._trackers[name] = tracker
        self._context.emit(TrackerOpened(name, tracker.id, tracker.uri))
        self._context.log(f"{name}: {tracker.uri or tracker.id}")

    def _new_events(self) -> Iterator[Mapping[str, Any]]:
        if not self._log.is_file():
            return
        for offset, event in read_file(self._log, self._offset):
            self._offset = offset
            self._completed = self._completed or event["kind"] == "final_published"
            yield event

    def _try(self, name: str, action: Callable[[], None]) -> None:
        """Trackers are other people's libraries and networks: whatever goes wrong there is reported, never raised."""
        try:
            action()
        except Exception as error:
            self._trackers.pop(name, None)
            _report(self._context, name, error)
