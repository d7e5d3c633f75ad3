"""Issues that show only when several fields of a specification are read together."""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.bucket_names import bucket_problem
from sm_llm.errors import Issue, SpecError
from sm_llm.spec.checkpoint import PretrainedStart
from sm_llm.spec.data import StreamData, SyntheticData
from sm_llm.spec.derive import derive_task
from sm_llm.spec.environment.variables import environment_issues
from sm_llm.spec.inputs import MOUNT, S3Input, input_place
from sm_llm.spec.job import JobSpec, StepSpec, WorkflowSpec
from sm_llm.spec.loading.references import references, sources, workflow_job
from sm_llm.spec.parallelism.base import TrainingFacts
from sm_llm.spec.tasks import (
    FetchTask,
    PrecompileTask,
    PrepareTask,
    RegisterTask,
    ScriptTask,
    TrainTask,
    TrainTokenizer,
    parallelism_of,
)
from sm_llm.spec.validation.check_register import register_issues
from sm_llm.spec.validation.check_script import script_issues
from sm_llm.spec.validation.steps import gathered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.machines.compute import ComputeSpec
    from sm_llm.spec.storage import StorageOptions

NAME_LENGTH = 63
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEMES = ("file", "s3")
_NO_FOLDERS = ("", ".", "..")
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_CLASSES = (
    "STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR", "REDUCED_REDUNDANCY",
    "EXPRESS_ONEZONE", "OUTPOSTS",
)  # fmt: skip
_HUB = re.compile(r"hf://(?:datasets/|models/)?[\w.-]+/[\w.-]+(?:@(?:refs/(?:pr|convert)/)?[^/@]+)?(?:/(?P<path>.*))?")


def check(spec: JobSpec | WorkflowSpec) -> list[Issue]:
    """Every issue of a well-formed specification, with paths relative to it."""
    return list(_job_issues(spec) if isinstance(spec, JobSpec) else _workflow_issues(spec))


def _job_issues(job: JobSpec) -> Iterator[Issue]:
    yield from _name_issues("name", job.name)
    yield from _place_issues("storage", job.storage)
    yield from _class_issues(job.storage_options)
    yield from _body_issues(job)
    for path, kind, name in references(job):
        if kind == "step":
            yield Issue(
                "step-reference-in-a-job",
                path,
                f"refers to step {name!r}, but a job alone has no steps",
                remedy="Write a workflow",
            )


def _workflow_issues(workflow: WorkflowSpec) -> Iterator[Issue]:
    own = [
        *_name_issues("name", workflow.name),
        *_place_issues("storage", workflow.storage),
        *_class_issues(workflow.storage_options),
        *environment_issues(workflow.environment, workflow.secrets),
    ]
    yield from own
    earlier: list[str] = []
    for name, step in workflow.steps.items():
        prefix = f"steps.{name}"
        yield from _name_issues(prefix, name, suffix_of=workflow.name)
        yield from _order_issues(prefix, name, step, workflow, earlier)
        earlier.append(name)
    bodies = {name: list(_body_issues(workflow_job(workflow, name))) for name in workflow.steps}
    yield from gathered(workflow, bodies, own)


def _order_issues(
    prefix: str, name: str, step: StepSpec, workflow: WorkflowSpec, earlier: list[str]
) -> Iterator[Issue]:
    wanted = [(f"{prefix}.after", other) for other in step.after]
    wanted += [(f"{prefix}.{path}", other) for path, kind, other in references(step) if kind == "step"]
    for path, other in wanted:
        if other in earlier:
            continue
        known = f"Steps before {name}: {', '.join(earlier) or 'none'}"
        problem = "refers to itself or a later step" if other in workflow.steps else "there is no such step"
        yield Issue("step-reference-unknown", path, problem, other, known)


def _body_issues(job: JobSpec) -> Iterator[Issue]:
    yield from environment_issues(job.environment, job.secrets)
    yield from _input_issues(job)
    for path, place in {**sources(job), **_input_uris(job)}.items():
        yield from _place_issues(path, place, hub=not path.endswith("start.checkpoint"))
    misfits = list(job.backend.compute_issues(job.compute)) or list(_strategy_issues(job))
    yield from misfits
    compute = None if misfits else job.compute  # what follows from wrong numbers would only repeat the issue
    task = job.task
    if isinstance(task, TrainTask):
        yield from _train_issues(task, compute)
    elif isinstance(task, PrepareTask):
        yield from _prepare_issues(task)
    elif isinstance(task, FetchTask):
        yield from _fetch_issues(task)
    elif isinstance(task, RegisterTask):
        yield from register_issues(task)
    elif isinstance(task, PrecompileTask):
        yield from _precompile_issues(task, compute)
    elif isinstance(task, ScriptTask):
        yield from script_issues(task, job.inputs)


def _strategy_issues(job: JobSpec) -> Iterator[Issue]:
    parallelism = parallelism_of(job.task)
    if parallelism is None:
        return
    for issue in parallelism.degree_issues(job.compute.world_size, job.compute.processes):
        yield _of_precompiled(issue) if isinstance(job.task, PrecompileTask) else issue


def _input_uris(job: JobSpec) -> dict[str, str]:
    """Inputs that are places to read, by their path in the specification."""
    uris = {f"inputs.{name}": it for name, it in job.inputs.items() if isinstance(it, str)}
    return uris | {f"inputs.{name}.uri": it.uri for name, it in job.inputs.items() if isinstance(it, S3Input)}


def _input_issues(job: JobSpec) -> Iterator[Issue]:
    yield from list(_input_value_issues(job)) or _unread_inputs(job)


def _input_value_issues(job: JobSpec) -> Iterator[Issue]:
    for name, value in job.inputs.items():
        if isinstance(value, S3Input) and value.mode == "Pipe":
            problem = "a pipe can be read only once and in order, which neither shuffling nor resume can do"
            yield Issue("pipe-mode-unsupported", f"inputs.{name}.mode", problem, value.mode, "Use FastFile or File")
    for path, kind, name in references(job):
        if kind != "input":
            continue
        if path.startswith("inputs."):
            yield Issue(
                "input-refers-to-input",
                path,
                "an input cannot refer to another input",
                input_place(job.inputs[path.split(".")[1]]),
            )
        elif name not in job.inputs:
            yield Issue(
                "input-unknown",
                path,
                "there is no such input",
                name,
                f"Known inputs: {', '.join(job.inputs) or 'none'}",
            )


def _unread_inputs(job: JobSpec) -> Iterator[Issue]:
    """Inputs that the task neither refers to nor reads from by their place; a script may read any."""
    if isinstance(job.task, ScriptTask):
        return
    named = {name for path, kind, name in references(job) if kind == "input" and path.startswith("task.")}
    places = [f"{place.rstrip('/')}/" for place in sources(job).values()]
    for name, value in job.inputs.items():
        read = (
            f"{input_place(value).rstrip('/')}/",
            f"{MOUNT}/{name}/",
        )  # inside a container the channel stands for it
        if name in named or any(place.startswith(read) for place in places):
            continue
        reads = f"the {job.task.kind} task does not read it"
        remedy = f"Refer to it where the task reads it, as inputs.{name}, or leave it out"
        if isinstance(job.task, TrainTask) and isinstance(job.task.data, SyntheticData):
            reads += ": it trains on RANDOM TOKENS (task.data.format=synthetic)"
            remedy = f"Read it with task.data.format=rows task.data.train=inputs.{name}, or leave it out"
        yield Issue("input-unread", f"inputs.{name}", reads, input_place(value), remedy)


def _train_issues(task: TrainTask, compute: ComputeSpec | None) -> Iterator[Issue]:
    if isinstance(task.data, StreamData) and _SCHEME.match(task.data.dataset):
        yield from _stream_issues(task.data.dataset)
    yield from _length_issues(task)
    yield from _model_issues(task)
    yield from _optim_issues(task)
    yield from _precision_issues(task)
    profile = task.logging.profile
    if profile is not None and profile.steps > profile.every_steps:
        problem = f"a trace would be longer than the {profile.every_steps} steps to the next one"
        yield Issue(
            "profile-steps-overlap",
            "task.logging.profile.steps",
            problem,
            profile.steps,
            f"Use at most {profile.every_steps}",
        )
    yield from task.parallelism.training_issues(
        TrainingFacts(
            task.micro_batch_size,
            task.data.seq_length,
            compiles=task.precision.compile,
            compute=task.precision.compute,
            samples=task.logging.sample_prompt is not None,
        )
    )
    if compute is None:
        return
    try:
        derive_task(task, compute.world_size, node_size=compute.processes)
    except SpecError as error:
        yield from error.issues


def _length_issues(task: TrainTask) -> Iterator[Issue]:
    lengths = {"max_steps": task.max_steps, "max_tokens": task.max_tokens, "max_epochs": task.max_epochs}
    given = {name: value for name, value in lengths.items() if value is not None}
    if len(given) != 1:
        problem = f"give exactly one of {', '.join(lengths)}"
        ways = [
            " ".join(f"task.{other}=null" for other in given if other != kept) + f" keeps {kept}"
            for kept in reversed(given)
        ]
        remedy = f"Keep one and set the others to null, e.g. {', '.join(ways)}"
        yield (
            Issue("length-not-exactly-one", "task.max_steps", problem, given, remedy)
            if given
            else Issue("length-not-exactly-one", "task.max_steps", problem)
        )
    elif task.max_epochs is not None and isinstance(task.data, StreamData):
        yield Issue(
            "stream-without-length",
            "task.max_epochs",
            "a stream has no known length",
            task.max_epochs,
            "Use max_steps or max_tokens",
        )


def _model_issues(task: TrainTask) -> Iterator[Issue]:
    model = task.model
    if model.preset is not None and model.path is not None:
        yield Issue(
            "model-given-twice",
            "task.model",
            "give preset or path, not both",
            {"preset": model.preset, "path": model.path},
        )
    pretrained = isinstance(task.start, PretrainedStart)
    if model.preset is None and model.path is None and not pretrained:
        yield Issue(
            "model-missing", "task.model", "no model", remedy="Give model.preset, model.path or start.pretrained"
        )
    try:
        json.dumps(model.config, allow_nan=False)
    except (TypeError, ValueError) as error:
        yield Issue("model-config-not-json", "task.model.config", f"cannot be written as JSON: {error}", model.config)


def _optim_issues(task: TrainTask) -> Iterator[Issue]:
    optim = task.optim
    if optim.warmup_steps is not None and optim.warmup_fraction is not None:
        yield Issue(
            "warmup-given-twice", "task.optim.warmup_fraction", "give warmup_steps or warmup_fraction, not both"
        )
    if optim.min_learning_rate > optim.learning_rate:
        problem = f"the floor is above the peak learning_rate {optim.learning_rate}"
        yield Issue("learning-rate-floor-above-peak", "task.optim.min_learning_rate", problem, optim.min_learning_rate)
    if optim.learning_rate * optim.weight_decay >= 1:
        problem = f"times learning_rate {optim.learning_rate:g} is 1 or more: a step would turn every matrix's sign"
        yield Issue("weight-decay-too-large", "task.optim.weight_decay", problem, optim.weight_decay, "For example 0.1")
    if optim.schedule == "exponential" and optim.min_learning_rate == 0:
        problem = "an exponential schedule never reaches 0 and needs a floor above it"
        yield Issue(
            "exponential-schedule-without-floor",
            "task.optim.min_learning_rate",
            problem,
            0.0,
            f"For example {optim.learning_rate / 100:g}",
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Issue(
            "betas-out-of-range", "task.optim.betas", "each must be at least 0 and less than 1", list(optim.betas)
        )


def _precision_issues(task: TrainTask) -> Iterator[Issue]:
    if task.precision.master == "bf16" and task.precision.compute == "fp32":
        problem = "compute is fp32, which has more digits than the parameters would"
        yield Issue(
            "master-precision-below-compute",
            "task.precision.master",
            problem,
            "bf16",
            "Use compute: bf16, or master: fp32",
        )


def _prepare_issues(task: PrepareTask) -> Iterator[Issue]:
    if task.tokenizer is not None and task.train_tokenizer != TrainTokenizer():
        yield Issue("tokenizer-given-twice", "task.train_tokenizer", "give tokenizer or train_tokenizer, not both")


def _precompile_issues(task: PrecompileTask, compute: ComputeSpec | None) -> Iterator[Issue]:
    if not task.training.parallelism.can.compiles_ahead:
        seen, remedy = task.training.parallelism.strategy, "Only nxd compiles ahead"
        yield Issue(
            "precompile-needs-nxd", "task.training.parallelism.strategy", "has no graphs to compile", seen, remedy
        )
    yield from map(_of_precompiled, _train_issues(task.training, compute))


def _of_precompiled(issue: Issue) -> Issue:
    """An issue of the training that a precompile task holds."""
    return replace(issue, path=issue.path.replace("task.", "task.training.", 1))


def _name_issues(path: str, name: str, suffix_of: str = "") -> Iterator[Issue]:
    whole = f"{suffix_of}-{name}" if suffix_of else name
    if not _NAME.fullmatch(name):
        valid = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "my-run"
        yield Issue(
            "name-invalid", path, "a name has letters, digits and hyphens only, none at its ends", name, f"Try {valid}"
        )
    elif len(whole) > NAME_LENGTH:
        yield Issue(
            "name-too-long", path, f"a name has at most {NAME_LENGTH} characters", whole, f"This one has {len(whole)}"
        )


def _stream_issues(dataset: str) -> Iterator[Issue]:
    match = _HUB.fullmatch(dataset)
    if not dataset.startswith("hf://datasets/") or match is None or match["path"]:
        remedy = "Write hf://datasets/org/name@revision, and files of it as data_files"
        yield Issue("stream-dataset-invalid", "task.data.dataset", "is not a data set on the hub", dataset, remedy)


def _fetch_issues(task: FetchTask) -> Iterator[Issue]:
    if _HUB.fullmatch(task.source):
        return
    remedy = "Write hf://org/name@revision; files elsewhere are read where they are, or copied by sm-llm sync"
    yield Issue("fetch-source-invalid", "task.source", "is not an address on the hub", task.source, remedy)


def _class_issues(options: StorageOptions) -> Iterator[Issue]:
    """Storage classes of S3 whose objects cannot be read at once, and names that S3 does not know; other stores have
    their own."""
    path, name = "storage_options.storage_class", options.storage_class
    if name in _ARCHIVES:
        problem = "is an archive: no checkpoint could be read again before it is restored"
        yield Issue("storage-class-archived", path, problem, name, "Use STANDARD, INTELLIGENT_TIERING or GLACIER_IR")
    elif name is not None and options.endpoint_url is None and name not in _CLASSES:
        yield Issue(
            "storage-class-unknown", path, "is not a storage class of S3", name, f"Known: {', '.join(_CLASSES)}"
        )


def _place_issues(path: str, place: str, *, hub: bool = False) -> Iterator[Issue]:
    """``hub``: whether the place may be on the Hugging Face hub."""
    scheme = _SCHEME.match(place)
    if not place.strip():
        yield Issue("address-empty", path, "is empty", place)
    elif scheme and scheme[1] == "hf" and hub:
        if not _HUB.fullmatch(place):
            yield Issue(
                "hub-address-invalid",
                path,
                "is not an address on the hub",
                place,
                "Write hf://org/name@revision or hf://datasets/…",
            )
    elif scheme and scheme[1] not in _SCHEMES:
        known = ", ".join(f"{it}://" for it in (*_SCHEMES, *(["hf"] if hub else [])))
        yield Issue(
            "address-scheme-unsupported",
            path,
            f"{scheme[1]}:// is not supported",
            place,
            f"Give a folder, or one of {known}",
        )
    elif scheme and scheme[1] == "s3" and (problem := bucket_problem(place[len("s3://") :].partition("/")[0])):
        yield Issue(
            "bucket-name-invalid", path, f"names no valid bucket: a name {problem}", place, "Write s3://bucket/prefix"
        )
    elif scheme and scheme[1] == "s3" and not set(place.rstrip("/").split("/")[3:]).isdisjoint(_NO_FOLDERS):
        problem = "holds an empty folder, '.' or '..', which S3 takes for names"
        yield Issue("address-folders-odd", path, problem, place, f"Write {_without_odd_folders(place)}")


def _without_odd_folders(place: str) -> str:
    """The address that is probably meant: a user who writes ``..`` means the folder above."""
    bucket, _, prefix = place[len("s3://") :].partition("/")
    below = posixpath.normpath("/" + prefix.lstrip("/"))
    return f"s3://{bucket}{below}".rstrip("/")
