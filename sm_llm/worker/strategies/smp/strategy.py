"""SageMaker's model parallel library v2 over FSDP1, on the software of AWS's last image for it (PyTorch 2.5.1)."""

from __future__ import annotations

import math
import os
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecision

from sm_llm.errors import CheckpointError
from sm_llm.models.families.family import Tensor
from sm_llm.models.families.table import family
from sm_llm.spec.parallelism.base import FP8_UNIT
from sm_llm.worker.device import DTYPES, ask_for_determinism
from sm_llm.worker.parameter_names import with_plain_names
from sm_llm.worker.strategies.chunks import chunk_positions
from sm_llm.worker.strategies.passes import forward_loss, run_passes
from sm_llm.worker.strategies.smp import library
from sm_llm.worker.strategies.smp import model as smp_model
from sm_llm.worker.strategies.smp.shards import ParameterSlice, fill, named_parameters, pieces, reshard
from sm_llm.worker.strategies.weights import InitialWeights
from sm_llm.worker.training.nonfinite_policy import flag_of
from sm_llm.worker.training.optim import MOMENTS, build_adamw, set_learning_rate
from sm_llm.worker.training.token_loss import token_loss_sum

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from sm_llm.data.source import Batch
    from sm_llm.spec.parallelism.smp import SmpSpec
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.device import Device
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.strategies.weights import WeightReader

# Degrees that a checkpoint of each process's own shards is bound to.
_KEPT = ("shard_degree", "tensor_parallel_degree", "expert_parallel_degree")


class SmpStrategy:
    """SMP v2 (``Strategy``): hybrid sharding, tensor, context and expert parallelism, offloading and fp8.

    Without those degrees and fp8 the model keeps transformers' layers and its parameters their names, and every
    process fills in its own shards: initial weights are then those of any other strategy. The library's own layers get
    theirs from rank 0, or draw them where training starts from scratch without memory.

    A checkpoint holds each process's shards as they are: another number of copies can continue it, another shard,
    tensor- or expert-parallel degree cannot (``refusal``).
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, task: TrainTask, process: ProcessInfo, device: Device) -> None:
        self.device = device
        self._task = task
        self._smp = cast("SmpSpec", task.parallelism)
        self._process = process
        self._compute = DTYPES[task.precision.compute]
        self._owns_group = False
        self.layout = self._smp.layout(process.world_size)
        self.data_parallel_rank = self.layout.data_rank(process.rank)

    def setup(self) -> None:
        # As in all of AWS's scripts; TransformerEngine reads it when it is imported.
        os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
        # Processes name different shards: that is how a checkpoint of their own shards is meant.
        warnings.filterwarnings("ignore", message="Detected mismatched keys in state dict")
        self._owns_group = library.start_process_group(self.device.torch_device, self._smp.collectives)
        if self._task.deterministic:
            ask_for_determinism()
        library.start_library(self._smp.library_parameters(self._task.seed), os.environ)
        library.check_arrangement(self.layout, self._process.rank)

    def refusal(self, saved: Mapping[str, Any]) -> str | None:
        now = self.layout.degrees()
        changes = [f"{it} {saved[it]} -> {now[it]}" for it in _KEPT if saved.get(it, now[it]) != now[it]]
        if not changes:
            return None
        return (
            f"SMP's checkpoints hold each process's own shards and cannot be resharded ({', '.join(changes)}). "
            "Keep these degrees (hybrid_shard_degree is a number then, not 0, if the number of processes changes), or "
            "start a new run from a published model (start.pretrained)"
        )

    def build(self, config: Mapping[str, Any], weights: WeightReader | None) -> None:
        kind, smp = family(config), self._smp
        if weights is None:  # the library makes its layers of real ones
            weights = InitialWeights(kind.tensors(config), self._task.seed, self._process.local_world_size)
        self._tensors, self._vocab_size = kind.tensors(config), kind.vocab_size(config)
        self._config, self._model_type = config, kind.model_type
        own_layers, is_delayed = smp.needs_transform, smp.delayed_parameter_initialization
        from_rank0 = own_layers and not (is_delayed and isinstance(weights, InitialWeights))
        starts_real = not is_delayed or (from_rank0 and self._process.is_leader)
        model = smp_model.hugging_face_model(config, DTYPES[self._task.precision.master])
        # Only where the library needs real weights: of rank 0 alone, or of every process without delayed
        # initialisation.
        if starts_real:
            smp_model.fill_whole(model, weights)
        if own_layers:
            seed = smp.library_parameters(self._task.seed)["random_seed"]
            model = smp_model.transformed(model, config, smp, seed, from_rank0=from_rank0)
        layer = smp_model.layer_class(model, config, own_layers=own_layers)
        initer = None if starts_real else smp_model.delayed(model, self.device.torch_device, own_layers=own_layers)
        precision, device = self._mixed_precision(), self.device.torch_device
        self._fsdp = smp_model.sharded(model, layer, smp, precision, device, initer=initer, from_rank0=from_rank0)
        held = pieces(self._fsdp)
        self._model = smp_model.with_memory_saved(self._fsdp, layer, config, smp)
        self._parameters = {name: it for name, it in named_parameters(self._fsdp).items() if it.numel()}
        if not (own_layers or starts_real):
            fill(self._parameters, held, weights)
        self.optimizer = build_adamw(self._parameters, self._facts(held), self._task.optim)

    def _mixed_precision(self) -> MixedPrecision:
        reduce = DTYPES[self._task.precision.reduce]
        return MixedPrecision(param_dtype=self._compute, reduce_dtype=reduce, buffer_dtype=torch.float32)

    def _facts(self, held: Mapping[str, ParameterSlice]) -> dict[str, Tensor]:
        """What weight decay asks of every parameter; the library's own are recognised by their number of dimensions."""
        facts = {}
        for name, piece in held.items():
            group = "matrix" if len(piece.shape) > 1 else "norm"
            facts[name] = self._tensors.get(name) or Tensor(piece.shape, group, "normal")  # type: ignore[arg-type]
        return facts

    def forward_backward(self, micro_batches: Sequence[Batch], scale: torch.Tensor | float) -> torch.Tensor:
        return run_passes(self._loss_sum, self._accumulating, micro_batches, scale, self.device)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return forward_loss(self._loss_sum, batch, self.device)

    def _loss_sum(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss_sum(self._forward(input_ids), self._own(targets))

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of this process's tokens. [n, seq] -> [n, seq / context, vocab]."""
        with smp_model.fp8_context(self._smp):
            logits = self._model(input_ids=self._own(input_ids)).logits
        assert logits.shape[-1] == self._vocab_size, "the library splits logits without being asked"
        return cast("torch.Tensor", logits)

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """This process's tokens of [n, sequence]: two chunks, as the library's attention expects them."""
        if self.layout.context == 1:
            return whole
        positions = chunk_positions(whole.shape[1], self.layout.context, library.state("cp_rank", 0))
        return whole[:, positions.to(whole.device)]

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        length, degree = input_ids.shape[1], self.layout.context
        unit = math.lcm(2 * degree, FP8_UNIT) if self._smp.needs_transform else 1
        padded = torch.nn.functional.pad(input_ids, (0, -length % unit))  # behind them, where no token attends
        own = self._forward(padded).contiguous()
        if degree == 1:
            return own[:, :length]
        parts = [torch.empty_like(own) for _ in range(degree)]
        dist.all_gather(parts, own, group=library.state("cp_process_group"))
        order = torch.cat([chunk_positions(padded.shape[1], degree, it) for it in range(degree)])
        return torch.cat(parts, dim=1)[:, order.argsort().to(own.device)][:, :length]

    def attention(self) -> None:
        """None: SMP chooses it."""

    def collectives(self) -> None:
        """None: SMP brings its own."""

    def compilation(self) -> None:
        """None: SMP does not compile."""

    def train_mode(self, enabled: bool) -> None:
        self._model.train(enabled)

    def _accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Gradients are summed over processes, and kept sharded in the masters' format, after every micro-batch.

        FSDP1 can delay that only by holding whole gradients, which is what large models have no memory for.
        """
        return nullcontext()

    def update(
        self, learning_rate: float, max_norm: float | None, targets: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Without a limit it clips nothing, and still returns the norm.
        norm = library.clip_grad_norm(self._fsdp, math.inf if max_norm is None else max_norm)
        norm = norm.to(self.device.torch_device)
        flag = flag_of(norm, targets)
        set_learning_rate(self.optimizer, learning_rate)
        # What gradient scalers give fused optimisers: their kernels return early where it is 1, and no step is counted.
        self.optimizer.found_inf = flag.clamp(max=1.0)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, flag

    def state_dict(self) -> dict[str, Any]:
        """Names begin with the process's place among the shards: copies of a shard share theirs, and only those."""
        # After a validation parameters may still be gathered; the state would then hold whole ones.
        reshard(self._fsdp)
        with library.local_state(self._fsdp):
            local = with_plain_names(self._fsdp.state_dict().items())
        shard, state = self._shard_name(), {}
        for name, parameter in self._parameters.items():
            state[f"{shard}.model.{name}"] = local[name].detach()
            for moment in MOMENTS:
                state[f"{shard}.optimizer.{name}.{moment}"] = self.optimizer.state[parameter][moment]
        state[f"{shard}.optimizer.step"] = self._first_step_count()
        return state

    def _shard_name(self) -> str:
        shard = dist.get_rank(self._fsdp.process_group) if self.layout.shard > 1 else 0
        return f"tp{library.state('tp_rank', 0)}.ep{library.state('ep_rank', 0)}.fsdp{shard}"

    def _first_step_count(self) -> torch.Tensor:
        """AdamW counts steps per parameter; ours all step together, so one count is saved for all."""
        first = next(iter(self._parameters.values()))
        return cast("torch.Tensor", self.optimizer.state[first]["step"])

    def state_loaded(self) -> None:
        count = self._first_step_count()
        for parameter in self._parameters.values():
            self.optimizer.state[parameter]["step"].copy_(count)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Unlike other strategies this holds the whole model in rank 0's host memory: the library translates it whole.

        Raises ``CheckpointError`` on rank 0 where what it gives is not the model.
        """
        with library.full_state(self._fsdp, self.device):
            whole = self._fsdp.state_dict()
        found = with_plain_names(whole.items()) if self._process.is_leader else {}
        for name, tensor in self._tensors.items():
            if not self._process.is_leader:
                yield name, torch.empty(0)
                continue
            part = found.get(name)
            if part is None or tuple(part.shape) != tensor.shape:
                shape = "lacks it" if part is None else f"has it as {list(part.shape)}"
                raise CheckpointError(f"{name} is {list(tensor.shape)}, but the library's full state {shape}")
            yield name, part.to(self._compute)

    def close(self) -> None:
        # A program that made the group leaves it itself.
        if self._owns_group:
            dist.destroy_process_group()
