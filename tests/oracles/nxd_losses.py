"""Losses of the strategy's model in NxD's own layers, of NxD's Llama and of transformers', on one CPU.

In an environment of its own (torch 2.9.0, torch_xla 2.9.0, transformers 4.48.3, boto3, tenacity, requests, pydantic,
PyYAML, filelock, pyarrow, safetensors), with a clone of neuronx-distributed:

    PYTHONPATH=. NXD_CPU_MODE=1 PJRT_DEVICE=CPU torchrun --nproc-per-node 4 tests/oracles/nxd_losses.py CLONE

The layers, the collectives and the cross-entropy are NxD's; packages that drive NeuronCores are hollow, and gloo moves
what XLA would. Rank 0 prints the table of ``docs/verified.md``: loss, squared norm of the gradient of the first
``o_proj``, and the loss after a step of plain gradient descent.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.spec.parallelism.nxd import NxdSpec

HOLLOW = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "neuronx_distributed.trace")
"""The last is NxD's inference, which names classes of the runtime."""
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
PLATFORM: Any = os.environ.get("PLATFORM", "trn1")
"""``trn2`` has key/value heads in another order, and other groups of ranks that share them."""
DEGREE, ROWS, LENGTH, RATE, SEED = 4, 2, 32, 0.5, 0
CASES: dict[str, dict[str, Any]] = {
    "sequence parallel, fused qkv": {},
    "sequence parallel, linear qkv": {"fuse_qkv": False},
    "fused qkv": {"sequence_parallel": False},
    "linear qkv": {"sequence_parallel": False, "fuse_qkv": False},
}


class Hollow(MetaPathFinder, Loader):
    """Modules that stand for what drives a NeuronCore; every name in them is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_hollow = any(name == it or name.startswith(f"{it}.") for it in HOLLOW)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_hollow else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _hollow(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing."""


def _hollow(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return (lambda: PLATFORM) if name == "get_platform_target" else MagicMock(name=f"{module}.{name}")


def prepare(clone: Path) -> None:
    """NxD can be imported, and its collectives go through gloo."""
    import torch_xla.core.xla_model as xm  # before the hollow modules: it looks for libneuronxla

    sys.meta_path.insert(0, Hollow())
    sys.path[:0] = [str(clone / "src"), str(clone / "examples" / "training" / "llama")]

    xm.all_reduce, xm.all_gather, xm.reduce_scatter = all_reduce, all_gather, reduce_scatter
    xm.mark_step = lambda *_, **__: None
    torch.Tensor.view = view  # type: ignore[assignment, method-assign]


_groups: dict[str, Any] = {}


def group_of(groups: list[list[int]] | None) -> Any:
    """This process's group among replica groups; None is all processes."""
    if not groups:
        return None
    if (key := repr(groups)) not in _groups:
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]
        _groups[key] = next(group for ranks, group in made if dist.get_rank() in ranks)
    return _groups[key]


def all_reduce(kind: Any, inputs: Any, scale: float = 1.0, groups: Any = None, **_: Any) -> Any:
    """``xla_model.all_reduce`` by gloo: sums a tensor, or those of a list in place."""
    tensors = inputs if isinstance(inputs, list) else [inputs.clone()]
    for it in tensors:
        dist.all_reduce(it, group=group_of(groups))
        it.mul_(scale)
    return inputs if isinstance(inputs, list) else tensors[0]


def all_gather(value: torch.Tensor, dim: int = 0, groups: Any = None, **_: Any) -> torch.Tensor:
    """``xla_model.all_gather`` by gloo."""
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group_of(groups)))]
    dist.all_gather(parts, value.contiguous(), group=group_of(groups))
    return torch.cat(parts, dim=dim)


def reduce_scatter(
    kind: Any,
    value: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Any = None,
    output: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """``xla_model.reduce_scatter`` by gloo."""
    whole = all_reduce(kind, value.contiguous(), scale, groups)
    own: torch.Tensor = whole.chunk(shard_count, dim=scatter_dim)[dist.get_rank(group_of(groups))].contiguous()
    return own if output is None else output.copy_(own)


_view = torch.Tensor.view


def view(tensor: torch.Tensor, *shape: Any, **named: Any) -> torch.Tensor:
    """``Tensor.view`` as on an XLA device, whose tensors have no strides."""
    try:
        return _view(tensor, *shape, **named)
    except RuntimeError:
        return tensor.reshape(*shape)


def filled(model: torch.nn.Module, config: dict[str, Any], spec: NxdSpec) -> torch.nn.Module:
    """``model`` with this rank's part of the initial weights, by the names and rules of the strategy."""
    from neuronx_distributed.parallel_layers import parallel_state

    from sm_llm.models.families.table import family
    from sm_llm.worker.strategies.nxd.shards import RankShards
    from sm_llm.worker.strategies.weights import InitialWeights

    shards = RankShards(config, spec, PLATFORM, parallel_state.get_tensor_model_parallel_rank(), 0)
    weights = InitialWeights(family(config).tensors(config), SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shards.fill(name, parameter, weights)
    return model


def measured(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[float, float, float]:
    """Loss, squared norm of a gradient, and the loss after a step, of a model that is cut over all processes."""
    first = loss()
    first.backward()
    with torch.no_grad():
        norm = model.model.layers[0].self_attn.o_proj.weight.grad.square().sum()  # type: ignore[union-attr]
        dist.all_reduce(norm)
        for parameter in model.parameters():
            assert parameter.grad is not None
            if getattr(parameter, "sequence_parallel_enabled", False):
                dist.all_reduce(parameter.grad)
            parameter -= RATE * parameter.grad
        return float(first), float(norm), float(loss())


def ours(config: dict[str, Any], batch: torch.Tensor, spec: NxdSpec) -> tuple[float, float, float]:
    """The strategy's model."""
    from sm_llm.worker.strategies.nxd.model import NxdLlama, shape_of
    from sm_llm.worker.training.token_loss import next_tokens

    fields = {"sequence_parallel": spec.sequence_parallel, "fuse_qkv": spec.fuse_qkv, "flash_attention": False}
    shape = shape_of(config, tensor=DEGREE, dtype=torch.float32, **fields)
    model = filled(NxdLlama(shape, config, tied=False), config, spec)
    targets = next_tokens(batch)
    count = (targets != -100).sum()
    # The factor is the gradient's alone: the model returns a sum.
    return measured(model, lambda: model(input_ids=batch, targets=targets, scale=torch.ones(len(batch))) / count)


def of_nxd(config: dict[str, Any], batch: torch.Tensor, spec: NxdSpec) -> tuple[float, float, float]:
    """The Llama of NxD's examples. Its attention makes its mask on the device ``xla``: ours, which does the same."""
    import modeling_llama_nxd as examples
    from transformers import LlamaConfig

    from sm_llm.worker.strategies.nxd.model import CoreAttention

    examples.CoreAttention = CoreAttention
    how = {
        "sequence_parallel_enabled": spec.sequence_parallel,
        "fuse_qkv": spec.fuse_qkv,
        "qkv_linear": True,
        "kv_shared_group_size": DEGREE // CONFIG["num_key_value_heads"],
        "use_flash_attention": False,
        "transpose_nki_inputs": False,
        "selective_checkpoint_enabled": False,
        "torch_dtype": torch.float32,
        "use_cache": False,
    }
    fields = {name: it for name, it in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    model = filled(examples.LlamaForCausalLM(LlamaConfig(**{**fields, **how})), config, spec)
    return measured(model, lambda: model(input_ids=batch, labels=batch).loss)


def reference(folder: Path, batch: torch.Tensor) -> tuple[float, float, float]:
    """The same by transformers, on one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    found = model(input_ids=batch, labels=batch).loss
    found.backward()
    norm = model.model.layers[0].self_attn.o_proj.weight.grad.square().sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
        return float(found), float(norm), float(model(input_ids=batch, labels=batch).loss)


def main(clone: Path, folder: Path) -> None:
    """Print the table."""
    prepare(clone)
    dist.init_process_group("gloo")
    from neuronx_distributed.parallel_layers import parallel_state

    sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
    from plain_loop import write_initial_model

    from sm_llm.models.config import model_config
    from sm_llm.spec.parallelism.nxd import NxdSpec

    config = model_config(preset="tiny", path=None, pretrained=None, overrides=CONFIG)
    if dist.get_rank() == 0:
        write_initial_model(folder, config, SEED)
    dist.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=DEGREE)
    batch = torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(SEED))
    rows = {"transformers": reference(folder, batch)}
    for name, how in CASES.items():
        spec = NxdSpec(tensor_parallel_degree=DEGREE, flash_attention=False, **how)
        rows[f"strategy nxd, {name}"] = ours(config, batch, spec)
        rows[f"NxD's example, {name}"] = of_nxd(config, batch, spec)
    if dist.get_rank() == 0:
        print("| model | loss | o_proj gradient, squared norm | loss after a step |\n|---|---|---|---|")
        for name, (loss, norm, after) in rows.items():
            print(f"| {name} | {loss:.6f} | {norm:.6f} | {after:.6f} |")


if __name__ == "__main__":
    import tempfile

    shared = Path(tempfile.gettempdir()) / "sm_llm-oracle-model"
    main(Path(sys.argv[1]), shared)
