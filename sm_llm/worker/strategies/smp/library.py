"""SageMaker's library ``torch.sagemaker``: started from one source of parameters, its symbols looked up by name.

Half of what AWS's own scripts call is not in its reference, so nothing is imported before it is used, and what this
image lacks is reported by name. Signatures are those of the Developer Guide ("SMP v2 reference").
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sm_llm.errors import Issue, RunFailed, SpecError
from sm_llm.worker.object_collectives import restrict_object_collectives

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.worker.device import Device

PARAMETERS = "SM_HP_MP_PARAMETERS"
"""Variable in which SageMaker hands over the launch parameter ``mp_parameters``."""
PACKAGE = "torch.sagemaker"


def symbol(module: str, name: str) -> Any:
    """``name`` of a module of the image. Raises ``RunFailed`` where the image does not have it."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RunFailed(
            f"task.parallelism: strategy smp needs {module}.{name}, which this image does not have ({error}; PyTorch "
            f"{torch.__version__}). Only AWS's images smdistributed-modelparallel hold the library; this is made for "
            "2.5.1-gpu-py311-cu124. Elsewhere use strategy fsdp"
        ) from error


def has(module: str, name: str) -> bool:
    """Whether this image has it."""
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


def takes(function: Any, keyword: str) -> bool:
    """Whether a function or class can be called with a keyword."""
    return keyword in inspect.signature(function).parameters


def start_library(parameters: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Call ``torch.sagemaker.init``: with what the platform handed over or, elsewhere, with ``parameters``.

    The platform's win over anything a program sets, so they must be those of the job. Raises ``SpecError`` where the
    job was changed after its launch parameters were fixed.
    """
    init = symbol(PACKAGE, "init")
    if PARAMETERS not in environ:
        init(dict(parameters))
        return
    given = json.loads(environ[PARAMETERS])
    # Hyperparameters are strings of JSON: a launcher may have encoded the value once more.
    given = json.loads(given) if isinstance(given, str) else given
    issues = [_difference(name, value, given.get(name)) for name, value in parameters.items()]
    if found := [issue for issue in issues if issue is not None]:
        raise SpecError(found)
    init()


def _difference(name: str, wanted: Any, given: Any) -> Issue | None:
    if wanted == given:
        return None
    problem = f"the job was launched with mp_parameters.{name} = {given!r}, and those win over any later change"
    return Issue(
        "smp-parameter-changed", f"task.parallelism.{name}", problem, wanted, "Change it where the job is launched"
    )


def state(name: str, default: Any = None) -> Any:
    """A property of ``torch.sagemaker.state``; ``default`` where the library left it out, or None, for plain FSDP."""
    # The library leaves attributes of degrees out that are not used.
    value = getattr(symbol(PACKAGE, "state"), name, None)
    return default if value is None else value


def check_arrangement(layout: Layout, rank: int) -> None:
    """Neighbouring ranks must share a micro-batch, as the loader distributes it. A collective. Raises ``RunFailed``."""
    own = (state("tp_rank", 0), state("cp_rank", 0))
    found: list[Any] = [None] * layout.world_size
    # Every process compares: all of them raise together.
    dist.all_gather_object(found, own)
    together = layout.tensor * layout.context
    first = rank // together * together
    wanted = sorted((tensor, context) for tensor in range(layout.tensor) for context in range(layout.context))
    if sorted(found[first : first + together]) != wanted:
        raise RunFailed(
            f"torch.sagemaker arranges processes in another way: ranks {first} to {first + together - 1} are "
            f"{found[first : first + together]} as (tensor, context) ranks, which ought to be {wanted}"
        )


def local_state(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Inside, ``model.state_dict()`` holds each process's own shards, live, and communicates nothing.

    Source: Developer Guide, "Checkpointing using SMP". The shard degree must stay; the number of copies may change.
    """
    module = f"{PACKAGE}.distributed.checkpoint.state_dict_utils"
    kind = symbol(module, "SMStateDictType").SM_LOCAL_STATE_DICT
    context: AbstractContextManager[Any] = symbol(module, "sm_state_dict_type")(model, kind)
    return context


def full_state(model: torch.nn.Module, device: Device) -> AbstractContextManager[Any]:
    """Inside, ``model.state_dict()`` is the whole model under Hugging Face's names, in host memory of rank 0 alone."""
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType

    # Where parameters are in host memory already, FSDP1 frees what it "offloads" while it is being read.
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=device.type != "cpu")
    module = f"{PACKAGE}.distributed.checkpoint.state_dict_utils"
    context: AbstractContextManager[Any] = symbol(module, "sm_state_dict_type")(
        model, StateDictType.FULL_STATE_DICT, state_dict_config=config
    )
    return context


def clip_grad_norm(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Clip by, and return, the norm over all shards, tensor-parallel and expert-parallel ones as well."""
    norm: torch.Tensor = symbol(f"{PACKAGE}.grad_norm", "clip_grad_norm_")(model, max_norm)
    return norm


def start_process_group(device: torch.device, collectives: str) -> bool:
    """Unless the program has done so; returns whether it was done here. It comes before the library's ``init``."""
    if dist.is_initialized():
        return False
    restrict_object_collectives()
    if collectives == "smddp":
        symbol("smdistributed.dataparallel.torch", "torch_smddp")  # its import registers the backend
    dist.init_process_group(collectives if device.type == "cuda" else "gloo")
    return True
