"""Turns a training task into what the loop runs on: model config, data, derived numbers, number format, costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.data import soundness
from sm_llm.data.loader import AnySource, open_source
from sm_llm.data.source import Source
from sm_llm.errors import Issue, SpecError
from sm_llm.models.config import model_config
from sm_llm.models.families.table import family
from sm_llm.models.parallel import model_issues
from sm_llm.spec.derive import Derived, derive_task
from sm_llm.spec.machines.hardware import peak_flops
from sm_llm.spec.tasks import settled_compute
from sm_llm.spec.training import PretrainedStart
from sm_llm.worker.training.step_metrics import Costs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.device import Device


@dataclass(frozen=True)
class Setup:
    """Everything about a training job that follows from its specification and its data."""

    task: TrainTask
    layout: Layout
    config: Mapping[str, Any]
    train: AnySource
    validation: Source | None
    derived: Derived
    total_steps: int
    warnings: tuple[str, ...] = ()
    """What about the data is probably not meant."""

    @property
    def schedule_steps(self) -> int:
        """Steps that the learning rate's schedule spans."""
        return self.derived.schedule_steps or self.total_steps

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's folder."""
        return None if self.task.tokenizer is None else Path(self.task.tokenizer)

    def costs(self, device: Device) -> Costs:
        """What a step costs on ``device``."""
        kind = family(self.config)
        return Costs(
            tokens_per_step=self.derived.tokens_per_step,
            flops_per_token=kind.flops_per_token(self.config, self.derived.seq_length),
            flops_formula=kind.flops_formula,
            peak_flops=peak_flops(device.name),
            world_size=self.derived.world_size,
        )


def set_up(task: TrainTask, layout: Layout, node_size: int, scratch: Path) -> Setup:
    """Read the model's config, open the data and derive the numbers. Sources in ``task`` are local,
    ``node_size`` processes run on each node.

    Raises ``SpecError`` for a model or numbers that do not fit, ``DataError`` for unusable data.
    """
    # The model first: reading its config is cheap, opening the data may not be.
    config = config_of(task)
    if issues := model_issues(config, task.parallelism.strategy, task.parallelism.model_dump()):
        raise SpecError(issues)
    vocab_size = family(config).vocab_size(config)
    train = open_source(task.data, "train", vocab_size, task.seed, task.tokenizer, scratch)
    validation = open_source(task.data, "validation", vocab_size, task.seed, task.tokenizer, scratch)
    warnings: list[str] = []
    if isinstance(train, Source):
        # A stream cannot be checked before it is read; rows can.
        soundness.check_targets(train, "task.data.train")
        warnings = soundness.warnings(train)
    if validation is not None:
        soundness.check_targets(validation, "task.data.validation", task.validation.max_rows)
    # Derived again in the job: only here the number of rows is known for certain.
    derived = derive_task(task, layout.world_size, train.count, node_size=node_size)
    if derived.total_steps is None:
        issue = Issue(
            "stream-without-epochs",
            "task.max_epochs",
            "a stream has no epochs",
            task.max_epochs,
            "Set max_steps or max_tokens",
        )
        raise SpecError([issue])
    return Setup(task, layout, config, train, validation, derived, derived.total_steps, tuple(warnings))


def config_of(task: TrainTask) -> dict[str, Any]:
    """The model's config, from the preset or folder that ``task`` names."""
    pretrained = task.start.pretrained if isinstance(task.start, PretrainedStart) else None
    return model_config(
        preset=task.model.preset, path=task.model.path, pretrained=pretrained, overrides=task.model.config
    )


def settled(task: TrainTask, device: Device) -> TrainTask:
    """``task`` in the number format that ``device`` computes natively, where ``precision.compute`` is ``auto``."""
    return settled_compute(task, has_bf16=device.computes_bf16())
