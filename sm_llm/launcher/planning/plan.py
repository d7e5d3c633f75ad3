"""The Plan: one checked job with every number that follows from it, as a pure value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sm_llm.contract.image_packages import REQUIREMENTS
from sm_llm.errors import PlanError
from sm_llm.launcher.planning.local_paths import contents, local_folder
from sm_llm.redaction import redact
from sm_llm.spec.inputs import FileSystemInput, S3Input, input_location
from sm_llm.spec.job_machines import smallest_card
from sm_llm.spec.tasks import AUTO, ConvertTask, PrepareTask, ScriptTask, TrainTask, settled_compute, training_of
from sm_llm.spec.training import CheckpointStart, PretrainedStart, StreamData, SyntheticData
from sm_llm.terminal import counted, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.contract.memory_estimate import MemoryEstimate
    from sm_llm.contract.memory_planner import Choice
    from sm_llm.errors import Issue
    from sm_llm.launcher.planning.model_facts import ModelFacts
    from sm_llm.spec.derive import Derived
    from sm_llm.spec.inputs import Input
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.machines.hardware import Card


RANDOM = "RANDOM TOKENS"
_LISTED = 8
_NARROWEST = 10
# Characters of a program's arguments that are shown.
_LONGEST = 500
# Of an input channel what needs no words.
_USUAL = ("FullyReplicated", "S3Prefix")


def settings(job: JobSpec, rows: int | None = None) -> dict[str, str]:
    """Name -> value in words. ``rows`` are those of the training data, where they are known."""
    task = job.task
    training = training_of(task)
    found: dict[str, str] = {}
    if training is not None:
        found |= {
            "data": _data(training, rows),
            "start": _start(training),
            "tokenizer": training.tokenizer or "none: the result has none",
            "precision": _precision(training, smallest_card(job)),
        }
    elif isinstance(task, PrepareTask):
        found["reads"] = ", ".join(_with_contents(source) for source in task.sources)
        trained = f"trained on the text, {task.train_tokenizer.vocab_size:,} entries"
        found["tokenizer"] = task.tokenizer or trained
    elif isinstance(task, ConvertTask):
        found["converts"] = _conversion(task)
    elif isinstance(task, ScriptTask):
        found["program"] = f"{task.entry} of {task.source or 'the image'}{_without_runs(job, task.source)}"
        if words := _arguments(task):
            found["arguments"] = words
        if wanted := requirements(job):
            more = f" and {len(wanted) - _LISTED} more" if len(wanted) > _LISTED else ""
            found["installs"] = f"{', '.join(wanted[:_LISTED])}{more} ({task.source}/{REQUIREMENTS}, once per node)"
    if training is not None and (trackers := _trackers(training)):
        found["trackers"] = trackers
    if job.environment:
        found["environment"] = _shortened(redact(quoted(*(f"{name}={it}" for name, it in job.environment.items()))))
    if job.secrets:
        found["secrets"] = ", ".join(f"{name} from {reference}" for name, reference in job.secrets.items())
    mounts = job.backend.mounts_inputs
    return found | {f"input {name}": _input(value, mounts=mounts) for name, value in job.inputs.items()}


def _conversion(task: ConvertTask) -> str:
    """What is read and written; the degrees of shards that are read are those of their manifest."""
    source = _with_contents(task.source)
    if task.to == "hf":
        return f"{source} -> a Hugging Face folder"
    tensor, pipeline, virtual = (
        task.tensor_parallel_degree, task.pipeline_parallel_degree, task.virtual_pipeline_degree,
    )  # fmt: skip
    stages = f" ({virtual} parts of the layers each)" if virtual > 1 else ""
    files = f"tensor {tensor} x pipeline {pipeline}{stages} = {counted(tensor * pipeline, 'shard file')}"
    beside = ", each tensor in a file beside them" if task.xser else ""
    return f"{source} -> neuronx-distributed: {files}{beside}; qkv {task.qkv}, layout {task.layout}"


def _trackers(task: TrainTask) -> str:
    """The experiment trackers of a training, each with what was set of it."""
    chosen = {name: getattr(task.logging.sinks, name) for name in type(task.logging.sinks).model_fields}
    given = {name: it.model_dump(exclude_none=True) for name, it in chosen.items() if it is not None}
    words = (f"{name} ({', '.join(f'{key} {it}' for key, it in own.items())})" for name, own in given.items() if own)
    return redact(", ".join([*words, *(name for name, own in given.items() if not own)]))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _input(value: Input, *, mounts: bool) -> str:
    """Where an input lies, how the job gets it, and what is in it where that is on this machine.

    ``mounts``: whether the backend brings inputs into the job in the mode that they ask for.
    """
    if isinstance(value, str) or (isinstance(value, S3Input) and not mounts):
        return _with_contents(input_location(value))
    if isinstance(value, FileSystemInput):
        return f"{value.uri} (mounted {'read only' if value.access_mode == 'ro' else 'to read and write'})"
    # The mode is shown even where it is the default: copying all of an input may take longer than the job.
    words = [value.mode, *(it for it in (value.distribution, value.data_type) if it not in _USUAL)]
    return f"{value.uri} ({', '.join(words)})"


def _with_contents(location: str) -> str:
    """A place, with the number and size of its files where it is on this machine."""
    folder = local_folder(location)
    return location if folder is None or not folder.exists() else f"{location} ({contents(folder)})"


def _arguments(task: ScriptTask) -> str:
    """What the program is given, as in a shell, and what is left out of it."""
    from sm_llm.contract.program import argument_words, given_arguments

    words = quoted(*argument_words(task)) if task.args else ""
    shown = _shortened(words)
    nulls = sorted(set(task.args) - set(given_arguments(task))) if isinstance(task.args, dict) else []
    left_out = f"({'left out, null: ' + ', '.join(nulls)})" if nulls else ""
    # An address among them may hold a password.
    return redact(" ".join(filter(None, [shown, left_out])))


def _without_runs(job: JobSpec, source: str | None) -> str:
    """Warns where the program's folder holds the storage of the run, which is not part of the program."""
    folder, storage = local_folder(source), local_folder(job.storage)
    if folder is None or storage is None or not storage.resolve().is_relative_to(folder.resolve()):
        return ""
    return f" (without the runs in {job.storage})"


def requirements(job: JobSpec) -> list[str]:
    """The lines of a program's requirements that ask for something; empty where it is not on this machine."""
    folder = local_folder(job.task.source) if isinstance(job.task, ScriptTask) else None
    file = None if folder is None else folder / REQUIREMENTS
    if file is None or not file.is_file():
        return []
    from sm_llm.launcher.planning.requirement_file import logical_lines

    # A token in an index's address would be stored and shown with the plan.
    return [redact(line) for _, line in logical_lines(file.read_text(encoding="utf-8-sig", errors="replace"))]


def _data(task: TrainTask, rows: int | None) -> str:
    data = task.data
    if isinstance(data, SyntheticData):
        return f"{RANDOM}: {counted(data.rows, 'row')} of {data.seq_length:,} (task.data.format=synthetic)"
    if isinstance(data, StreamData):
        return f"{data.dataset}, split {data.split}, streamed into rows of {data.seq_length:,} tokens"
    count = f"{rows:,} " if rows is not None else ""
    return f"{data.train} ({count}rows of {data.seq_length:,} tokens)"


def _start(task: TrainTask) -> str:
    if isinstance(task.start, PretrainedStart):
        return f"weights of {task.start.pretrained}"
    if isinstance(task.start, CheckpointStart):
        return f"checkpoint {task.start.checkpoint}"
    return f"random weights (seed {task.seed})"


def _precision(task: TrainTask, card: Card | None) -> str:
    precision = task.precision
    compute: str = precision.compute
    if compute == AUTO and card:
        compute = f"{settled_compute(task, has_bf16=card.has_bf16).precision.compute} (auto, on {card.name})"
    elif compute == AUTO:
        compute = "bf16 where the hardware has it, else fp32"
    moments = f", AdamW's moments in {precision.moments}" if precision.moments != "master" else ""
    compiled = ", compiled" if precision.compile is True else ""
    states = f"parameters in {precision.master}{moments}, gradients summed in {precision.reduce}"
    return f"computes in {compute}; {states}{compiled}"


class Target(Protocol):
    """What a backend has decided for a plan, as typed values, once; each backend has a frozen dataclass of its own."""

    @property
    def command(self) -> tuple[tuple[str, ...], ...]:
        """The argument list of every node; ``<run>`` and ``<free-port>`` are filled in at launch."""

    @property
    def facts(self) -> Mapping[str, str]:
        """The decisions in words, in the order to show them: image, time limit, account, devices."""


@dataclass(frozen=True)
class PlainTarget:
    """The target of a backend that decides nothing beside these."""

    command: tuple[tuple[str, ...], ...]
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checks:
    """A backend's answer to one plan. ``target`` is None where an issue keeps it from being decided."""

    target: Target | None
    issues: tuple[Issue, ...] = ()
    """Errors and warnings."""
    unsupported: tuple[Issue, ...] = ()
    """Why a job that is right cannot run here as things stand: what is not installed on this machine."""


@dataclass(frozen=True)
class Plan:
    """One job, checked, with every number that follows from it. ``step`` is its name in a workflow."""

    job: JobSpec
    digest: str
    world_size: int
    target: Target | None = None
    """What the backend has decided; None only until it is asked, in its own ``plan_checks``."""
    derived: Derived | None = None
    model: ModelFacts | None = None
    rows: int | None = None
    """Training rows, where they exist already."""
    memory: MemoryEstimate | None = None
    """At the peak of a training, where its GPUs are known."""
    choice: Choice | None = None
    """What a worker on these GPUs chooses for settings that are ``auto``; the numbers are those of its values."""
    attention: str | None = None
    """The kernel that should compute attention on these GPUs; the worker finds out whether it does."""
    issues: tuple[Issue, ...] = ()
    """Warnings; an error leaves no plan."""
    unsupported: tuple[Issue, ...] = ()
    """Why the job can be planned and rendered, but cannot run yet or here; every way of starting it refuses
    (``assert_supported``)."""
    step: str | None = None
    after: tuple[str, ...] = ()
    start: str = ""
    """Where it starts, in words, if not as its specification asks: at a checkpoint of the run that it continues."""
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of ``issues``."""
        return tuple(map(str, self.issues))

    @property
    def command(self) -> tuple[tuple[str, ...], ...]:
        """The argument list of every node; ``<run>`` and ``<free-port>`` are filled in at launch."""
        return self.target.command if self.target is not None else ()

    @property
    def facts(self) -> Mapping[str, str]:
        """What the backend decided, in words: image, time limit, account."""
        return self.target.facts if self.target is not None else {}

    @property
    def total_flops(self) -> float | None:
        """FLOPs of the whole training, forward and backward."""
        tokens = self.derived.total_tokens if self.derived else None
        return None if self.model is None or tokens is None else self.model.flops_per_token * tokens

    @property
    def settings(self) -> dict[str, str]:
        """Data, start, tokenizer, precision and what is installed, in words."""
        return settings(self.job, self.rows) | ({"start": self.start} if self.start else {})

    def start_lines(self) -> list[str]:
        """What to show where the job is started: its settings, and its warnings."""
        warnings = [f"  warning: {text}" for text in self.warnings]
        width = max([_NARROWEST, *map(len, self.settings)])
        return [*(f"  {name:<{width}} {value}" for name, value in self.settings.items()), *warnings]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; the spec is in ``job``."""
        return {
            "name": self.job.name,
            "step": self.step,
            "after": list(self.after),
            "kind": self.job.task.kind,
            "backend": self.job.backend.name,
            "digest": self.digest,
            "world_size": self.world_size,
            "derived": None if self.derived is None else asdict(self.derived),
            "model": None if self.model is None else asdict(self.model),
            "rows": self.rows,
            "memory": None
            if self.memory is None
            else {**asdict(self.memory), "total": self.memory.total, "by_card": self.memory.by_card},
            "attention": self.attention,
            "choice": None if self.choice is None else self.choice.to_json(),
            "total_flops": self.total_flops,
            "command": [list(argv) for argv in self.command],
            "warnings": list(self.warnings),
            "issues": [issue.to_json() for issue in self.issues],
            "settings": self.settings,
            "facts": dict(self.facts),
            "job": self.job.model_dump(mode="json"),
            **({"unsupported": [it.to_json() for it in self.unsupported]} if self.unsupported else {}),
        }

    def summary(self) -> str:
        """One line for logs: name, model, batch and length."""
        parts = [
            f"{self.job.name}: {self.job.task.kind} on {counted(self.world_size, 'process')}, {self.job.backend.name}"
        ]
        if self.model is not None:
            parts.append(f"{self.model.model_type} with {self.model.parameters:,} parameters")
        if self.derived is not None:
            parts.append(f"{self.derived.total_steps or '?'} steps of {self.derived.tokens_per_step:,} tokens")
        return ", ".join(parts)


def assert_supported(plans: Sequence[Plan]) -> None:
    """Raise one ``PlanError`` with everything for which jobs cannot run yet or here.

    The gate of every way to start a job: launch, resume, estimators and pipelines.
    """
    if found := [issue for plan in plans for issue in plan.unsupported]:
        raise PlanError(found)
