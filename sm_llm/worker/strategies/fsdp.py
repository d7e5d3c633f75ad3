"""Native PyTorch FSDP2 on Hugging Face models; a single process trains the bare model, with the same numbers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sm_llm.models.registry import family
from sm_llm.worker.optim import MOMENTS, build_adamw, set_learning_rate
from sm_llm.worker.strategies.master import MasterWeights
from sm_llm.worker.strategies.model import (
    build_on_meta,
    causal_attention,
    decoder_layers,
    materialise,
    named_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.context import Place
    from sm_llm.worker.weights import WeightReader

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class FsdpStrategy:
    """Parameters, gradients and optimiser state sharded over all processes (``Strategy``).

    One process has nothing to shard, and FSDP2's bookkeeping would cost it some percent of every step: it keeps the
    bare model with fp32 masters instead. Names, checkpoints and losses are the same either way.
    """

    device: torch.device
    optimizer: torch.optim.Optimizer

    def __init__(self, task: TrainTask, place: Place) -> None:
        self._task = task
        self._place = place
        self._compute = DTYPES[task.precision.compute]
        self._mesh: DeviceMesh | None = None
        self._owns_group = False
        self.data_parallel_rank = place.rank
        self.data_parallel_degree = place.world_size

    def setup(self) -> None:
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self._place.local_rank)
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        else:
            self.device, backend = torch.device("cpu"), "gloo"
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            _start_process_group(backend, self.device, self._place)
        if self._task.deterministic:
            _ask_for_determinism()
        if self._place.world_size > 1:
            self._mesh = init_device_mesh(self.device.type, (self._place.world_size,), mesh_dim_names=("shard",))

    def build(self, config: Mapping[str, Any], weights: WeightReader) -> None:
        self._model = build_on_meta(config, causal_attention(config, self._task.data.seq_length))
        self._prepare_layers(config)
        if self._mesh is not None:
            self._shard(config, self._mesh)
        materialise(self._model, self.device, weights)
        parameters = dict(named_parameters(self._model))
        # Sharded parameters stay fp32 and are rounded when they are gathered; a bare model needs copies.
        self._masters = MasterWeights(parameters, self._compute if self._mesh is None else torch.float32)
        self._parameters = self._masters.parameters
        self.optimizer = build_adamw(self._parameters, family(config).tensors(config), self._task.optim)

    def _prepare_layers(self, config: Mapping[str, Any]) -> None:
        """Activation checkpointing and compilation, layer by layer, before sharding hooks come around them."""
        recompute = self._task.parallelism.activation_checkpointing == "full"
        keep_rng = bool(config.get("attention_dropout"))
        for parent, name in decoder_layers(self._model, config):
            layer = parent.get_submodule(name)
            if recompute:
                layer = checkpoint_wrapper(layer, preserve_rng_state=keep_rng)
                parent.register_module(name, layer)
            if self._task.precision.compile:
                layer.compile()

    def _shard(self, config: Mapping[str, Any], mesh: DeviceMesh) -> None:
        precision = self._task.precision
        policy = MixedPrecisionPolicy(param_dtype=self._compute, reduce_dtype=DTYPES[precision.reduce])
        reshard = self._task.parallelism.reshard_after_forward
        for parent, name in decoder_layers(self._model, config):
            fully_shard(parent.get_submodule(name), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(self._model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self._model(input_ids=input_ids, use_cache=False).logits)

    def train_mode(self, enabled: bool) -> None:
        self._model.train(enabled)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        if isinstance(self._model, FSDPModule):
            self._model.set_is_last_backward(last)
            self._model.set_requires_gradient_sync(last)
        yield
        self._masters.collect_gradients()

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):  # the norm of the shards: sum their squares over processes
            norm = norm.full_tensor()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), max_norm, norm)
        return norm

    def update(self, learning_rate: float, skip: torch.Tensor) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        # What gradient scalers tell fused optimisers: their kernels return early where it is 1, and no step is counted.
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
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
        empty = torch.empty(0)
        for name, parameter in self._parameters.items():
            tensor = parameter.detach().to(self._compute)
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield name, whole.cpu() if self._place.is_leader else empty

    def close(self) -> None:
        if self._owns_group:
            dist.destroy_process_group()


def _start_process_group(backend: str, device: torch.device, place: Place) -> None:
    if "MASTER_ADDR" in os.environ:
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, device_id=device_id)
    else:  # started without torchrun: the only process
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)


def _ask_for_determinism() -> None:
    """Deterministic kernels everywhere; cuBLAS needs its workspace fixed before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
