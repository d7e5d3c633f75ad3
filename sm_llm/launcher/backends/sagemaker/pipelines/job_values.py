"""A job of a definition with values for its variables: what its specification, its plan and the service say of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import applied
from sm_llm.errors import Issue, PlanError, SpecError
from sm_llm.launcher.backends.sagemaker.pipelines.defined_jobs import UNKNOWN, filled, variables_in
from sm_llm.launcher.backends.sagemaker.pipelines.known_values import ANY_NETWORK
from sm_llm.launcher.backends.sagemaker.pipelines.settled import PROBLEM, launched
from sm_llm.launcher.backends.sagemaker.pipelines.tuning_trials import SETTINGS, defined_setting_issues, defined_trials
from sm_llm.launcher.backends.sagemaker.request.limits import FIELDS, limit_issues
from sm_llm.launcher.backends.sagemaker.request.request import ATTEMPT_TAG, NAME_TAG, RUN_TAG
from sm_llm.launcher.planner import load_whole, plan_job
from sm_llm.launcher.planning.draft import UpstreamOutput
from sm_llm.launcher.planning.model_facts import known_preset
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.references import referring
from sm_llm.spec.tasks import PrepareTask
from sm_llm.spec.validation.runner import overlap
from sm_llm.storage.publication.result import RESULT
from sm_llm.storage.uri import flattened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backends.sagemaker.pipelines.defined_jobs import DefinedJob
    from sm_llm.spec.job import JobSpec

# Type of a step -> the operation whose request its arguments are.
_OPERATIONS = {"Training": "CreateTrainingJob", "Tuning": "CreateHyperParameterTuningJob"}
# The requests of both operations have this block under another name.
_RESOURCES = {"ResourceConfig": ("ResourceConfig", "HyperParameterTuningResourceConfig")}
# Channels are checked by themselves, names and rules are no variables.
_NO_FIELDS = ("name", "inputs", "backend.metric_definitions")


@dataclass(frozen=True)
class PublishingStep:
    """A training step of a definition, whose result others may read: the address of its run, its job, its job file."""

    address: Any
    job: DefinedJob
    file: JobFile


@dataclass(frozen=True)
class _EarlierOutputs:
    """What the steps of a definition publish with some values: where, and what a plan knows of it."""

    outputs: Mapping[str, str]
    facts: Mapping[str, UpstreamOutput | None]
    presets: Mapping[str, str | None]


def job_issues(
    job: DefinedJob,
    file: JobFile,
    values: Mapping[str, Any],
    before: Mapping[str, Any],
    publishing: Mapping[str, PublishingStep],
) -> list[Issue]:
    """What the worker or the plan would refuse of a job with ``values``, and not with the values ``before``.

    ``publishing`` are the steps that the job may read from, by name: their values count in its plan. Paths are those of
    the specification. The job file may have been made on another machine: what its plan lacks here it lacks with either
    values.
    """
    found = _refused(job, file, values, publishing)
    known = {_key(it) for it in _refused(job, file, before, publishing)} if found else set()
    return [it for it in found if _key(it) not in known]


def step_issues(step: Mapping[str, Any], values: Mapping[str, Any], before: Mapping[str, Any]) -> list[Issue]:
    """What the service would refuse of the request of a step with ``values``, and not with the values ``before``.

    Paths are those of the request.
    """
    found = _refused_request(step, values)
    known = {_key(it) for it in _refused_request(step, before)} if found else set()
    return [it for it in found if _key(it) not in known]


def variables_at(job: DefinedJob) -> dict[str, set[str]]:
    """Path in the specification -> the variables in its value."""
    return {
        path: names
        for path, value in [*job.hyperparameters.items(), *_written(job.request)]
        if (names := variables_in(value))
    }


def request_variables(value: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Paths in a request, and the variables at or below each."""
    if names := variables_in(value):
        yield path, names
        inside: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inside:
            yield from request_variables(item, f"{path}.{key}" if path else str(key))


def named_at(path: str, paths: Mapping[str, set[str]], given: Mapping[str, Any]) -> str | None:
    """The given variable that an issue at ``path`` is about: the nearest; None where the path names none."""
    near = sorted((it for it in paths if it and overlap(it, path)), key=len, reverse=True)
    return next((name for it in near for name in sorted(paths[it]) if name in given), None)


def _key(issue: Issue) -> tuple[str, str, str]:
    return issue.code, issue.path, issue.message


def _refused(
    job: DefinedJob, file: JobFile, values: Mapping[str, Any], publishing: Mapping[str, PublishingStep]
) -> list[Issue]:
    """Issues of the first trial that has any; a training job is one trial."""
    texts, fields = _texts(job, values), _fields(job, file.spec, values)
    earlier = _earlier_outputs({name: it for name, it in publishing.items() if name != job.step}, values)
    for trial in defined_trials(job.ranges):
        if found := _trial_issues(file, {**texts, **trial}, fields, earlier):
            return found
    return []


def _texts(job: DefinedJob, values: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a job, as far as they are known."""
    return {name: it for name, value in job.hyperparameters.items() if (it := filled(value, values)) is not UNKNOWN}


def _earlier_outputs(publishing: Mapping[str, PublishingStep], values: Mapping[str, Any]) -> _EarlierOutputs:
    outputs, jobs = {}, {}
    for name, step in publishing.items():
        if (address := filled(step.address, values)) is UNKNOWN:
            continue
        outputs[name] = f"{flattened(str(address))}/{RESULT}"
        try:
            jobs[name] = applied(step.file, _texts(step.job, values))[0].spec
        except SpecError:  # the step's own check reports it
            jobs[name] = step.file.spec
    tasks = {name: referring(job, outputs).task for name, job in jobs.items()}
    facts = {name: UpstreamOutput.of(task) if isinstance(task, PrepareTask) else None for name, task in tasks.items()}
    return _EarlierOutputs(outputs, facts, {name: known_preset(tasks, name) for name in tasks})


def _trial_issues(
    file: JobFile, texts: Mapping[str, str], fields: Mapping[str, Any], earlier: _EarlierOutputs
) -> list[Issue]:
    try:
        changed, _ = applied(file, texts)
        if launched(changed.spec) != launched(file.spec):
            remedy = "Write the values into the workflow and store it again"
            return [Issue("pipeline-values-fixed-at-launch", "values", PROBLEM, remedy=remedy)]
        # The plan of the definition: what the model, the data and the platform do not take is refused there, too.
        loaded = load_whole(changed.spec, fields=fields)
        job: Any = loaded.spec
        plan_job(
            referring(job, earlier.outputs), origins=loaded.origins, upstream=earlier.facts, presets=earlier.presets
        )
    except (SpecError, PlanError) as error:
        return list(error.issues)
    return []


def _written(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of the specification, and what stands for them in a request."""
    for location, field in FIELDS.items():
        block, _, rest = location.partition(".")
        for name in _RESOURCES.get(block, (block,)):
            value: Any = request.get(name)
            for key in rest.split(".") if rest else ():
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None and field not in _NO_FIELDS:
                yield field, value


def _fields(job: DefinedJob, spec: JobSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields whose values in the request hold variables, with these filled in."""
    found: dict[str, Any] = {}
    for field, written in _written(job.request):
        if field in ("backend.tags", "environment"):
            entries = {name: it for name, it in _entries(written) if variables_in(it)}
            own = spec.environment if field == "environment" else SageMakerOptions.of(spec).tags
            found |= {field: {**own, **filled(entries, values)}} if entries else {}
        elif variables_in(written) and (value := filled(written, values)) is not UNKNOWN and value != []:
            found[field] = value
    # The two lists are checked together, and of one nothing may be known.
    if len(network := [it for it in ANY_NETWORK if it in found]) == 1:
        found |= {field: [entry] for field, entry in ANY_NETWORK.items() if field not in network}
    return found


def _entries(written: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of variables or tags, without our own tags."""
    if isinstance(written, list):
        yield from ((it["Key"], it["Value"]) for it in written if it["Key"] not in (RUN_TAG, ATTEMPT_TAG, NAME_TAG))
    else:
        yield from written.items()


def _refused_request(step: Mapping[str, Any], values: Mapping[str, Any]) -> list[Issue]:
    operation = _OPERATIONS.get(step["Type"])
    if operation is None:
        return []
    request = filled(step["Arguments"], values)
    found = list(limit_issues(request, operation))
    # A definition lacks the name of its job, which the service gives it.
    if step["Type"] == "Tuning" and all(it.code == "request-field-missing" for it in found):
        found += [replace(it, path=SETTINGS[it.path]) for it in defined_setting_issues(request)]
    return found
