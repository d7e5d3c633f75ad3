"""Loss and perplexity on the validation rows, the same for any number of processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sm_llm.data.loader import evaluation_batches
from sm_llm.runs.events.events import Validation
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from sm_llm.data.source import Source
    from sm_llm.worker.strategies.base import Strategy


@torch.no_grad()
def validate(
    strategy: Strategy, source: Source, *, step: int, micro_batch_size: int, max_rows: int | None
) -> Validation:
    """Mean token loss (nats) over the first ``max_rows`` rows (None: all) after ``step`` steps. A collective.

    Every row is seen by exactly one data-parallel rank. Perplexity is exp(loss), infinity where that overflows.
    """
    rank, layout = strategy.data_parallel_rank, strategy.layout
    # Counts of tokens are exact in fp64 up to 2**53.
    total = torch.zeros(2, dtype=torch.float64, device=strategy.device.counts)
    strategy.train_mode(False)
    for batch in evaluation_batches(source, micro_batch_size, rank, layout.data, max_rows):
        total[0] += strategy.evaluate(batch).to(total.device)
        # A row is counted by all world_size / data processes that see it, its loss by each tensor-parallel group once.
        total[1] += batch.targets * layout.data * layout.tensor / layout.world_size
    strategy.train_mode(True)
    if layout.world_size > 1:
        dist.all_reduce(total)
    # The only wait for the device.
    loss_sum, targets = total.tolist()
    loss = loss_sum / targets
    return Validation(step, loss, _perplexity(loss), round(targets / layout.tensor))


def sentence(found: Validation, total_steps: int) -> str:
    """A validation in one line of the log."""
    return (
        f"step {found.step}/{total_steps} | validation loss {found.validation_loss:.4f} | "
        f"perplexity {found.perplexity:.2f} | {counted(found.tokens, 'token')}"
    )


def not_finite_warning(found: Validation) -> str | None:
    """What to report of a validation loss that is NaN or infinite; None of any other.

    ``task.not_finite`` judges updates, and a validation makes none.
    """
    if math.isfinite(found.validation_loss):
        return None
    return (
        f"step {found.step}: the validation loss must be finite, got {found.validation_loss}: the model overflows on "
        "validation rows. Training continues, for task.not_finite judges steps of training alone. Lower "
        "task.optim.learning_rate, or check the validation rows in task.data"
    )


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
