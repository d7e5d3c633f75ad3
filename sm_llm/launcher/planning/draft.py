"""What is known of a plan while it is checked: a job's numbers, each computed once, with the issues on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sm_llm.contract.memory_estimate import MemoryEstimate, expected_attention, memory_estimate
from sm_llm.errors import DataError, Issue, PlanError, SpecError
from sm_llm.launcher.planning.local_paths import is_reference, local_folder, referenced_step
from sm_llm.launcher.planning.model_facts import ModelFacts, model_facts, planned_config, pretrained_source
from sm_llm.spec.derive import Derived, derive_task
from sm_llm.spec.job_machines import smallest_card
from sm_llm.spec.tasks import TrainTask, open_settings, with_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sm_llm.contract.memory_planner import Choice
    from sm_llm.data.describe import RowsInfo
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.tasks import PrepareTask


@dataclass(frozen=True)
class UpstreamOutput:
    """Facts of a prepare step that has not run yet, by its specification."""

    seq_length: int
    vocab_size: int | None
    has_validation: bool

    @classmethod
    def of(cls, task: PrepareTask) -> UpstreamOutput:
        """A given tokenizer's vocabulary is not known here: the step itself checks its ids."""
        vocabulary = None if task.tokenizer else task.train_tokenizer.vocab_size
        return cls(task.seq_length, vocabulary, task.validation_fraction > 0)


def tokenizer_vocabulary(folder: Path) -> int | None:
    """One more than the largest token id of ``tokenizer.json``; None where the folder has no such file.

    Raises ``DataError`` if the file is not JSON.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    # Imported here: most plans read no tokenizer.
    from sm_llm.data.describe import read_json

    tokenizer = read_json(path)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    # A BPE vocabulary maps token -> id; a unigram one is a list whose positions are the ids.
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in tokenizer.get("added_tokens") or [])
    return max([*ids, *added], default=-1) + 1


T = TypeVar("T")


@dataclass(frozen=True)
class Known(Generic[T]):
    """A value, or why there is none; neither where the job has no such thing, or it is not on this machine."""

    value: T | None = None
    issues: tuple[Issue, ...] = ()


@dataclass(frozen=True)
class Draft:
    """A job, and what follows from it. ``upstream`` has facts of earlier steps by name."""

    job: JobSpec
    upstream: Mapping[str, UpstreamOutput | None]
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted path -> where a value was written."""
    presets: Mapping[str, str | None] = field(default_factory=dict)
    """Earlier step -> the built-in architecture of the weights that it will put out, where it is one."""

    @property
    def training(self) -> TrainTask | None:
        """The task, where the job trains a model of ours."""
        return self.job.task if isinstance(self.job.task, TrainTask) else None

    @cached_property
    def config(self) -> Known[dict[str, Any]]:
        """The canonical config of the model; of an earlier step's output where it is that of a preset."""
        task = self.training
        # What an earlier step will put out has no config yet.
        if task is None or is_reference(task.model.path):
            return Known()
        if task.model.path is None and task.model.preset is None and is_reference(source := pretrained_source(task)):
            name = self.presets.get(referenced_step(source) or "")
            if name is None:
                return Known()
            task = task.model_copy(update={"model": task.model.model_copy(update={"preset": name})})
        return _known(lambda: planned_config(task))

    @cached_property
    def model(self) -> ModelFacts | None:
        """Numbers of the model."""
        task, config = self.training, self.config.value
        return None if task is None or config is None else model_facts(config, task)

    @cached_property
    def rows(self) -> Known[RowsInfo]:
        """Facts of the training rows where they are a folder on this machine."""
        task = self.training
        folder = local_folder(task.data.train) if task is not None and task.data.format == "rows" else None
        if folder is None or not folder.is_dir():
            return Known()
        from sm_llm.data.describe import describe_rows

        try:
            return Known(describe_rows(folder))
        except DataError:  # ``source_contents`` reports it
            return Known()

    @cached_property
    def choice(self) -> Choice | None:
        """What a worker on such GPUs chooses for settings that are ``auto``; None where nothing is, or no GPU known."""
        task, config, card, rows = self.training, self.config.value, smallest_card(self.job), self.rows.value
        if task is None or config is None or card is None or not task.parallelism.can.plans_memory:
            return None
        if not open_settings(task):
            return None
        from sm_llm.contract.memory_planner import Hardware, choose

        hardware = Hardware(card, self.job.compute.world_size, self.job.compute.processes)
        # Issues of the numbers are found where they are derived.
        return _known(lambda: choose(config, task, hardware, rows.rows if rows else None)).value

    @property
    def planned(self) -> TrainTask | None:
        """The training with what is chosen for it."""
        task, choice = self.training, self.choice
        return task if task is None or choice is None else with_settings(task, choice.values)

    @cached_property
    def derived(self) -> Known[Derived]:
        """Batch, steps and tokens of the training."""
        task, rows = self.planned, self.rows.value
        if task is None:
            return Known()
        return _known(lambda: derive_task(task, self.job.compute.world_size, rows.rows if rows else None))

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        """The peak of one GPU or NeuronCore, where those of the nodes are known; for degrees that fit alone."""
        task, config, derived = self.planned, self.config.value, self.derived.value
        card = smallest_card(self.job)
        if task is None or config is None or derived is None or card is None:
            return None
        return memory_estimate(config, task, derived, self.job.compute.processes, card)

    @cached_property
    def attention(self) -> str | None:
        """The kernel that should compute attention, where our own engine trains on GPUs that are known."""
        task, config, card = self.training, self.config.value, smallest_card(self.job)
        if task is None or config is None or card is None:
            return None
        return expected_attention(config, task, card)


def _known(compute: Callable[[], T]) -> Known[T]:
    try:
        return Known(compute())
    except (SpecError, PlanError) as error:
        return Known(None, error.issues)
