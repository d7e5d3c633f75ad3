"""Checkers of a training task: its length, model, optimiser, precision and degrees."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.derive import derive_task
from sm_llm.spec.parallelism.base import TrainingFacts
from sm_llm.spec.training import STREAM_BUILDERS, PretrainedStart, StreamData
from sm_llm.spec.validation.address_checks import HUB, SCHEME
from sm_llm.spec.validation.runner import blocked_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.machines.compute import ComputeSpec
    from sm_llm.spec.tasks import TrainTask


@dataclass(frozen=True)
class TrainingSubject:
    """A training task and the machines that it is for. Issues have the paths of a job with this task."""

    task: TrainTask
    compute: ComputeSpec


def check_stream(training: TrainingSubject) -> Iterator[Issue]:
    """A streamed data set that is not one of the hub."""
    data = training.task.data
    if not isinstance(data, StreamData):
        return
    # datasets would fail only in the job, after it has been paid for.
    if data.dataset in STREAM_BUILDERS and not data.data_files:
        problem = f"no files, and the builder {data.dataset} reads files"
        yield Issue("stream-without-files", "task.data.data_files", problem, remedy="Give patterns or URLs of files")
    # A name without a scheme is a plain hub id or the name of a builder.
    if not SCHEME.match(data.dataset):
        return
    match = HUB.fullmatch(data.dataset)
    if not data.dataset.startswith("hf://datasets/") or match is None or match["path"]:
        problem = "is not a data set on the hub"
        remedy = "Write hf://datasets/org/name@revision, and files of it as data_files"
        yield Issue("stream-dataset-invalid", "task.data.dataset", problem, data.dataset, remedy)


def check_length(training: TrainingSubject) -> Iterator[Issue]:
    """How long it trains, given once."""
    task = training.task
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


def check_model(training: TrainingSubject) -> Iterator[Issue]:
    """Which model it trains, given once."""
    task = training.task
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
        # The config is written to job.json and to the checkpoint, and NaN is no JSON.
        json.dumps(model.config, allow_nan=False)
    except (TypeError, ValueError) as error:
        yield Issue("model-config-not-json", "task.model.config", f"cannot be written as JSON: {error}", model.config)


def check_optimiser(training: TrainingSubject) -> Iterator[Issue]:
    """Rates and decay that no training survives."""
    optim = training.task.optim
    if optim.warmup_steps is not None and optim.warmup_fraction is not None:
        yield Issue(
            "warmup-given-twice", "task.optim.warmup_fraction", "give warmup_steps or warmup_fraction, not both"
        )
    if optim.min_learning_rate > optim.learning_rate:
        problem = f"the floor is above the peak learning_rate {optim.learning_rate}"
        yield Issue("learning-rate-floor-above-peak", "task.optim.min_learning_rate", problem, optim.min_learning_rate)
    # AdamW multiplies a weight by 1 - learning_rate x weight_decay in every step.
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


def check_precision(training: TrainingSubject) -> Iterator[Issue]:
    """Number formats that do not go together."""
    task = training.task
    if task.precision.master == "bf16" and task.precision.compute == "fp32":
        problem = "compute is fp32, which has more digits than the parameters would"
        yield Issue(
            "master-precision-below-compute",
            "task.precision.master",
            problem,
            "bf16",
            "Use compute: bf16, or master: fp32",
        )
    slowest = max(task.optim.betas)
    # bf16 keeps 8 bits: a smaller change than this is rounded away, and a moment would never fall again.
    if task.precision.moments == "bf16" and slowest > 1 - 2**-8:
        problem = f"with a decay rate of {slowest:g} a step changes a moment by less than bf16 can hold (1 in 256)"
        remedy = "Leave it out, or use task.optim.betas of at most 0.996"
        yield Issue("moments-too-slow", "task.precision.moments", problem, "bf16", remedy)


def check_profile(training: TrainingSubject) -> Iterator[Issue]:
    """Traces that would overlap."""
    profile = training.task.logging.profile
    if profile is not None and profile.steps > profile.every_steps:
        problem = f"a trace would be longer than the {profile.every_steps} steps to the next one"
        remedy = f"Use at most {profile.every_steps}"
        yield Issue("profile-steps-overlap", "task.logging.profile.steps", problem, profile.steps, remedy)


def check_strategy(training: TrainingSubject) -> Iterator[Issue]:
    """What the strategy cannot do for this task."""
    task = training.task
    yield from task.parallelism.training_issues(
        TrainingFacts(
            task.micro_batch,
            task.data.seq_length,
            compiles=task.precision.compile is True,
            may_compile=task.precision.compile == "auto",
            chooses_micro_batch=task.micro_batch_size == "auto",
            compute=task.precision.compute,
            samples=task.logging.sample_prompt is not None,
            master=task.precision.master,
            reduce=task.precision.reduce,
            moments=task.precision.moments,
        )
    )


@blocked_by("compute.instance_type", "backend.instance_groups", "task.parallelism", "task.training.parallelism")
def check_batch(training: TrainingSubject) -> Iterator[Issue]:
    """Arithmetic of batch and schedule: what follows from wrong degrees would only repeat these."""
    compute = training.compute
    try:
        derive_task(training.task, compute.world_size, node_size=compute.processes)
    except SpecError as error:
        yield from error.issues
