"""The interface of a backend: a plan becomes a submission (a pure value), a submission becomes a native job.

A backend is a class with the methods of ``Backend``; what not every place has, workflows and shells, are
protocols of their own. It is a row of ``spec.backends.table``, its options are a class of ``spec.backends``, and
nothing outside its own package names it: what others ask is a property of the options, or a method here.

A backend's module is loaded only when it is used (``backend``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from sm_llm.errors import Issue, PlanError
from sm_llm.spec.backends.table import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.launcher.planning.plan import Checks, Plan, Target
    from sm_llm.runs.outcome import Outcome
    from sm_llm.runs.run_record import Attempt
    from sm_llm.runs.run_states import RunState
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.spec.loading.overrides import Override


@dataclass(frozen=True)
class Submission:
    """Exactly what will be sent: ``request`` is a JSON value (a dry run prints it), ``job`` is job.json."""

    backend: str
    job: JobFile
    request: dict[str, Any]
    uploads: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """What has to lie in S3 before the request is sent: address -> contents."""
    document: str = field(default="", repr=False)
    """The request in the platform's own format, which a dry run prints in place of JSON; empty where there is none."""

    def to_json(self) -> dict[str, Any]:
        """The submission as JSON values: what a dry run prints."""
        shown = {"backend": self.backend, "job": self.job.model_dump(mode="json"), "request": self.request}
        return shown | ({"uploads": {uri: len(body) for uri, body in self.uploads.items()}} if self.uploads else {})


@dataclass(frozen=True)
class NativeState:
    """A native job's state in our words, with the raw one for the curious."""

    state: RunState
    detail: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> NativeState:
        """How an attempt ended, as the state of its job."""
        return cls(outcome.state, outcome.reason or "")


@dataclass(frozen=True)
class NativeJob:
    """A job as its platform names it."""

    uri: str
    """``BACKEND://ID``, e.g. ``sagemaker://REGION/JOB``: what ``Run.native_uri`` shows, whatever form was given."""
    find_run: Callable[[], str | None]
    """The address of the run, as the job itself holds it (tag, comment or annotation). None where the job is gone or
    holds none; then the attempts that runs have recorded are searched. Asks the platform; raises ``SubmitError``
    without an answer."""


class Backend(Protocol):
    """One place where jobs run. Its constructor takes no arguments, loads no SDK and opens no connection."""

    @property
    def name(self) -> str:
        """As in the specification (``backend.name``) and in the URIs of native jobs."""

    def plan_checks(self, plan: Plan) -> Checks:
        """Decide what the job gets here, once, and collect everything that stands against it.

        ``plan`` has its numbers (world size, derived values, model, memory) but no ``target`` yet. The answer holds the
        ``target``: a frozen dataclass of this backend with typed values (image, account settings, limits, devices,
        command) that also gives the facts of the plan table (``planning.plan.Target``); ``render`` formats these and
        decides nothing again. Where something is missing, ``target`` is None and ``issues`` state why, all at once,
        each with its dotted path. Warnings are for what works but is hardly meant.

        Contacts nothing and writes nothing; files of this machine may be read.
        """

    def render(self, plan: Plan, job: JobFile) -> Submission:
        """The submission for a plan whose ``target`` is set, exactly as ``submit`` will send it.

        ``job`` has the run's id, folder and attempt, and in ``job.spec`` the specification with absolute places. Pure:
        equal arguments give equal submissions. Contacts nothing and writes nothing; reads the program's files to pack
        them. Raises nothing that ``plan_checks`` could have found.
        """

    def starting(
        self, run_store: RunStore, number: int, submission: Submission | None
    ) -> AbstractContextManager[Attempt]:
        """Held from the check that no attempt of the run is running until attempt ``number`` was submitted.

        Gives the attempt as it is claimed: with its native id where that is known before the start. A workflow has no
        ``submission``. Raises ``LaunchRefused`` for a run that is running, ``SubmitError`` for what the place refuses.
        """

    def submit(self, submission: Submission) -> str:
        """Start the job of an attempt that ``launcher.submission`` has claimed; returns its native id.

        By it every later process finds the job: it is unique beyond this machine (``REGION/JOB``, ``CLUSTER/ID``), or a
        process id of the attempt's host. Raises ``SubmitError`` where there is no job, and ``MayRun`` where nobody
        knows.
        """

    def describe(self, run_store: RunStore) -> NativeState:
        """The state of a run's newest attempt, in the closed list of ``RunState``; the platform's own words in detail.

        A state that is not known is ``UNKNOWN`` with its name as detail, never a guess. An attempt that has ended is
        settled in the run's record. A platform that does not answer: ``SubmitError``.
        """

    def logs(
        self, run_store: RunStore, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]
    ) -> Iterator[str]:
        """Wanted lines of all nodes, rank 0's node first; then new ones while ``still_running``."""

    def stop(self, run_store: RunStore, attempt: Attempt, *, now: bool) -> None:
        """Ask an attempt's job to stop after its current step, saving what it can; ``now`` kills it instead.

        Returns once it is asked. An attempt that has ended is left alone.
        """

    def parse_native(self, text: str) -> NativeJob | None:
        """The job that ``text`` names: its URI (``NAME://ID``) or what the platform itself calls it, e.g. an ARN.

        None where the text is nothing of this backend. Contacts nothing.
        """


@runtime_checkable
class RunsWorkflows(Protocol):
    """A backend that runs the steps of a workflow by itself."""

    def render_workflow(
        self, workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str
    ) -> list[Submission]:
        """What the steps would be sent, in order, for a dry run. ``plans`` has one plan per step. Pure."""

    def submit_workflow(self, run_store: RunStore, attempt: int) -> str:
        """Start the workflow whose record lies in ``run_store``; for its one native job the same as ``submit``."""

    def step_run_store(self, run_store: RunStore, step: str) -> RunStore:
        """Where a step of the workflow in ``run_store`` has its own run, whether it has begun or not."""


@dataclass(frozen=True)
class ClusterNode:
    """One node of a cluster, as its scheduler sees it."""

    name: str
    state: str
    """In the scheduler's own words."""
    reason: str = ""
    """Why it takes no jobs, where the scheduler has a reason."""
    accelerators: int | None = None
    """GPUs or Neuron devices; None where the scheduler does not know them."""
    free: int | None = None
    """Those that a job could get now; None where the scheduler does not know them."""
    health: str = ""
    """What HyperPod reports of it, or does about its fault; empty where that is nothing."""


@runtime_checkable
class ListsNodes(Protocol):
    """A backend whose cluster has nodes of its own that can be listed."""

    def nodes(self, overrides: Sequence[Override], fields: Mapping[str, Any]) -> list[ClusterNode]:
        """The nodes by name. ``overrides`` and ``fields`` are options that name the cluster, or a part of it
        (``spec.loading.backend_settings``).

        Raises ``SpecError`` for other options, ``SubmitError`` where the cluster does not answer.
        """


@dataclass(frozen=True)
class ClusterCheck:
    """One thing that was checked on a cluster."""

    name: str
    outcome: Literal["ok", "warning", "failed", "skipped"]
    detail: str = ""
    """What was found and, where it is not ok, what to do."""
    policy: dict[str, Any] | None = None
    """The IAM policy that is needed, where there is one."""


@runtime_checkable
class ChecksCluster(Protocol):
    """A backend whose cluster can be checked before the first job."""

    def check_cluster(
        self, overrides: Sequence[Override], fields: Mapping[str, Any], tell: Callable[[str], None]
    ) -> Iterator[ClusterCheck]:
        """Check one thing after the other; ``tell`` gets a line about what takes long. Raises ``SpecError``."""


@dataclass(frozen=True)
class ImportedImage:
    """A container image as a file that a cluster's nodes start."""

    path: str
    digest: str
    """Of the image in its registry, ``sha256:…``."""
    is_new: bool
    """False where the file was there already, with this digest."""


@runtime_checkable
class PreparesSoftware(Protocol):
    """A backend on whose cluster the software of jobs can be built."""

    def create_environment(
        self, profile: str, overrides: Sequence[Override], fields: Mapping[str, Any], tell: Callable[[str], None], *,
        python: str, wheels: str | None,
    ) -> str:  # fmt: skip
        """Build a virtual environment, check it on the nodes, and return its place. Raises ``SubmitError``."""

    def import_image(
        self, image: str, overrides: Sequence[Override], fields: Mapping[str, Any], tell: Callable[[str], None]
    ) -> ImportedImage:
        """Bring an image to where nodes start it from. Raises ``SubmitError``."""


@runtime_checkable
class OpensShells(Protocol):
    """A backend with containers or machines that a shell can be opened in."""

    @property
    def shell_needs(self) -> str:
        """What the command needs on this machine, in words."""

    def shell_command(self, run_store: RunStore, native_id: str, node: int) -> list[str]:
        """The command that opens a shell where a node of a running job runs. Raises ``SubmitError`` if none can."""


@runtime_checkable
class KnowsCaller(Protocol):
    """A backend that can ask its platform who calls it."""

    def caller_notes(self, plan: Plan) -> Iterator[str]:
        """Warnings of a plan that depend on whose credentials are used here. Asks the platform once, briefly."""


class Emulation(Protocol):
    """A platform's contract with its containers on this machine: its native request runs here, without the platform.

    A module of the backend's has these functions.
    """

    def issues(self, job: JobSpec) -> list[Issue]:
        """What is missing on this machine, and inputs that the platform would not take."""

    def decide(self, plan: Plan) -> Checks:
        """What the platform would give a job of this machine (``Backend.plan_checks``)."""

    def render(self, plan: Plan, job: JobFile, target: Target) -> Submission:
        """What the platform would be sent. ``target`` is that of ``decide``."""

    def nodes(self, request: Mapping[str, Any], base_of: Callable[[int], Path], port: str) -> list[dict[str, Any]]:
        """Per node its command (``argv``) and variables (``env``); ``base_of`` gives its base folder."""

    def lay_out(
        self, request: Mapping[str, Any], base: Path, node: int, processes: int, options: Mapping[str, Any]
    ) -> None:
        """Fill the base folder of a node as the platform would. ``options`` hold how S3 is reached."""

    def upload(self, submission: Submission) -> None:
        """Store what the request refers to."""

    def alone(self, count: int) -> AbstractContextManager[None]:
        """Held while a job of ``count`` nodes runs, where only one such job can run at a time."""


@runtime_checkable
class CanBeEmulated(Protocol):
    """A backend whose contract the local backend can run jobs under."""

    def emulation(self) -> Emulation:
        """Its functions, loaded when they are needed."""


def emulation(name: str) -> Emulation:
    """The contract of the backend ``name``, which the options of local jobs offer."""
    found = backend(name)
    assert isinstance(found, CanBeEmulated)
    return found.emulation()


def without_workflows(backend: Backend) -> Issue | None:
    """Why a backend takes no workflows; None for one that does."""
    if isinstance(backend, RunsWorkflows):
        return None
    problem, remedy = "does not run workflows", "Launch the steps one by one, or choose another backend"
    return Issue("backend-without-workflows", "backend.name", problem, backend.name, remedy)


def workflows_of(backend: Backend) -> RunsWorkflows:
    """The backend as one that runs workflows. Raises ``PlanError`` where it does not."""
    if not isinstance(backend, RunsWorkflows):
        raise PlanError([it for it in [without_workflows(backend)] if it is not None])
    return backend


def backend(name: str) -> Backend:
    """The backend called ``name`` (the specification already refused unknown names)."""
    module, _, attribute = BACKENDS[name].backend.partition(":")
    return cast("Backend", getattr(import_module(module), attribute)())
