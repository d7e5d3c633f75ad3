"""The interface of a training engine: what the loop asks of fsdp and smp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from sm_llm.runs.events.events import LayersCompiled
    from sm_llm.spec.parallelism.layout import Layout
    from sm_llm.worker.checkpoint.weights import WeightReader


class Strategy(Protocol):
    """Builds a sharded model and its optimiser and knows how to step, save and load them.

    Used in this order: ``setup``, ``build``, then any number of steps. Parameter names are Hugging Face's everywhere,
    free of what sharding, checkpointing and compilation put between.
    """

    device: torch.device
    layout: Layout
    """Degrees of parallelism; known before ``setup``."""
    data_parallel_rank: int
    """Which of ``layout.data`` parts of a batch this process sees."""
    optimizer: torch.optim.Optimizer

    def setup(self) -> None:
        """Initialise the device, the mesh and, unless the program has done so, the process group."""

    def refusal(self, saved: Mapping[str, Any]) -> str | None:
        """Why a checkpoint of a job with these degrees (``Layout.degrees``) cannot be continued; None if it can."""

    def build(self, config: Mapping[str, Any], weights: WeightReader | None) -> None:
        """Make the sharded model of a canonical Hugging Face ``config`` with ``weights``, and its optimiser.

        Without ``weights`` a checkpoint is loaded next (``state_dict``, ``state_loaded``).
        """

    def loss_sum(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward pass: sum of token losses (nats, fp32 scalar with its graph). A collective.

        ``input_ids`` and ``targets``, int64 [n, seq] on ``device``, are whole rows; position t predicts ``targets[t]``,
        -100 does not count. Processes that share a sequence give the sums of their own tokens, those that share its
        matrices all the same: over all processes the results add up to ``layout.tensor`` times the whole.
        """

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n, seq] token ids -> [n, seq, vocab], the same on all processes that see these rows. A collective."""

    def compilation(self) -> LayersCompiled | None:
        """What torch.compile made of the layers, up to now; None where none is compiled. Ends the counting."""

    def train_mode(self, enabled: bool) -> None:
        """Switch dropout on or off."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward and backward; after the last, gradients are summed over all processes.

        They are averaged over the ``layout.loss_parts``, in the format of ``precision.reduce``. No process ever holds
        more of them than its shards and those of the layers that are just being computed.
        """

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Clip by, and return, the global gradient norm as a device scalar (no host synchronisation)."""

    def update(self, learning_rate: float, skip: torch.Tensor) -> None:
        """One optimiser step at this rate; gradients are gone afterwards.

        Where ``skip``, an fp32 scalar on ``device``, is 1, neither parameters nor optimiser state change, whatever the
        gradients hold. The host does not read it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Sharded model and optimiser state by flat name, for torch.distributed.checkpoint.

        The tensors are the live ones: what is loaded into them in place is loaded.
        """

    def state_loaded(self) -> None:
        """Called after tensors of ``state_dict`` were written: bring what is derived from them up to date."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the unsharded model by Hugging Face name, one at a time, whole on rank 0's host memory.

        A collective: all ranks iterate in step; ranks other than 0 get empty tensors. The format is the compute format.
        """

    def close(self) -> None:
        """Leave the process group that ``setup`` initialised."""
