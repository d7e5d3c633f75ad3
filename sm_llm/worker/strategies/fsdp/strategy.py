"""Native PyTorch FSDP2 on Hugging Face models; a single process trains the bare model, with the same numbers."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from sm_llm.errors import RunFailed
from sm_llm.models.families.table import family
from sm_llm.runs.events.events import COPY_ENGINES, CollectivesChosen
from sm_llm.spec.machines.hardware import EFFICIENT, attention_kernel
from sm_llm.spec.tasks import plainest
from sm_llm.worker.device import DTYPES, ask_for_determinism
from sm_llm.worker.strategies.compiled import CompiledLayers, compile_forward
from sm_llm.worker.strategies.fsdp.attention import CausalAttention
from sm_llm.worker.strategies.fsdp.attention_kernel import found_kernel, settle_order
from sm_llm.worker.strategies.fsdp.float8 import assert_float8, compute_in_float8, settle_scales
from sm_llm.worker.strategies.fsdp.loss import LossHead
from sm_llm.worker.strategies.fsdp.memory import computed_part, wrap_layer
from sm_llm.worker.strategies.fsdp.mesh import Meshes, library_of, make_meshes, start_process_group
from sm_llm.worker.strategies.fsdp.peer_copies import PeerCollectives, PeerSum, Sharing, largest_group
from sm_llm.worker.strategies.fsdp.reduction import GradientReduction
from sm_llm.worker.strategies.fsdp.tensor import overlap_products, split_matrices
from sm_llm.worker.strategies.fsdp.update import make_update
from sm_llm.worker.strategies.master import MasterWeights, PlainMasters
from sm_llm.worker.strategies.model import (
    build_on_meta,
    decoder_layers,
    last_norms,
    materialise,
    named_parameters,
    outer_modules,
)
from sm_llm.worker.strategies.packed import PackedWeights, unpacked
from sm_llm.worker.strategies.passes import forward_loss, run_passes
from sm_llm.worker.training.nonfinite_policy import flag_of
from sm_llm.worker.training.optim import MOMENTS, build_adamw

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.data.source import Batch
    from sm_llm.runs.events.events import AttentionChosen, LayersCompiled
    from sm_llm.spec.parallelism.fsdp import FsdpSpec
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.device import Device
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.strategies.weights import WeightReader


class FsdpStrategy:
    """FSDP2 over any product of sharding, copies, context and tensor parallelism (``Strategy``).

    One process has nothing to shard, and FSDP2's bookkeeping would cost it some percent of every step: it keeps the
    bare model with fp32 masters instead. Names, checkpoints and losses are the same either way.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, task: TrainTask, process: ProcessInfo, device: Device) -> None:
        self.device = device
        self._task = task = plainest(task)
        self._spec = cast("FsdpSpec", task.parallelism)
        self._process = process
        self._compute = DTYPES[task.precision.compute]
        self._in_float8 = task.precision.compute == "fp8"
        self._meshes: Meshes | None = None
        self._reduction: GradientReduction | None = None
        self._collectives: CollectivesChosen | None = None
        self._owns_group = False
        self._kernel_order = ExitStack()
        kept = self._spec.activation_memory_budget if self._spec.activation_checkpointing == "budget" else None
        self._compiled = CompiledLayers(kept)
        self.layout = self._spec.layout(process.world_size, process.local_world_size)
        self.data_parallel_rank = self.layout.data_rank(process.rank)

    def setup(self) -> None:
        if self._in_float8:
            assert_float8(self.device)
        self._owns_group = start_process_group(self.device.torch_device, self._process)
        if self._task.deterministic:
            ask_for_determinism()
            # Else torch fills new memory on the stream that asks for it, beside another one that writes to it already.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # Offloading is done by FSDP, so a single process is wrapped for it, too.
        if self._process.world_size > 1 or self._spec.offload_optimizer:
            self._meshes = make_meshes(self.device.type, self.layout)

    def refusal(self, saved: Mapping[str, Any]) -> str | None:
        """Nothing: every parameter is resharded."""
        return None

    def build(self, config: Mapping[str, Any], weights: WeightReader | None) -> None:
        kind = family(config)
        self._tensors, self._packings = kind.tensors(config), kind.packings(config)
        span, length = kind.attention_span(config, self._task.data.seq_length), self._task.data.seq_length
        context = self._meshes.context if self._meshes else None
        window, drops = span if span < length else None, bool(config.get("attention_dropout"))
        self._attention = CausalAttention(window, context, self.device.torch_device, drops=drops)
        expected = None
        if self.device.type == "cuda":
            shape = {"in_window": window is not None, "is_shared": context is not None, "drops": drops}
            compute = self._task.precision.compute
            expected = attention_kernel(self.device.name, compute, kind.head_dim(config), **shape)
        # Before anything is compiled: graphs keep the kernel that they were traced with.
        self._attention.prepare(length)
        self._kernel_order = settle_order(expected)
        # Grouped heads would be computed by torch's plain operations, which keep all scores.
        self._attention.repeats_keys = expected == EFFICIENT
        self._kernel = found_kernel(self._attention, config, self._compute, expected)
        # Built, split, wrapped and sharded without memory; only then does each process allocate its own shards.
        self._model = build_on_meta(config, self._attention.register(), DTYPES[self._task.precision.master])
        if self._meshes and self._meshes.tensor:
            split_matrices(self._model, self._meshes.tensor, sequence_parallel=self._spec.sequence_parallel)
            if self._spec.async_tensor_parallel and self.device.type == "cuda":
                if reason := self.device.copy_obstacle(self._process.local_world_size, is_asked_for=True):
                    raise RunFailed(f"task.parallelism.async_tensor_parallel: {reason}. Leave it out")
                overlap_products(self._meshes.tensor)
        self._head = LossHead(self._model)
        layers = self._prepare_layers(config)
        if self._meshes is not None:
            self._shard(layers, self._meshes)
        parameter_device = torch.device("cpu") if self._spec.offload_optimizer else self.device.torch_device
        reader = None if weights is None else PackedWeights(weights, self._packings, self._tensors)
        materialise(self._model, parameter_device, self.device.torch_device, reader)
        parameters = named_parameters(self._model)
        # Sharded parameters are rounded when they are gathered; a bare model needs copies.
        if self._gathers_float8:
            self._masters: MasterWeights = PlainMasters(parameters)
        else:
            self._masters = MasterWeights(parameters, self._compute if self._meshes is None else None)
        self._parameters = self._masters.parameters
        moments = self._task.precision.moments
        self.optimizer = build_adamw(
            self._parameters,
            kind.parameters(config),
            self._task.optim,
            None if moments == "master" else DTYPES[moments],
        )
        self._update = make_update(self._masters, self.optimizer)
        self._settle_scales()

    def _prepare_layers(self, config: Mapping[str, Any]) -> list[torch.nn.Module]:
        """Activation checkpointing and compilation, layer by layer. Returns the layers with what wraps them."""
        keep_rng = bool(config.get("attention_dropout") or config.get("hidden_dropout"))
        names = {id(module): name for name, module in self._model.named_modules()}
        layers = []
        for number, (parent, name) in enumerate(decoder_layers(self._model, config)):
            own = parent.get_submodule(name)
            # Innermost: what wraps the layer must see the modules that compute.
            emulate, shards = self.device.type == "cpu", self.layout.shard if self._gathers_float8 else 0
            if self._in_float8 and not compute_in_float8(own, emulate=emulate, shards=shards):
                raise RunFailed(f"task.precision.compute: no product of {names[id(own)]} fits fp8. Use bf16")
            layer = wrap_layer(own, number, self._spec, keep_rng=keep_rng)
            parent.register_module(name, layer)
            layers.append(layer)
            if self._task.precision.compile:
                self._compiled.compile(computed_part(layer), names[id(own)])
        # With tensor parallelism a norm's inputs are split, and its own hooks gather them.
        if self._task.precision.compile and self.layout.tensor == 1:
            for norm in last_norms(self._model):
                compile_forward(norm)
        return layers

    def _shard(self, layers: Sequence[torch.nn.Module], meshes: Meshes) -> None:
        reshard = cast("bool | int", self._spec.reshard_after_forward)
        ends = outer_modules(self._model)
        # Each layer's outermost module: FSDP's hooks inside a compiled or checkpointed one would break its graph.
        groups = [([layer], reshard) for layer in layers]
        if ends is not None:  # the backward pass begins with the head
            groups = [([ends.table], reshard), *groups, (ends.head, False)]
        groups.append(([self._model], False))
        peers = self._peers([modules for modules, _ in groups], meshes)
        sums = None if peers is None else peers.sum
        # What copy engines move is added up in fp32 by ourselves.
        reduce = DTYPES[self._task.precision.reduce] if sums is None else self._compute
        options: dict[str, Any] = {
            "mesh": meshes.data,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self._compute, reduce_dtype=reduce),
            "shard_placement_fn": self._shard_dimension,
        }
        if self._spec.offload_optimizer:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        self._reduction = self._own_reduction(sums)
        for modules, resharded in groups:
            fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=resharded, **options)
            for module in cast("list[FSDPModule]", modules):
                if peers is not None and peers.gather is not None:
                    module.set_custom_all_gather(peers.gather)  # type: ignore[arg-type]  # it has the methods
                if self._reduction is not None:
                    module.set_custom_reduce_scatter(self._reduction)  # type: ignore[arg-type]

    def _peers(self, groups: Sequence[Sequence[torch.nn.Module]], meshes: Meshes) -> PeerCollectives | None:
        """Copy engines in place of a library, where they are asked for or to be expected."""
        library, wanted = library_of(meshes.shard, self.device.type), self._spec.copy_engine_collectives
        self._collectives = CollectivesChosen(library, "")
        if wanted is False or self.layout.shard == 1 or self._spec.offload_optimizer:
            return None
        found, reason = None, self._preference()
        if not reason:
            size = largest_group(groups, self.layout.shard) * self._compute.itemsize
            sharing = Sharing(self.device, self.layout, self._process.local_world_size, meshes.shard, size)
            sums = self._task.precision.reduce == "fp32"
            found = PeerCollectives(sharing, is_asked_for=wanted is True, sums=sums)
            reason = found.reason
        if reason and wanted is True and self.device.type != "cpu":  # for CPUs the plan has a warning
            raise RunFailed(f"task.parallelism.copy_engine_collectives: {reason}. Leave it out")
        self._collectives = CollectivesChosen(library if reason else COPY_ENGINES, reason)
        return found

    def _preference(self) -> str:
        """Why a library moves parameters although copy engines might."""
        if self._task.deterministic and self._spec.copy_engine_collectives is not True:
            return "deterministic: a later attempt that cannot use them would add up in another order"
        if not isinstance(self._spec.reshard_after_forward, bool):
            return "reshard_after_forward: parameters are gathered over parts of a copy as well"
        return ""

    def _own_reduction(self, peers: PeerSum | None) -> GradientReduction | None:
        """A reduction in another way than FSDP's, where that is asked for."""
        shares = self._spec.share_gradient_memory and self.device.type == "cuda"
        if not shares and peers is None:
            return None
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise RunFailed(
                f"task.parallelism.share_gradient_memory: torch {torch.__version__} has no set_custom_reduce_scatter. "
                "Leave it out"
            )
        return GradientReduction(self.device.torch_device, peers=peers, shares_memory=shares)

    def _shard_dimension(self, parameter: torch.Tensor) -> Shard:
        """The first, or of a stack of few experts the second: else some processes would hold none of it."""
        degree = self.layout.shard
        stack = parameter.dim() == 3 and parameter.shape[0] % degree and parameter.shape[1] % degree == 0
        return Shard(1 if stack else 0)

    def forward_backward(self, micro_batches: Sequence[Batch], scale: torch.Tensor | float) -> torch.Tensor:
        return run_passes(self._loss_sum, self._accumulating, micro_batches, scale, self.device)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return forward_loss(self._loss_sum, batch, self.device)

    def _loss_sum(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self._head.predicting(self._attention.own(targets)):
            return self._forward(input_ids)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        # Each context-parallel process has two chunks, and sequence parallelism splits its part once more.
        unit = math.lcm(2, self.layout.tensor) * self.layout.context
        padded = torch.nn.functional.pad(input_ids, (0, -length % unit))  # behind them, where no token attends
        logits = self._forward(padded)
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return self._attention.gathered(whole)[:, :length]

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of this process's tokens. [n, seq] -> [n, seq / context, vocab]; or their loss (``LossHead``)."""
        own = self._attention.own(input_ids)
        # Modules that see only a part of the sequence would count its positions from 0.
        positions = self._attention.positions[None] if self.layout.context * self.layout.tensor > 1 else None
        return cast("torch.Tensor", self._model(input_ids=own, position_ids=positions, use_cache=False).logits)

    def attention(self) -> AttentionChosen:
        return self._kernel

    def collectives(self) -> CollectivesChosen | None:
        return self._collectives

    def compilation(self) -> LayersCompiled | None:
        return self._compiled.report()

    def train_mode(self, enabled: bool) -> None:
        self._model.train(enabled)

    @contextmanager
    def _accumulating(self, last: bool) -> Iterator[None]:
        """Gradients are reduced to shards in every micro-batch: kept back, each process would hold the whole model's.

        Only the sum over copies of the shards, which costs no memory to delay, waits for the last.
        """
        if isinstance(self._model, FSDPModule):
            # Only concerns ``replicate``; shards are reduced in every micro-batch.
            self._model.set_requires_all_reduce(last)
        if self._reduction is not None:
            self._reduction.keeps = next(iter(self._parameters.values())).grad is None
        yield
        self._masters.collect_gradients(last=last)

    def update(
        self, learning_rate: float, max_norm: float | None, targets: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self._update.clip(max_norm).to(self.device.torch_device)
        flag = flag_of(norm, targets)
        # Both kinds of flag skip the step.
        self._update.apply(learning_rate, flag.clamp(max=1.0))
        self._settle_scales()
        return norm, flag

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            state[f"model.{name}"] = parameter.detach()
            for moment in MOMENTS:
                state[f"optimizer.{name}.{moment}"] = self.optimizer.state[parameter][moment]
        state["optimizer.step"] = self._update.step_count
        return state

    def state_loaded(self) -> None:
        self._update.loaded()
        self._settle_scales()

    @property
    def _gathers_float8(self) -> bool:
        """Whether FSDP gathers the weights of products in fp8; not what is whole, or in host memory."""
        return self._in_float8 and self._meshes is not None and not self._spec.offload_optimizer

    def _settle_scales(self) -> None:
        if self._gathers_float8:
            settle_scales(self._model)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            tensor = parameter.detach().to(self._compute)
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            held = whole.cpu() if self._process.is_leader else torch.empty(0)
            yield from unpacked(name, held, self._packings.get(name), self._tensors)

    def close(self) -> None:
        self._kernel_order.close()
        if self._owns_group:
            dist.destroy_process_group()
