"""The interface of a backend: a plan becomes a submission (a pure value), a submission becomes a native job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from sm_llm.contract.job_file import JobFile
    from sm_llm.errors import Fault
    from sm_llm.launcher.observe.logs import LogFilter
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.planning.review import Review
    from sm_llm.runs.run_home import RunHome
    from sm_llm.runs.run_record import Attempt
    from sm_llm.runs.states import RunState
    from sm_llm.spec.job import JobSpec


@dataclass(frozen=True)
class Submission:
    """Exactly what will be sent: ``request`` is a JSON value (a dry run prints it), ``job`` is job.json."""

    backend: str
    job: JobFile
    request: dict[str, Any]
    uploads: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """What has to lie in S3 before the request is sent: address -> contents."""

    def to_json(self) -> dict[str, Any]:
        """The submission as JSON values: what a dry run prints."""
        shown = {"backend": self.backend, "job": self.job.model_dump(mode="json"), "request": self.request}
        return shown | ({"uploads": {uri: len(body) for uri, body in self.uploads.items()}} if self.uploads else {})


@dataclass(frozen=True)
class NativeState:
    """A native job's state in our words, with the raw one for the curious."""

    state: RunState
    detail: str = ""


class Backend(Protocol):
    """One place where jobs run."""

    name: str

    def check(self, job: JobSpec) -> list[Fault]:
        """What this place cannot do for the job, found at plan time."""

    def review(self, plan: Plan) -> Review:
        """More faults, warnings and facts, once the numbers of a plan are known. Touches nothing."""

    def command(self, job: JobSpec) -> tuple[tuple[str, ...], ...]:
        """The command of every node, before a run's id and folder exist."""

    def render(self, plan: Plan, job: JobFile) -> Submission:
        """The submission for a plan. Pure: touches nothing."""

    def starting(self, home: RunHome, number: int, submission: Submission | None) -> AbstractContextManager[Attempt]:
        """Held from the check that no attempt of the run is running until attempt ``number`` was submitted.

        Gives the attempt as it is claimed: with its native id where that is known before the start. A workflow has no
        ``submission``. Raises ``LaunchRefused`` for a run that is running, ``SubmitError`` for what the place refuses.
        """

    def submit(self, submission: Submission) -> str:
        """Start the job of an attempt that ``launcher.submission`` has claimed; returns its native id.

        Raises ``SubmitError`` where there is no job, and ``MayRun`` where nobody knows.
        """

    def submit_workflow(self, home: RunHome, attempt: int) -> str:
        """Start the workflow whose record lies in ``home``; the same for its one native job."""

    def step_home(self, home: RunHome, step: str) -> RunHome:
        """Where a step of the workflow in ``home`` has its own run, if it has begun."""

    def describe(self, home: RunHome) -> NativeState:
        """The state of a run's newest attempt."""

    def logs(self, home: RunHome, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]) -> Iterator[str]:
        """Wanted lines of all nodes, rank 0's node first; then new ones while ``still_running``."""

    def stop(self, home: RunHome, attempt: Attempt, *, now: bool) -> None:
        """Ask an attempt's job to stop after its current step, saving what it can; ``now`` kills it instead."""

    def shell_command(self, home: RunHome, native_id: str, node: int) -> list[str]:
        """The command that opens a shell where a node of a running job runs. Raises ``SubmitError`` if none can."""

    def native_uri(self, attempt: Attempt) -> str:
        """The address of an attempt's native job, e.g. ``local://host/process``."""

    def find(self, native: str) -> str | None:
        """The address of the run of a native job (its URI without the scheme), where the job itself records it."""
