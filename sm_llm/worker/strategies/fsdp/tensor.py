"""Tensor parallelism of Hugging Face decoders: which module splits its matrices and its activations how.

Attention heads, the inner channels of the MLP and the vocabulary are split. With sequence parallelism the activations
between them are split along the sequence (Korthikanti et al. 2022): same traffic, less memory.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from sm_llm.worker.strategies.fsdp.mesh import without_multicast

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_SEQUENCE = Shard(1)


class Replicated(ParallelStyle):
    """The same module with the same inputs on every process, its parameters on the mesh like all others."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, device_mesh, None, _as_replicated, _as_local)


def _as_replicated(_module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)


def _as_local(_module: torch.nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
    return output.to_local()


class SplitVocabulary(ParallelStyle):
    """An output head with a part of the vocabulary on each process, which ``loss.LossHead`` computes with.

    Its inputs, laid out as ``inputs``, become whole sequences; each process knows a part of their gradient.
    """

    def __init__(self, inputs: Placement) -> None:
        super().__init__()
        self._inputs = inputs

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, device_mesh, _split_rows, self._as_whole)

    def _as_whole(self, _module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        given = DTensor.from_local(inputs[0], mesh, [self._inputs], run_check=False)
        # Backward, ``Partial`` adds up what each process knows of the gradient.
        return given.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _split_rows(_name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, torch.nn.Parameter(part))


class SummedRows(RowwiseParallel):
    """Rows on each process, whose products are added up to a plain tensor.

    A sum under way is an ``AsyncCollectiveTensor``. A compiled layer takes its data and drops the graph behind it
    (``trigger_wait`` in torch 2.13's ``aot_autograd/frontend_utils.py``): the token table would get no gradient.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        joined = super()._apply(module, device_mesh)
        joined.register_forward_hook(_as_plain)
        return joined


def _as_plain(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    # While a layer is traced, sums are waited for in the graph. Views of one under way are under way, too.
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def split_matrices(model: torch.nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split a model on the meta device, named as Llama's, over ``mesh``. Its logits are split along the vocabulary."""
    plan = _sequence_plan() if sequence_parallel else _plain_plan()
    # Weights are gathered over two dimensions of the mesh when they are exported, and then only.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # The meta device has no data that could be scattered.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.tie_weights()  # type: ignore[operator]  # each module has got its own parameter


def overlap_products(mesh: DeviceMesh) -> None:
    """Let layers that are compiled from now on gather and sum in pieces, each beside the product of another one."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    without_multicast()
    # Settings of the whole process (inductor's fx_passes/micro_pipeline_tp.py).
    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.11 needs the call, later ones do without
        enable_symm_mem_for_group(mesh.get_group().group_name)


def _plain_plan() -> dict[str, ParallelStyle]:
    return {
        "model.embed_tokens": SummedRows(input_layouts=Replicate()),
        "model.norm": Replicated(),
        "lm_head": SplitVocabulary(Replicate()),
        "model.layers.*.input_layernorm": Replicated(),
        "model.layers.*.post_attention_layernorm": Replicated(),
        **_matrices(SummedRows),
    }


def _sequence_plan() -> dict[str, ParallelStyle]:
    """Gather the sequence before the matrices of a block, and scatter it again behind them."""
    return {
        "model.embed_tokens": SummedRows(input_layouts=Replicate(), output_layouts=_SEQUENCE),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": SplitVocabulary(_SEQUENCE),
        "model.layers.*.input_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": _SEQUENCE},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=(_SEQUENCE,), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
        **_matrices(partial(SummedRows, output_layouts=_SEQUENCE)),
    }


def _matrices(rowwise: Any) -> dict[str, ParallelStyle]:
    """Into heads and inner channels, and back."""
    found: dict[str, ParallelStyle] = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        found[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        found[f"model.layers.*.{name}"] = rowwise()
    return found
