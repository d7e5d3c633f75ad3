"""neuronx-distributed and torch_xla: the one module that imports them, and only when it is called.

Signatures are those of ``tests/golden/nxd_api.json``.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sm_llm.errors import RunFailed
from sm_llm.spec.machines.neuron_releases import installed_packages, release_problem
from sm_llm.worker.object_collectives import restrict_object_collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

_PACKAGE = "neuronx_distributed"
_STATE = f"{_PACKAGE}.parallel_layers.parallel_state"


def check_release() -> None:
    """Raise ``RunFailed`` where the packages of this image are not those of one release that trains."""
    if problem := release_problem(installed_packages()):
        raise RunFailed(f"task.parallelism: {problem}")


def symbol(module: str, name: str) -> Any:
    """``name`` of a module of the image. Raises ``RunFailed`` where the image does not have it."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RunFailed(f"task.parallelism: strategy nxd needs {module}.{name}, which fails here: {error}") from error


def layer(name: str) -> Any:
    """A class of ``neuronx_distributed.parallel_layers.layers``, or ``GQAQKVColumnParallelLinear``."""
    module = "modules.qkv_linear" if name.startswith("GQA") else "parallel_layers.layers"
    return symbol(f"{_PACKAGE}.{module}", name)


def start_process_group() -> bool:
    """Unless the program has done so; returns whether it was done here.

    NxD's groups are made of the default one's backend, which must be XLA's for that.
    """
    if dist.is_initialized():
        return False
    restrict_object_collectives()
    # Its import registers the backend. A module of its own, which its package does not import.
    symbol("torch_xla.distributed.xla_backend", "__name__")
    dist.init_process_group("xla")
    return True


def device() -> torch.device:
    """The NeuronCore of this process."""
    found: torch.device = symbol("torch_xla.core.xla_model", "xla_device")()
    return found


def cut_graph(*, wait: bool = False) -> None:
    """End the graph that is being recorded: it is compiled, if it is new, and run. Optionally wait for it."""
    symbol("torch_xla.core.xla_model", "mark_step")(wait=wait)


def platform() -> str:
    """``trn1`` or ``trn2``."""
    found: str = symbol("torch_neuronx.utils", "get_platform_target")()
    return found


def logical_cores() -> int:
    """Physical cores that make one NeuronCore of the runtime: on trn2 two, unless the environment names another."""
    # trn2 joins two physical cores to a logical one by default; trn1 has no such setting.
    return int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")) if platform() == "trn2" else 1


def configure(**options: Any) -> dict[str, Any]:
    """``neuronx_distributed_config``: also makes the groups of parallel ranks."""
    config: dict[str, Any] = symbol(_PACKAGE, "neuronx_distributed_config")(**options)
    return config


def make_model(config: Mapping[str, Any], make: Callable[[], torch.nn.Module]) -> Any:
    """``initialize_parallel_model`` of what ``make`` returns, on the device. Buffers are made real."""
    return symbol(_PACKAGE, "initialize_parallel_model")(config, make, False)


def make_optimizer(config: Mapping[str, Any], kind: type[torch.optim.Optimizer], groups: Any, **defaults: Any) -> Any:
    """``initialize_parallel_optimizer``."""
    return symbol(_PACKAGE, "initialize_parallel_optimizer")(config, kind, groups, **defaults)


def rank_of(kind: str) -> int:
    """This process's rank among those of its ``tensor_model``, ``data`` or ``pipeline_model`` parallel group."""
    found: int = symbol(_STATE, f"get_{kind}_parallel_rank")()
    return found


def forget_groups() -> None:
    """Undo what ``configure`` made."""
    # NxD keeps its groups in globals of a module: a second strategy in the process would meet them.
    if symbol(_STATE, "model_parallel_is_initialized")():
        symbol(_STATE, "destroy_model_parallel")()


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each position [*], from this rank's part of the vocabulary [*, rows]; changes ``logits``."""
    found: torch.Tensor = symbol(f"{_PACKAGE}.parallel_layers", "parallel_cross_entropy")(logits, targets)
    return found


def whole_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """[*, rows] of each tensor-parallel rank -> [*, vocabulary]. A collective."""
    gather = symbol(f"{_PACKAGE}.parallel_layers.mappings", "gather_from_tensor_model_parallel_region")
    found: torch.Tensor = gather(logits)
    return found


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The NKI kernel, causal. [batch, heads, sequence, head] of all three and of the result."""
    kernel = symbol(f"{_PACKAGE}.kernels.flash_attn", "nki_flash_attn_func")
    found: torch.Tensor = kernel(query, key, value, lnc=logical_cores(), transpose_nki_inputs=False)
    return found


def shards(optimizer: Any) -> Iterable[tuple[dict[str, Any], torch.nn.Parameter, torch.nn.Parameter]]:
    """(group, parameter, what the base optimiser updates in its place) of an optimiser of ``make_optimizer``.

    With ZeRO-1 the third is this process's fp32 part, and the group the base optimiser's own.
    """
    inner = optimizer.optimizer
    # Both list the same parameters in the same order.
    for group, own in zip(inner.param_groups, base_optimizer(optimizer).param_groups, strict=True):
        for parameter, shard in zip(group["params"], own["params"], strict=True):
            yield own, parameter, shard


def base_optimizer(optimizer: Any) -> Any:
    """The optimiser of our own class, which ZeRO-1 holds behind another one."""
    return getattr(optimizer.optimizer, "base_optimizer", optimizer.optimizer)


def spread_shards(optimizer: Any) -> None:
    """Make the parameters of ZeRO-1's shards after those were written. A collective.

    It gathers those alone that have a gradient, as it does when it loads a checkpoint of its own.
    """
    for _, parameter, shard in shards(optimizer):
        if optimizer.optimizer.use_grad_acc_hook:
            shard.main_grad = torch.zeros_like(parameter, dtype=shard.dtype)  # type: ignore[attr-defined]
            parameter.main_grad = shard.main_grad  # type: ignore[attr-defined]
        else:
            parameter.grad = torch.zeros_like(parameter)
    cut_graph()
    optimizer.optimizer.allgather_weights_and_update_full_parameter()
    optimizer.zero_grad(set_to_none=True)
    cut_graph()


def save_checkpoint(folder: Path, tag: str, model: dict[str, Any], optimizer: dict[str, Any], *, zero1: bool) -> None:
    """Write tensors by name, those of ``optimizer`` in dicts of their own, below ``folder``/``tag``. A collective.

    ``zero1``: every process has its own ``optimizer``; else those of a data-parallel group write one together.
    """
    save = symbol(_PACKAGE, "save_checkpoint")
    # An asynchronous save gets its mark ``done`` with the next one; retention is that of the run's commits. A file per
    # tensor: the other form asks torch_xla 2.9 for a name that it has lost.
    how = {"use_xser": True, "async_save": False, "num_kept_ckpts": None}
    save(str(folder), tag, model, optimizer, zero1_optimizer=zero1, **how)


def load_checkpoint(folder: Path, tag: str, model: dict[str, Any] | None, optimizer: dict[str, Any]) -> None:
    """Fill both with what ``save_checkpoint`` wrote, on the device. A collective.

    Files of a checkpoint may come from somebody else: NxD opens them with an unrestricted unpickler, and is given a
    restricted one here.
    """
    load = symbol(_PACKAGE, "load_checkpoint")
    reference = symbol("torch_xla.utils.serialization", "TensorReference")
    with _restricted_unpickling(), torch.serialization.safe_globals([reference]):
        load(str(folder), tag, model, optimizer)


@contextmanager
def _restricted_unpickling() -> Iterator[None]:
    """Inside, ``torch.load`` reads tensors and plain values alone, also where its caller asks for more."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
