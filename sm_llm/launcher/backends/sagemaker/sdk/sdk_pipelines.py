"""Hand-written pipelines of the SageMaker SDK: steps that publish at one address, or read too early, are refused.

Of two steps with one address the second would find the result of the first and do nothing. A step's name is known only
once the pipeline is defined, so the checks are made there: the SDK offers no hook, and ``definition`` of the class is
wrapped once.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from contextlib import nullcontext
from dataclasses import dataclass
from os.path import commonpath
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import is_reserved
from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Issue, StorageError
from sm_llm.launcher.backends.sagemaker.pipelines.defined_jobs import jobs_of, steps_in
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_values import VALUE_CHECKERS, GivenValues, job_in
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG, VALIDATION
from sm_llm.launcher.planning.unread_settings import has_validation
from sm_llm.runs.run_paths import STEPS
from sm_llm.spec.references import outputs, texts
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.storage.publication.keys import COMMITS
from sm_llm.storage.publication.result import POINTER, RESULT
from sm_llm.storage.s3.s3_client import as_session
from sm_llm.storage.uri import open_store
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from sm_llm.contract.job_file import JobFile
    from sm_llm.spec.validation.runner import Checker

_PROPERTY = re.compile(r'"Get": "Steps\.([^."\[]+)')
"""A property of another step, as definitions name it."""
_TRIAL = re.compile(r'"Get": "Steps\.([^."\[]+)\.[^"]*TrainingJobName"')
"""The name of a trial's job."""
_OUTPUT = re.compile(r'"Get": "Steps\.([^."\[]+)\.(ModelArtifacts|OutputDataConfig|CheckpointConfig)\b')
"""A location in S3 that a training job's description names."""
_METRIC = re.compile(r"""Steps\.([^."\[]+)\.FinalMetricDataList\[['"\\]*([^'"\\\]]+)""")
_MODEL = "ModelData"
_LOCATION_KEYS = ("S3Uri", "ModelDataUrl")
# What lies below a run and is read by others; trials and steps have results of their own.
_RESULTS = (RESULT, "trials", STEPS)
_ARCHIVE = "model.tar.gz"
_OF_BEST_TRIAL = (
    "Write Join(on='/', values=[estimator.run_uri, 'trials', "
    "step.properties.BestTrainingJob.TrainingJobName, 'result'])"
)
# Blocks of a request with what a step writes and is named by; a channel brings its own job file.
_WRITTEN = ("Tags", "OutputDataConfig", "ProcessingOutputConfig", "TransformOutput", JOB_CHANNEL)
# What steps that are not ours write, maybe below a run.
_OF_OTHERS = ("ProcessingOutputConfig", "TransformOutput")
_RUN = re.compile(r"(?P<root>s3://\S+)/(?P<name>[^/\s]+)-[0-9a-f]{12}(?![\w.-])")
"""The address of a step's run, which is named by its content."""
_KNOWN = re.compile(r'((?:(?!\{")\S)*)(\{")?')
"""The rest of an address in a text, up to its first expression, and whether there is one."""


def watch_pipelines() -> None:
    """Make ``Pipeline.definition`` compare the addresses of our runs, and ``start`` check values of variables."""
    from sagemaker.workflow.pipeline import Pipeline

    original = Pipeline.definition
    # Every estimator calls this: wrapping a wrapper would check a definition several times.
    if hasattr(original, "compares_runs"):
        return

    @functools.wraps(original)
    def definition(self: Any) -> str:
        text: str = original(self)
        with _session_of(self):
            refuse(run(WRITTEN_PIPELINE_CHECKERS, WrittenPipeline(json.loads(text), job_in, run_is_there)))
        return text

    begin = Pipeline.start

    @functools.wraps(begin)
    def start(self: Any, parameters: Any = None, *args: Any, **kwargs: Any) -> Any:
        _check_start(self, parameters)
        return begin(self, parameters, *args, **kwargs)

    definition.compares_runs = True  # type: ignore[attr-defined]
    Pipeline.definition = definition
    Pipeline.start = start


def _check_start(pipeline: Any, values: Any) -> None:
    """Raise ``PlanError`` for values that a step of ours cannot take; pipelines of others are left alone."""
    if not isinstance(values, dict) or not values:
        return
    # The pipeline in hand, not the stored one: it may have changed since, and upsert is the caller's.
    found = json.loads(pipeline.definition())
    if any(job.job_folder is not None for step in steps_in(found["Steps"]) for job in jobs_of(step)):
        with _session_of(pipeline):
            refuse(run(VALUE_CHECKERS, GivenValues(found, values, job_in)))


def _session_of(pipeline: Any) -> AbstractContextManager[None]:
    """Inside, S3 is read with the credentials of a pipeline's session."""
    boto = getattr(pipeline.sagemaker_session, "boto_session", None)
    return nullcontext() if boto is None else as_session(boto._session)


@dataclass(frozen=True)
class WrittenPipeline:
    """A pipeline as it was written by hand.

    ``read`` gives the job file in a folder in S3, or None. ``is_there`` returns whether a run has published something,
    for its address and what is named below it.
    """

    definition: Mapping[str, Any]
    read: Callable[[str], JobFile | None]
    is_there: Callable[[str, str], bool]


def check_step_addresses(pipeline: WrittenPipeline) -> Iterator[Issue]:
    """An issue for every step whose run lies where that of an earlier step does."""
    first: dict[str, str] = {}
    # The trials of a tuning job have addresses of their own below that of its step.
    training = (step for step in steps_in(pipeline.definition["Steps"]) if step["Type"] == "Training")
    for name, address in _runs(training).items():
        # An address may hold variables of the pipeline: equal JSON is an equal address in every execution.
        other = first.setdefault(json.dumps(address), name)
        if other != name:
            problem = f"its run would lie where that of {other} does: specification, arguments and inputs are equal"
            remedy = f"Name one of them differently: sm_llm.estimator(spec, 'name={name.lower()}', ...)"
            yield Issue("step-address-shared", f"steps.{name}", problem, address, remedy)


def check_step_order(pipeline: WrittenPipeline) -> Iterator[Issue]:
    """An issue for every step that holds an address below the run of another step and does not wait for it.

    The SDK derives the order from properties of steps, and an address is plain text to it. Both steps would start at
    once, and the reader finds nothing, or what the execution before has left. Steps of every type read addresses: in
    channels and inputs, in hyperparameters, arguments and variables, and ours in what their job file names.
    """
    steps = list(steps_in(pipeline.definition["Steps"]))
    runs, after = _runs(steps), _order(pipeline.definition["Steps"])
    # Of a single step there is nothing to wait for, and no job file to read.
    for step in steps if len(steps) > 1 and runs else ():
        name = step["Name"]
        for where, address in _read_by(step, pipeline.read):
            # The address of a run may lie below that of another, of the same specification with less given.
            holding = [it for it, run_address in runs.items() if _holds(address, run_address)]
            other = max(holding, key=lambda it: len(json.dumps(runs[it])), default=name)
            if other != name and other not in _waits_for(name, after):
                problem = f"reads what {other} publishes, and does not wait for it"
                remedy = f"Write {step['Type']}Step(..., depends_on=[{other!r}])"
                yield Issue("step-order-missing", f"steps.{name}.{where}", problem, address, remedy)


def check_trial_archives(pipeline: WrittenPipeline) -> Iterator[Issue]:
    """An issue for every address of a trial's model.tar.gz, as ``TuningStep.get_top_model_s3_uri`` makes it.

    A run publishes files, so nothing lies there: the next step would fail when all trials are paid for.
    """
    steps = list(steps_in(pipeline.definition["Steps"]))
    runs = _runs(steps)
    for step in steps:
        for where, address in _addresses(step["Arguments"]) if step["Type"] != "Condition" else ():
            text = json.dumps(address)
            for name in _TRIAL.findall(text) if _ARCHIVE in text else ():
                if name in runs:
                    problem = f"names a {_ARCHIVE}, and the trials of {name} publish their results as files"
                    path = f"steps.{step['Name']}.{where}"
                    yield Issue("trial-archive-missing", path, problem, address, _OF_BEST_TRIAL)


def check_read_results(pipeline: WrittenPipeline) -> Iterator[Issue]:
    """An issue for every location in S3 that a step reads and where no step of ours puts what can be read.

    Files of a result lie where only its commit knows; its stable addresses hold pointers, which our jobs follow.
    """
    steps = list(steps_in(pipeline.definition["Steps"]))
    runs, tuned = _runs(steps), {it["Name"] for it in steps if it["Type"] == "Tuning"}
    of_others = [
        _text_of(it) for step in steps for name in _OF_OTHERS for _, it in _addresses(step["Arguments"].get(name))
    ]
    for step in steps if runs else ():
        # The steps in a condition's branches are among all steps.
        for key, where, address in _read_locations(step["Arguments"]) if step["Type"] != "Condition" else ():
            found = _read_of(address, runs)
            is_other = any(f"{_text_of(address)}/".startswith(f"{it.rstrip('/')}/") for it in of_others)
            if found is None or is_other or _ARCHIVE in json.dumps(address):
                continue
            other, part = found
            path = f"steps.{step['Name']}.{where}"
            # The trials of a tuning job publish below its run, and nothing at its own result.
            results = _RESULTS if other not in tuned else ("trials",)
            if part.split("/")[0] not in results:
                problem = f"is not where {other} publishes its {'trials' if other in tuned else 'result'}"
                own = "Give estimator.result_uri, or step.properties.ModelArtifacts.S3ModelArtifacts"
                remedy = _OF_BEST_TRIAL if other in tuned else own
                yield Issue("step-reads-no-result", path, problem, address, remedy)
            elif key == _MODEL or _MODEL in where:
                problem = (
                    f"is no model: {other} publishes files, and its address holds only {POINTER}, which names them"
                )
                yield Issue("model-of-a-result", path, problem, address, "Register it: a step of the kind register")
            elif step["Name"] not in runs:
                text = f"{path}: brings only {POINTER}, which names the files that {other} publishes"
                _warn_once(f"{text}. In its program: sm-llm sync ADDRESS FOLDER")


def check_unwritten_runs(pipeline: WrittenPipeline) -> Iterator[Issue]:
    """An issue for every address of a run beside those of the pipeline that no step writes and that is not there.

    ``estimator.result_uri`` follows what ``fit`` is given, so that before ``fit`` it may be that of another run.
    """
    steps = list(steps_in(pipeline.definition["Steps"]))
    runs = _runs(steps)
    named = {name: match for name, run in runs.items() if (match := _RUN.match(_text_of(run)))}
    beside = "|".join(sorted({re.escape(it["root"]) for it in named.values()}))
    for step in steps if named else ():
        for where, address in _read_by(step, pipeline.read):
            text = _text_of(address)
            match = re.search(rf"(?:{beside})/(?P<name>[^/\s]+)-[0-9a-f]{{12}}(?![\w.-])", text)
            if match is None or any(_holds(address, run) for run in runs.values()):
                continue
            path, same = f"steps.{step['Name']}.{where}", [it for it in named if named[it]["name"] == match["name"]]
            if pipeline.is_there(match[0], text[match.end() :]):
                if same:
                    _warn_once(f"{path}: no step of this pipeline writes {text}; an earlier run is read there")
                continue
            problem, remedy = "is a run that no step of this pipeline writes, and that is not there", "Add its step"
            if same:
                near = max(same, key=lambda it: len(commonpath([text[match.start() :], _text_of(runs[it])])))
                problem += f"; that of {near} lies at {_text_of(runs[near])}"
                remedy = "Read estimator.result_uri after fit(), whose inputs and variables are part of it"
            yield Issue("step-reads-unwritten-run", path, problem, address, remedy)


def run_is_there(run: str, below: str) -> bool:
    """Whether a run has published something at ``run``, or at a folder on the way to what lies ``below`` it.

    Where only an execution knows the whole path, what lies at its known part counts.
    """
    known, variable = _KNOWN.match(below).groups()  # type: ignore[union-attr]
    folders = list(itertools.accumulate([run, *filter(None, known.split("/"))], lambda above, it: f"{above}/{it}"))
    try:
        return open_store(folders[-1]).holds() if variable else any(open_store(it).holds(COMMITS) for it in folders)
    except StorageError as error:
        _warn_once(f"{folders[-1]} cannot be searched for from here: {str(error).splitlines()[0]}")
        return True


def check_metrics(pipeline: WrittenPipeline) -> Iterator[Issue]:
    """An issue for every metric of a step of ours that a pipeline reads and that the step never reports."""
    steps = list(steps_in(pipeline.definition["Steps"]))
    jobs = {step["Name"]: job for step in steps for job in jobs_of(step) if step["Type"] == "Training"}
    for step in steps:
        arguments = step["Arguments"].get("Conditions", []) if step["Type"] == "Condition" else step["Arguments"]
        for name, metric in sorted(set(_METRIC.findall(json.dumps(arguments)))):
            job = jobs.get(name)
            if job is None or job.job_folder is None:
                continue
            names = [it["Name"] for it in job.request["AlgorithmSpecification"].get("MetricDefinitions", ())]
            # A hyperparameter may give the job other data.
            is_known = not any(it.startswith("task.data") for it in job.request.get("HyperParameters", ()))
            file = pipeline.read(job.job_folder) if metric == VALIDATION and is_known else None
            task = file.spec.task if file is not None else None
            if metric not in names:
                problem = f"{name} has no metric definition of this name, so it never has a value"
                remedy = f"Known: {', '.join(names)}" if names else "Set backend.metric_definitions=true"
            elif isinstance(task, TrainTask) and not has_validation(task):
                problem = f"{name} has no validation rows, so it never has a value"
                remedy = "Set task.data.validation, or read train:loss"
            else:
                continue
            yield Issue("step-metric-unknown", f"steps.{step['Name']}", problem, metric, remedy)


def _read_locations(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Key, path and value of every location in S3 that a part of a definition has data in."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        channel = (item.get("ChannelName") or item.get("InputName")) if isinstance(item, dict) else None
        if (name := str(channel or key)) in _WRITTEN or is_reserved(name):
            continue
        where = f"{path}.{name}".strip(".")
        if key in _LOCATION_KEYS and not _is_block(item):
            yield str(key), where, item
        else:
            found = _read_locations(item, where)
            # A channel has one address, and its name is what the user gave.
            yield from ((kind, name, it) for kind, _, it in found) if channel else found


@functools.cache
def _warn_once(text: str) -> None:
    """Print a warning; a pipeline is defined several times."""
    echo(f"  warning: {text}", err=True)


def _is_block(value: Any) -> bool:
    """Whether it holds further arguments, and is no text and no expression."""
    return isinstance(value, list) or (isinstance(value, dict) and not {"Get", "Std:Join"} & set(value))


def _read_of(address: Any, runs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The step of ours whose output an address is, and what of it: the path below its run; None for any other place."""
    for name, attribute in _OUTPUT.findall(json.dumps(address)):
        if name in runs:
            return name, RESULT if attribute == "ModelArtifacts" else attribute
    holding = [it for it, run_address in runs.items() if _holds(address, run_address)]
    if not holding:
        return None
    other = max(holding, key=lambda it: len(json.dumps(runs[it])))
    rest = _text_of(address).removeprefix(_text_of(runs[other]))
    return other, rest.strip("/")


def _text_of(address: Any) -> str:
    """An address as text, with the expressions in it as JSON."""
    if isinstance(address, dict) and "Std:Join" in address:
        return str(address["Std:Join"]["On"]).join(map(_text_of, address["Std:Join"]["Values"]))
    return address if isinstance(address, str) else json.dumps(address, sort_keys=True)


def _runs(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Step -> the address of its run, where it has one."""
    return {
        step["Name"]: tag["Value"]
        for step in steps
        for tag in step["Arguments"].get("Tags", ())
        if isinstance(tag, dict) and tag.get("Key") == RUN_TAG
    }


def _addresses(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Where a part of a definition holds a text or a join of texts that is read, and that."""
    if isinstance(value, str) or (isinstance(value, dict) and "Std:Join" in value):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            channel = (item.get("ChannelName") or item.get("InputName")) if isinstance(item, dict) else None
            # What a step writes, and its own job file and code, may lie below the run of another step. Variables of the
            # environment may have the name of such a block.
            is_written = (name := str(channel or key)) in _WRITTEN and _is_block(item)
            if not is_written and not (path.endswith("HyperParameters") and is_reserved(name)):
                found = _addresses(item, f"{path}.{name}".strip("."))
                # A channel has one address, and its name is what the user gave.
                yield from ((name, it) for _, it in found) if channel else found


def _read_by(step: Mapping[str, Any], read: Callable[[str], JobFile | None]) -> Iterator[tuple[str, Any]]:
    """Path and value of every text or join that a step reads: in its arguments, and in the tasks of jobs of ours."""
    # The arguments of a condition hold the steps of its branches, which are judged by themselves.
    yield from _addresses(step["Arguments"].get("Conditions", []) if step["Type"] == "Condition" else step["Arguments"])
    for job in jobs_of(step):
        if (folder := job.job_folder) is not None and (file := read(folder)) is not None:
            written = outputs(file.spec)
            yield from ((path, text) for path, text in texts(file.spec).items() if path not in written)


def _holds(address: Any, folder: Any) -> bool:
    """Whether a text, or a join of parts, names ``folder`` or what lies below it."""
    return re.search(rf"{re.escape(_text_of(folder))}(?![\w.-])", _text_of(address)) is not None


def _order(steps: Any, inherited: frozenset[str] = frozenset()) -> dict[str, set[str]]:
    """Step -> what ends before it starts: the steps that it names, and those whose properties it reads.

    Steps of a branch wait for what their condition waits for; who waits for a condition waits for its branches.
    """
    found: dict[str, set[str]] = {}
    for step in steps:
        arguments, branches = step.get("Arguments", {}), {}
        is_condition = step.get("Type") == "Condition"
        read = arguments.get("Conditions", ()) if is_condition else arguments
        own = inherited.union(step.get("DependsOn", ()), _PROPERTY.findall(json.dumps(read)))
        if is_condition:
            branches = _order([*arguments.get("IfSteps", ()), *arguments.get("ElseSteps", ())], own)
        found |= {step["Name"]: {*own, *branches}, **branches}
    return found


def _waits_for(name: str, after: Mapping[str, set[str]]) -> set[str]:
    """The steps that end before this one starts, at once or by way of others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = after.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


WRITTEN_PIPELINE_CHECKERS: tuple[Checker[WrittenPipeline], ...] = (
    check_step_addresses,
    check_step_order,
    check_trial_archives,
    check_read_results,
    check_unwritten_runs,
    check_metrics,
)
