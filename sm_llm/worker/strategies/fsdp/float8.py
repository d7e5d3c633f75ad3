"""Matrix products of the decoder layers in fp8, by torchao; everything around them stays in bf16.

Each operand has one scale, computed when it is used (dynamic, tensorwise): weights and activations in e4m3, gradients
in e5m2. The output head, norms, attention and the optimiser do not see fp8, and checkpoints are those of bf16.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_llm.contract.fp8_products import fits, is_gathered
from sm_llm.errors import RunFailed
from sm_llm.optional import missing

if TYPE_CHECKING:
    import torch

    from sm_llm.worker.device import Device

_PACKAGE = "torchao"


def assert_float8(device: Device) -> None:
    """Raise ``RunFailed`` where torchao is not installed, or a GPU has no fp8 tensor cores."""
    if (lack := missing(_PACKAGE)) is not None:
        raise RunFailed(f"task.precision.compute: fp8 is computed by torchao: {lack}, or add it to requirements.txt")
    if device.type != "cpu" and not device.computes_fp8():
        raise RunFailed(
            f"task.precision.compute: {device.name} computes no fp8; GPUs do since compute capability 8.9 (Ada, "
            "Hopper). Use bf16"
        )


def compute_in_float8(layer: torch.nn.Module, *, emulate: bool, shards: int = 0) -> int:
    """Let the linear layers inside of a decoder layer multiply in fp8. Returns how many do.

    Those with a size that is no multiple of 16 stay as they are. ``emulate``, for a CPU: numbers are rounded to fp8 and
    multiplied in their own format, slowly, which shows what fp8 does to a loss. ``shards``: FSDP gathers the weights in
    fp8 from so many processes, half as many bytes, and each rounds its own shards alone; 0: it does not.
    """
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)  # it lists optional kernels that it could not load
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from sm_llm.worker.strategies.fsdp.float8_layers import compute_by_kernels

    if shards:
        gathered = Float8LinearConfig(emulate=emulate, enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(layer, module_filter_fn=partial(_is_gathered, shards), config=gathered)
    convert_to_float8_training(layer, module_filter_fn=_fits, config=Float8LinearConfig(emulate=emulate))
    return compute_by_kernels(layer)


def settle_scales(model: torch.nn.Module) -> None:
    """Compute the scales of all weights that are gathered in fp8, in one collective; after each change of them."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _is_gathered(shards: int, module: torch.nn.Module, name: str) -> bool:
    rows: Any = module.out_features
    return _fits(module, name) and is_gathered(rows, shards)


def _fits(module: torch.nn.Module, _: str) -> bool:
    if type(module).__name__ == "Float8Linear":  # a linear layer, too, that the first of two conversions made
        return False
    sizes: tuple[Any, ...] = (module.in_features, module.out_features)
    return fits(*sizes)
