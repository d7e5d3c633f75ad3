"""Native PyTorch FSDP2 on Hugging Face models; a single process trains the bare model, with the same numbers."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from sm_llm.models.families.registry import family
from sm_llm.spec.parallelism.layout import layout
from sm_llm.spec.parallelism.strategies import FsdpSpec
from sm_llm.worker.strategies.compiled import CompiledLayers
from sm_llm.worker.strategies.device import DTYPES, ask_for_determinism, own_device
from sm_llm.worker.strategies.fsdp.attention import CausalAttention
from sm_llm.worker.strategies.fsdp.memory import computed_part, wrap_layer
from sm_llm.worker.strategies.fsdp.mesh import Meshes, make_meshes, start_process_group
from sm_llm.worker.strategies.fsdp.tensor import split_matrices
from sm_llm.worker.strategies.master import MasterWeights
from sm_llm.worker.strategies.model import build_on_meta, decoder_layers, materialise, named_parameters
from sm_llm.worker.strategies.packed import PackedWeights, unpacked
from sm_llm.worker.training.loss import token_loss_sum
from sm_llm.worker.training.optim import MOMENTS, build_adamw, set_learning_rate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.runs.events.events import LayersCompiled
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.checkpoint.weights import WeightReader
    from sm_llm.worker.place import Place


class FsdpStrategy:
    """FSDP2 over any product of sharding, copies, context and tensor parallelism (``Strategy``).

    One process has nothing to shard, and FSDP2's bookkeeping would cost it some percent of every step: it keeps the
    bare model with fp32 masters instead. Names, checkpoints and losses are the same either way.
    """

    device: torch.device
    optimizer: torch.optim.Optimizer

    def __init__(self, task: TrainTask, place: Place) -> None:
        assert isinstance(task.parallelism, FsdpSpec)
        self._task = task
        self._spec = task.parallelism
        self._place = place
        self._compute = DTYPES[task.precision.compute]
        self._meshes: Meshes | None = None
        self._owns_group = False
        self._stack = ExitStack()
        self._compiled = CompiledLayers()
        self.layout = layout(self._spec, place.world_size, place.local_world_size)
        self.data_parallel_rank = self.layout.data_rank(place.rank)

    def setup(self) -> None:
        self.device = own_device(self._place)
        self._owns_group = start_process_group(self.device, self._place)
        if self._task.deterministic:
            ask_for_determinism()
        if self._place.world_size > 1 or self._spec.offload_optimizer:
            self._meshes = make_meshes(self.device.type, self.layout)
        if self.layout.tensor > 1:  # the loss of logits that are split along the vocabulary, forward and backward
            self._stack.enter_context(loss_parallel())

    def refusal(self, saved: Mapping[str, Any]) -> str | None:
        """Nothing: every parameter is dealt out anew."""
        return None

    def build(self, config: Mapping[str, Any], weights: WeightReader) -> None:
        kind = family(config)
        self._tensors, self._packings = kind.tensors(config), kind.packings(config)
        span, length = kind.attention_span(config, self._task.data.seq_length), self._task.data.seq_length
        context = self._meshes.context if self._meshes else None
        self._attention = CausalAttention(span if span < length else None, context, self.device)
        self._model = build_on_meta(config, self._attention.register(), DTYPES[self._task.precision.master])
        if self._meshes and self._meshes.tensor:
            split_matrices(self._model, self._meshes.tensor, sequence_parallel=self._spec.sequence_parallel)
        layers = self._prepare_layers(config)
        if self._meshes is not None:
            self._shard(layers, self._meshes)
        home = torch.device("cpu") if self._spec.offload_optimizer else self.device
        materialise(self._model, home, self.device, PackedWeights(weights, self._packings, self._tensors))
        parameters = named_parameters(self._model)
        # Sharded parameters are rounded when they are gathered; a bare model needs copies.
        self._masters = MasterWeights(parameters, self._compute if self._meshes is None else None)
        self._parameters = self._masters.parameters
        self.optimizer = build_adamw(self._parameters, kind.parameters(config), self._task.optim)

    def _prepare_layers(self, config: Mapping[str, Any]) -> list[torch.nn.Module]:
        """Activation checkpointing and compilation, layer by layer. Returns the layers with what wraps them."""
        keep_rng = bool(config.get("attention_dropout") or config.get("hidden_dropout"))
        names = {id(module): name for name, module in self._model.named_modules()}
        layers = []
        for number, (parent, name) in enumerate(decoder_layers(self._model, config)):
            own = parent.get_submodule(name)
            layer = wrap_layer(own, number, self._spec, keep_rng=keep_rng)
            parent.register_module(name, layer)
            layers.append(layer)
            if self._task.precision.compile:
                self._compiled.compile(computed_part(layer), names[id(own)])
        return layers

    def _shard(self, layers: Sequence[torch.nn.Module], meshes: Meshes) -> None:
        precision = self._task.precision
        options: dict[str, Any] = {
            "mesh": meshes.data,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self._compute, reduce_dtype=DTYPES[precision.reduce]),
            "shard_placement_fn": self._shard_dimension,
        }
        if self._spec.offload_optimizer:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        reshard = self._spec.reshard_after_forward
        # Each layer's outermost module: FSDP's hooks inside a compiled or checkpointed one would break its graph.
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        fully_shard(self._model, reshard_after_forward=False, **options)

    def _shard_dimension(self, parameter: torch.Tensor) -> Shard:
        """The first, or of a stack of few experts the second: else some processes would hold none of it."""
        degree = self.layout.shard
        stack = parameter.dim() == 3 and parameter.shape[0] % degree and parameter.shape[1] % degree == 0
        return Shard(1 if stack else 0)

    def loss_sum(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = token_loss_sum(self._forward(input_ids), self._attention.own(targets))
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        unit = math.lcm(2, self.layout.tensor) * self.layout.context
        padded = torch.nn.functional.pad(input_ids, (0, -length % unit))  # behind them, where no token looks
        logits = self._forward(padded)
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return self._attention.gathered(whole)[:, :length]

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of this process's tokens. [n, seq] -> [n, seq / context, vocab]."""
        self._attention.prepare(input_ids.shape[1])
        # Modules that see only a part of the sequence would count its positions from 0.
        positions = self._attention.positions[None] if self.layout.context * self.layout.tensor > 1 else None
        own = self._attention.own(input_ids)
        return cast("torch.Tensor", self._model(input_ids=own, position_ids=positions, use_cache=False).logits)

    def compilation(self) -> LayersCompiled | None:
        return self._compiled.report()

    def train_mode(self, enabled: bool) -> None:
        self._model.train(enabled)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Gradients are reduced to shards in every micro-batch: kept back, each process would hold the whole model's.

        Only the sum over copies of the shards, which costs no memory to delay, waits for the last.
        """
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_all_reduce(last)
        yield
        self._masters.collect_gradients()

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = _norm_of_shards(norm)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), max_norm, norm)
        return norm.to(self.device)

    def update(self, learning_rate: float, skip: torch.Tensor) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        # What gradient scalers tell fused optimisers: their kernels return early where it is 1, and no step is counted.
        home = next(iter(self._parameters.values())).device
        self.optimizer.found_inf = skip.to(home)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._masters.refresh()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            state[f"model.{name}"] = parameter.detach()
            for moment in MOMENTS:
                state[f"optimizer.{name}.{moment}"] = self.optimizer.state[parameter][moment]
        state["optimizer.step"] = self._first_step_count()
        return state

    def _first_step_count(self) -> torch.Tensor:
        """AdamW counts steps per parameter; ours all step together, so one count is saved for all."""
        first = next(iter(self._parameters.values()))
        return cast("torch.Tensor", self.optimizer.state[first]["step"])

    def state_loaded(self) -> None:
        count = self._first_step_count()
        for parameter in self._parameters.values():
            self.optimizer.state[parameter]["step"].copy_(count)
        self._masters.refresh()

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            tensor = parameter.detach().to(self._compute)
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            held = whole.cpu() if self._place.is_leader else torch.empty(0)
            yield from unpacked(name, held, self._packings.get(name), self._tensors)

    def close(self) -> None:
        self._stack.close()
        if self._owns_group:
            dist.destroy_process_group()


def _norm_of_shards(norm: DTensor) -> torch.Tensor:
    """The whole norm from those of all processes' shards, the same bits on every one: replicas must stay equal.

    One sum over all processes, in which shards of equal content count once. (DTensor would sum over one dimension of
    the mesh after the other, in another order on each process.)
    """
    mesh, own = norm.device_mesh, norm.to_local()
    if mesh.size() == 1:
        return own
    copies = math.prod(mesh.size(dim) for dim, it in enumerate(norm.placements) if it.is_replicate())
    squares = own.square()
    dist.all_reduce(squares)
    return (squares / copies).sqrt()
