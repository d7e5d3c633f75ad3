"""The definition of a SageMaker Pipeline from a workflow, as a value: the SDK takes no part in it.

Every step's run lies under a key made of the step's name and a digest of its specification, its code and its image, so
that a step whose cache is hit points the next one to data that exist. Variables of the pipeline are overrides of the
specification: they travel as hyperparameters, and their values are part of the run's address.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import RUN_HYPERPARAMETER
from sm_llm.contract.job_file import JobFile
from sm_llm.errors import Issue, PlanError
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_variables import TYPES, Variable, variables_of
from sm_llm.launcher.backends.sagemaker.pipelines.run_address import address_issues
from sm_llm.launcher.backends.sagemaker.render import render as render_job
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG, request_region
from sm_llm.launcher.planner import plan_workflow
from sm_llm.launcher.planning.plan import assert_supported
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.job import StepSpec, spec_digest
from sm_llm.spec.machines.compute import ComputeSpec
from sm_llm.spec.references import references, resolve, step_dependencies, workflow_job
from sm_llm.spec.tasks import RegisterTask
from sm_llm.spec.validation.runner import blocked_by, refuse, run
from sm_llm.spec.validation.task_checks import check_registration
from sm_llm.storage.publication.result import RESULT
from sm_llm.storage.uri import fill, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.spec.validation.runner import Checker

REGISTER = "register"
# The only version of the definition language that the service documents.
VERSION = "2020-12-01"
# Limits of CreateTrainingJob: entries of HyperParameters and characters of a value.
_MOST_HYPERPARAMETERS = 100
_LONGEST_HYPERPARAMETER = 2500
_MOST_DAYS = 3650
# As many digits as request_digest gives, so that lengths that are checked do not change.
_STAND_IN = "0" * 12
_STEP = "steps."
_EXPERIMENT = {
    "ExperimentName": {"Get": "Execution.PipelineName"},
    "TrialName": {"Get": "Execution.PipelineExecutionId"},
}
EXECUTION: dict[str, str] = _EXPERIMENT["TrialName"]
"""Part of a run's address where steps are not cached: every execution trains anew."""


@dataclass(frozen=True)
class Register:
    """A step ``register`` more: what a step has published becomes a version of a model (``RegisterTask``)."""

    step: str
    group: str
    """Name of the model package group."""
    image_uri: str
    """Image that serves the model."""
    instance_type: str = "ml.m5.large"
    """What the step itself runs on: only a job can find under which address a run has published."""


@dataclass(frozen=True)
class PipelineStep:
    """One step: its request (expressions of the pipeline language in it), and what it needs in S3."""

    name: str
    arguments: dict[str, Any]
    job: JobFile = field(repr=False)
    after: tuple[str, ...] = ()
    uploads: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class PipelineDefinition:
    """A pipeline as a value. Equal workflows give equal ones."""

    name: str
    role: str
    region: str
    variables: tuple[Variable, ...]
    steps: tuple[PipelineStep, ...]
    cache_days: int | None = 30

    def to_json(self) -> dict[str, Any]:
        """The definition as the service takes it."""
        return {
            "Version": VERSION,
            "Metadata": {},
            "Parameters": [
                {"Name": it.name, "Type": TYPES[type(it.default)], "DefaultValue": it.default} for it in self.variables
            ],
            "PipelineExperimentConfig": _EXPERIMENT,
            "Steps": [self._step(step) for step in self.steps],
        }

    def _step(self, step: PipelineStep) -> dict[str, Any]:
        shown: dict[str, Any] = {"Name": step.name, "Type": "Training", "Arguments": step.arguments}
        # Stated, because a dependency is not visible to the service where an address is fixed text.
        if step.after:
            shown["DependsOn"] = list(step.after)
        if self.cache_days is not None:
            shown["CacheConfig"] = {"Enabled": True, "ExpireAfter": f"P{self.cache_days}D"}
        return shown


def render(
    workflow: WorkflowSpec,
    variables: Mapping[str, str] | None = None,
    register: Register | None = None,
    cache_days: int | None = 30,
    plans: Sequence[Plan] | None = None,
) -> PipelineDefinition:
    """The pipeline of a workflow on the sagemaker backend. Reads files of this machine, nothing else.

    ``variables`` are names of parameters and the dotted paths that they override, ``steps.train.task.max_steps``;
    defaults are the workflow's values. ``cache_days``: how long a finished step stands in for an equal one; None runs
    every step in every execution, in a run of its own. ``plans`` are the plans of the steps, where they are
    made already: for a dry run, which also shows what cannot run yet. Raises ``PlanError`` with every issue.
    """
    if workflow.backend.name != "sagemaker":
        remedy = "Set backend.name=sagemaker"
        raise PlanError(
            [
                Issue(
                    "pipeline-backend-unsupported",
                    "backend.name",
                    "a pipeline runs on SageMaker",
                    workflow.backend.name,
                    remedy,
                )
            ]
        )
    refuse(run(PIPELINE_CHECKERS, PipelineCall(workflow, cache_days)))
    if register is not None:
        workflow = _with_registration(workflow, register)
    known = variables_of(workflow, variables or {})
    steps: list[PipelineStep] = []
    # Filled step by step, because a step refers to earlier ones only.
    locations: dict[str, list[Any]] = {}
    if plans is None:
        plans = plan_workflow(workflow)
        assert_supported(plans)
    for plan in plans:
        assert plan.step is not None
        steps.append(_training(workflow, plan, known, locations, more=[EXECUTION] if cache_days is None else []))
    found = PipelineDefinition(
        workflow.name,
        steps[0].arguments["RoleArn"],
        request_region(steps[0].arguments),
        known,
        tuple(steps),
        cache_days,
    )
    refuse(run(DEFINITION_CHECKERS, found))
    return found


@dataclass(frozen=True)
class PipelineCall:
    """What a pipeline is defined from, beside the plans of its steps."""

    workflow: WorkflowSpec
    cache_days: Any


def check_cache_days(call: PipelineCall) -> Iterator[Issue]:
    """Days that the service does not take."""
    days = call.cache_days
    if days is not None and (isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= _MOST_DAYS):
        message = f"must be a whole number of days from 1 to {_MOST_DAYS:,}"
        remedy = "Give a number of days, or None to run every step every time"
        yield Issue("pipeline-cache-days-invalid", "cache_days", message, days, remedy)


def check_job_names(call: PipelineCall) -> Iterator[Issue]:
    """A name of jobs, which the service names itself."""
    base = SageMakerOptions.of(call.workflow).base_job_name
    if base is not None:
        message, remedy = "has no effect: Pipelines names the jobs of its steps itself", "Leave it out"
        yield Issue("pipeline-job-name-without-effect", "backend.base_job_name", message, base, remedy)


PIPELINE_CHECKERS: tuple[Checker[PipelineCall], ...] = (check_cache_days, check_job_names)


def check_hyperparameters(found: PipelineDefinition) -> Iterator[Issue]:
    """Limits of the service on what the variables of a step become."""
    for step in found.steps:
        yield from _hyperparameter_issues(step, found.variables)


@blocked_by("pipeline-hyperparameters-too-many", "pipeline-default-too-long")
def check_addresses(found: PipelineDefinition) -> Iterator[Issue]:
    """Defaults of variables with which the address of a run cannot be made."""
    defaults = {it.name: str(it.default) for it in found.variables}
    shown = [{"Name": step.name, "Arguments": step.arguments} for step in found.steps]
    yield from address_issues(shown, defaults, ())


DEFINITION_CHECKERS: tuple[Checker[PipelineDefinition], ...] = (check_hyperparameters, check_addresses)


def _hyperparameter_issues(step: PipelineStep, known: tuple[Variable, ...]) -> Iterator[Issue]:
    count = len(step.arguments["HyperParameters"])
    if count > _MOST_HYPERPARAMETERS:
        problem = f"step {step.name} would get {count} hyperparameters; the service takes {_MOST_HYPERPARAMETERS}"
        yield Issue(
            "pipeline-hyperparameters-too-many",
            "variables",
            problem,
            remedy="Write what does not vary into the workflow",
        )
    for it in known:
        if it.step == step.name and len(str(it.default)) > _LONGEST_HYPERPARAMETER:
            problem = f"has {len(it.default):,} characters; a hyperparameter takes {_LONGEST_HYPERPARAMETER:,}"
            yield Issue(
                "pipeline-default-too-long",
                f"variables.{it.name}",
                problem,
                remedy="Write it into the workflow: job.json takes any length",
            )


def _training(
    workflow: WorkflowSpec, plan: Plan, known: tuple[Variable, ...], locations: dict[str, list[Any]], more: list[Any]
) -> PipelineStep:
    """One task as a training step; its run's address is added to ``locations`` as parts of a path.

    ``more`` are further parts, beside the values of the step's variables and those of the steps it reads from.
    """
    step = plan.step
    assert step is not None
    job = workflow_job(workflow, step)
    own = [it for it in known if it.step == step]
    # In the order of the workflow, so that equal workflows give equal definitions.
    after = sorted(step_dependencies(workflow, step), key=list(workflow.steps).index)
    fixed = {name: "/".join([*map(_shown, locations[name]), RESULT]) for name in after}
    resolved = resolve(job, {}, fixed)
    # Variables of the steps that it reads from belong to its address: other values there are other data here.
    inherited = [part for name in after for part in locations[name] if not isinstance(part, str)]
    tail = _unique([*inherited, *(it.reference for it in own), *more])
    base, request, uploads, job_file = _rendered(workflow, replace(plan, job=resolved))
    locations[step] = [base, *tail]
    hyperparameters = request["HyperParameters"]
    # The service names the jobs of steps itself.
    hyperparameters.pop("sagemaker_job_name", None)
    hyperparameters |= {it.path: _text(it.reference, is_text=isinstance(it.default, str)) for it in own}
    # Where a step reads from another whose address has variables, only the execution knows the input's address.
    for path, kind, name in references(job):
        parts = locations.get(name, [])
        if kind == "step" and any(not isinstance(part, str) for part in parts):
            hyperparameters[path] = _text(_path([*parts, RESULT, *_below(job, path, name)]))
    if tail:
        address = _path(locations[step])
        hyperparameters[RUN_HYPERPARAMETER] = _text(address)
        request["Tags"] = [{**tag, "Value": address} if tag["Key"] == RUN_TAG else tag for tag in request["Tags"]]
    # A step of a pipeline must not have one: the service names the job of each execution.
    del request["TrainingJobName"]
    return PipelineStep(step, request, job_file, tuple(after), uploads)


def _rendered(workflow: WorkflowSpec, plan: Plan) -> tuple[str, dict[str, Any], dict[str, bytes], JobFile]:
    """The static part of a step's address, its request, and what it uploads."""
    root = join(fill(workflow.storage, run_name=workflow.name), "pipelines", workflow.name)
    # The address ends with a digest of the request, and the request holds the address. So the request is made with a
    # stand-in, which is replaced once the digest is known.
    stand_in = f"{plan.step}-{_STAND_IN}"
    job = JobFile(
        run_id=stand_in, attempt=1, run_uri=f"{root}/{stand_in}", spec=plan.job, spec_digest=spec_digest(plan.job)
    )
    sent = render_job(plan, job)
    name = f"{plan.step}-{request_digest(job.spec_digest, sent.request)}"
    request = json.loads(json.dumps(sent.request).replace(stand_in, name))
    uploads = {
        # The bundle is compressed and named by its content; no file of it knows the run.
        uri.replace(stand_in, name): body if uri.endswith(".gz") else body.replace(stand_in.encode(), name.encode())
        for uri, body in sent.uploads.items()
    }
    return f"{root}/{name}", request, uploads, job.model_copy(update={"run_id": name, "run_uri": f"{root}/{name}"})


def request_digest(spec_digest: str, request: Mapping[str, Any]) -> str:
    """What a step's address ends with (12 hex digits): it follows the specification, the code and the image."""
    code = request["HyperParameters"]["sagemaker_submit_directory"]
    image = request["AlgorithmSpecification"]["TrainingImage"]
    return hashlib.sha256(json.dumps([spec_digest, code, image]).encode()).hexdigest()[:12]


def _with_registration(workflow: WorkflowSpec, register: Register) -> WorkflowSpec:
    """The workflow with one more step, which registers what another publishes."""
    given: Any = register
    if not isinstance(given, Register):
        remedy = "Give a Register: pipelines.Register(step='train', group='models', image_uri='...')"
        raise PlanError([Issue("register-argument-invalid", "register", "is not a Register", given, remedy)])
    if register.step not in workflow.steps:
        raise PlanError([Issue("register-step-unknown", "register.step", "there is no such step", register.step)])
    # The name is that of the added step, and a key of the workflow's mapping.
    if REGISTER in workflow.steps:
        raise PlanError(
            [
                Issue(
                    "register-step-repeated",
                    f"steps.{REGISTER}",
                    "the workflow registers already",
                    remedy="Leave register out",
                )
            ]
        )
    task = RegisterTask(model=f"{_STEP}{register.step}.output", group=register.group, image_uri=register.image_uri)
    step = StepSpec(task=task, compute=ComputeSpec(instance_type=register.instance_type))
    whole = workflow.model_copy(update={"steps": {**workflow.steps, REGISTER: step}})
    found = check_registration(workflow_job(whole, REGISTER))
    refuse(replace(it, path=it.path.replace("task.", "register.", 1)) for it in found)
    return whole


def _below(job: JobSpec, path: str, step: str) -> list[str]:
    """What follows ``steps.NAME.output/`` in the value at ``path``."""
    value: Any = job.model_dump()
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    rest = str(value).removeprefix(f"{_STEP}{step}.output").strip("/")
    return [rest] if rest else []


def _shown(part: Any) -> str:
    """A part of an address in job.json, where a hyperparameter will take its place."""
    return part if isinstance(part, str) else part["Get"].rpartition(".")[2]


def _path(parts: list[Any]) -> Any:
    """Parts of an address as text, or joined by the service once their values are known."""
    if all(isinstance(part, str) for part in parts):
        return "/".join(parts)
    return {"Std:Join": {"On": "/", "Values": parts}}


def _text(expression: Any, *, is_text: bool = True) -> Any:
    """An expression as a hyperparameter, which must be text; the same shape as the SDK gives it."""
    return expression if is_text else {"Std:Join": {"On": "", "Values": [expression]}}


def _unique(parts: list[Any]) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        if part not in found:
            found.append(part)
    return found
