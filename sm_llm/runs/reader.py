"""The read handle of a run: everything comes from where the run is kept, so that any process can hold one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sm_llm.runs.locate import find_run_store, launch_folder, with_recorded_options
from sm_llm.runs.results import RESULT_LINK, result_location
from sm_llm.runs.run_paths import STEPS

if TYPE_CHECKING:
    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_states import RunState
    from sm_llm.runs.run_store import RunStore
    from sm_llm.storage.publication.publish import CheckpointInfo


class RunReader(ABC):
    """A run by its address. Cheap to make; every method reads what is true at that moment.

    Storage holds all but two answers, which only the platform has, and which a subclass brings: the state of an attempt
    that has not ended, and where a workflow's steps were placed. Methods raise ``StorageError`` when a run's storage
    does not answer.
    """

    def __init__(self, run: str | Path | RunStore) -> None:
        """``run`` is the run's folder or ``s3://…`` address. Raises ``StorageError`` if there is no run record."""
        run_store = find_run_store(run) if isinstance(run, str | Path) else run
        self._created_from: RunRecord = run_store.record()
        self.run_store: RunStore = with_recorded_options(run_store, self._created_from)

    @abstractmethod
    def describe(self) -> tuple[RunState, str | None]:
        """The state now and, where there is one, the reason."""

    @abstractmethod
    def step_run_store(self, step: str) -> RunStore:
        """Where a step of this workflow has its own run, whether it has begun or not."""

    @property
    def root(self) -> Path:
        """The run's folder; of a run in S3 the folder where this machine works on it, or copies what it reads to."""
        return self.run_store.root

    @property
    def paths(self) -> RunPaths:
        """The places in ``root``, as far as they are there."""
        return self.run_store.paths

    @property
    def uri(self) -> str:
        return self.run_store.uri

    @property
    def events(self) -> Path:
        """The folder of the run's events as they are now."""
        self.run_store.refresh("events/")
        return self.paths.events

    @property
    def id(self) -> str:
        return self._created_from.run_id

    @property
    def record(self) -> RunRecord:
        """The run record as it stands now."""
        return self.run_store.record()

    @property
    def kind(self) -> str:
        """``train``, ``prepare`` or ``workflow``."""
        spec = self._created_from.spec
        return "workflow" if "steps" in spec else str(spec["task"]["kind"])

    @property
    def steps(self) -> dict[str, Self]:
        """The steps of a workflow that have begun, in order; empty for a job."""
        run_stores = {name: self.step_run_store(name) for name in self._created_from.spec.get("steps", {})}
        return {name: type(self)(run_store) for name, run_store in run_stores.items() if run_store.exists()}

    @property
    def job(self) -> Self:
        """The run whose metrics and result stand for this one: itself, or a workflow's newest step."""
        steps = list(self.steps.values())
        # Metrics are those of a training: a convert or register step behind it reports none.
        training = [step for step in steps if step.kind == "train"]
        return (training or steps or [self])[-1]

    @property
    def launch_folder(self) -> Path | None:
        """The folder that relative inputs are relative to; None if it is gone or nobody but the record names it."""
        return launch_folder(self.run_store, self._created_from)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every start of the run, oldest first."""
        return self.record.attempts

    @property
    def state(self) -> RunState:
        """The state now."""
        return self.describe()[0]

    @property
    def cost(self) -> float | None:
        """What the run has cost in US dollars; None where the backend's time is not priced."""
        return self.record.cost

    @property
    def storage(self) -> str:
        """The address of the storage root that holds the run (for a workflow's step: its workflow)."""
        above, _, own = self.uri.rpartition("/")
        workflow, _, folder = above.rpartition("/")
        # A folder may be called like that of steps by chance: its workflow's record decides.
        is_step = folder == STEPS and self.id.endswith(f"-{own}") and find_run_store(workflow).exists()
        return workflow.rpartition("/")[0] if is_step else above

    @property
    def result(self) -> Path | str | None:
        """What was published (a model, or prepared rows): a folder, or its address in S3. None before it is there."""
        if self.kind != "workflow":
            return result_location(self.run_store, self.id)
        last = self.steps.get(list(self._created_from.spec["steps"])[-1])
        return None if last is None else last.result

    @property
    def result_link(self) -> Path | str | None:
        """The stable address ``<run>/result`` once there is a result; it stays the same whatever save is committed.

        ``sync``, sources of other jobs and ``TrainingInput`` of the SDK take it, also in S3. A folder without links
        has ``result`` in its place. None before the result is published.
        """
        # S3 has no links: a worker resolves this address to the save that was committed.
        if self.run_store.is_remote and self.kind != "workflow":
            return None if self.result is None else f"{self.uri}/{RESULT_LINK}"
        link = self.root / RESULT_LINK
        return link if link.exists() else self.result

    def checkpoints(self, *, deep: bool = False) -> list[CheckpointInfo]:
        """Every committed checkpoint by ascending step: size in bytes, time, and whether it could be continued from.

        Names and sizes are compared; ``deep`` also reads all the data and compares checksums.
        """
        from sm_llm.storage.publication.publish import list_checkpoints

        job = self.job
        return list_checkpoints(job.run_store.store, run_id=job.id, deep=deep)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"
