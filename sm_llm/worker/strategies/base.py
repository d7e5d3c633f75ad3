"""The interface of a training engine: what the loop asks of each strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from sm_llm.data.source import Batch
    from sm_llm.runs.events.events import AttentionChosen, CollectivesChosen, LayersCompiled
    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.worker.device import Device
    from sm_llm.worker.strategies.weights import WeightReader


class Strategy(Protocol):
    """Builds a sharded model and its optimiser and knows how to step, save and load them.

    It is made from (task, process, device) and used in this order: ``setup``, ``build``, then any number of steps, each
    ``forward_backward`` and ``update``. Parameter names are Hugging Face's everywhere, free of what sharding,
    checkpointing and compilation put between. A row of ``table`` names the class and the device it runs on.

    Micro-batches are the host's: a strategy moves them to its device as its engine wants them, one after the other or
    all at once. What it returns are tensors that the host has not waited for.
    """

    device: Device
    layout: Layout
    """Degrees of parallelism; known before ``setup``."""
    data_parallel_rank: int
    """Which of ``layout.data`` parts of a batch this process sees."""
    optimizer: torch.optim.Optimizer

    def setup(self) -> None:
        """Make the mesh and, unless the program has done so, the process group."""

    def refusal(self, saved: Mapping[str, Any]) -> str | None:
        """Why a checkpoint of a job with these degrees (``Layout.degrees``) cannot be continued; None if it can."""

    def build(self, config: Mapping[str, Any], weights: WeightReader | None) -> None:
        """Make the sharded model of a canonical Hugging Face ``config`` with ``weights``, and its optimiser.

        Without ``weights`` a checkpoint is loaded next (``state_dict`` or ``read_checkpoint``, then ``state_loaded``).
        """

    def forward_backward(self, micro_batches: Sequence[Batch], scale: torch.Tensor | float) -> torch.Tensor:
        """The forward and backward passes of this process's part of a step: the sum of its token losses. A collective.

        Returns nats, an fp64 scalar without a graph. Processes that share a sequence give the sums of their own
        tokens, those that share its matrices all the same, stages of a pipeline without the output head 0: over all
        processes the results add up to ``layout.tensor`` times the whole.

        Gradients are those of ``scale`` times the loss, averaged over the ``layout.loss_parts`` in the format of
        ``precision.reduce``, and NaN if a loss is not finite (``nonfinite_policy``). No process ever holds more
        of them than its shards and those of the layers that are just being computed.
        """

    def update(
        self, learning_rate: float, max_norm: float | None, targets: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimiser step at this rate, gradients clipped by ``max_norm``; they are gone afterwards. A collective.

        Returns the gradients' global norm before clipping, and ``nonfinite_policy.flag_of`` this norm and the step's
        ``targets``, both fp32 scalars. Where the flag is not 0, neither parameters nor optimiser state change, whatever
        the gradients hold.
        """

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """A forward pass alone: the sum of token losses (fp32 scalar), shared out as by ``forward_backward``."""

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n, seq] token ids -> [n, seq, vocab], the same on all processes that see these rows. A collective."""

    def attention(self) -> AttentionChosen | None:
        """The kernel that computes attention, since ``build``; None where a library of the engine chooses it."""

    def collectives(self) -> CollectivesChosen | None:
        """What gathers parameters and adds up gradients, since ``build``; None where nothing is sharded, or a library
        of the engine chooses it."""

    def compilation(self) -> LayersCompiled | None:
        """What torch.compile made of the layers, up to now; None where none is compiled. Ends the counting."""

    def train_mode(self, enabled: bool) -> None:
        """Switch dropout on or off."""

    def state_dict(self) -> dict[str, Any]:
        """Sharded model and optimiser state by flat name, for torch.distributed.checkpoint.

        The tensors are the live ones: what is loaded into them in place is loaded.
        """

    def state_loaded(self) -> None:
        """Called once a checkpoint was loaded: bring what is derived from its tensors up to date."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the unsharded model by Hugging Face name, one at a time, whole on rank 0's host memory.

        A collective: all ranks iterate in step; ranks other than 0 get empty tensors. The format is the compute format.
        """

    def close(self) -> None:
        """Leave the process group that ``setup`` initialised."""


@runtime_checkable
class CheckpointLibrary(Protocol):
    """A strategy whose library writes and reads its checkpoints, in a layout of its own.

    Of any other strategy torch.distributed.checkpoint writes what ``state_dict`` holds. Both methods with a folder are
    collectives of the thread that trains.
    """

    def checkpoint_bytes(self) -> int:
        """Bytes that this process writes of a checkpoint."""

    def write_checkpoint(self, folder: Path, step: int) -> None:
        """Write this process's part of the state after ``step`` below ``folder``, which processes of a node share."""

    def checkpoint_reads(self, step: int) -> list[str]:
        """What this process reads below the folder of a whole checkpoint: files, and folders, which end with "/"."""

    def read_checkpoint(self, folder: Path, step: int) -> None:
        """Put a checkpoint of ``step`` into model and optimiser. Raises ``CheckpointError`` for one that differs."""
