"""Which kernel computes attention: settled for the process before a layer is compiled, and found by running it once.

torch chooses among its kernels when a layer is traced, in an order that is the whole process's, and its caches of
compiled graphs leave that order out of their keys.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from sm_llm.models.families.table import family
from sm_llm.models.parallel import kv_heads
from sm_llm.runs.events.events import AttentionChosen
from sm_llm.spec.machines.hardware import CUDNN, EFFICIENT, FLASH, MATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sm_llm.worker.strategies.fsdp.attention import CausalAttention

_BACKENDS = {
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    FLASH: SDPBackend.FLASH_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
_OPERATIONS = {
    "_scaled_dot_product_cudnn_attention": CUDNN,
    "_scaled_dot_product_flash_attention": FLASH,
    "_scaled_dot_product_flash_attention_for_cpu": FLASH,
    "_scaled_dot_product_efficient_attention": EFFICIENT,
}
_HEADINGS = {CUDNN: "cudnn", FLASH: "flash", EFFICIENT: "memory efficient"}
_FASTEST_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)


def settle_order(expected: str | None) -> ExitStack:
    """Let torch try the kernel ``expected`` first, then the others, until what is returned is closed.

    Others than cuDNN and flash leave torch's own order.
    """
    stack = ExitStack()
    if expected in (CUDNN, FLASH):
        order = sorted(_FASTEST_FIRST, key=lambda it: it != expected)
        stack.enter_context(sdpa_kernel([_BACKENDS[it] for it in order], set_priority=True))
    return stack


def found_kernel(
    attention: CausalAttention, config: Mapping[str, Any], dtype: torch.dtype, expected: str | None
) -> AttentionChosen:
    """What computes attention in a step, for ``attention`` that is prepared for its length.

    ``expected``: the fastest one (``attention_kernel``); None where none is known.
    """
    if attention.replaces_torchs:
        return AttentionChosen(attention.replaces_torchs, expected, [])
    query, key = _inputs(attention, config, dtype)
    run = partial(attention.torchs, _layer(config), query, key, key, dropout=_dropout(config))
    with _Operations() as seen:
        run()
    found = next((_OPERATIONS[it] for it in seen.names if it in _OPERATIONS), MATH)
    slower = expected in _FASTEST_FIRST and _FASTEST_FIRST.index(found) > _FASTEST_FIRST.index(str(expected))
    reasons = _reasons(str(expected), run) if slower else []
    return AttentionChosen(found, expected, reasons)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def _inputs(
    attention: CausalAttention, config: Mapping[str, Any], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of one key head: no kernel is chosen by the number of heads, and more would take more time."""
    channels, groups = family(config).head_dim(config), _groups(config)
    own, whole = attention.lengths
    # Kernels differ in what they can differentiate.
    options: dict[str, Any] = {"dtype": dtype, "device": attention.device, "requires_grad": True}
    return torch.zeros(1, groups, own, channels, **options), torch.zeros(1, 1, whole, channels, **options)


def _layer(config: Mapping[str, Any]) -> Any:
    """What transformers reads of the module that computes attention."""
    return SimpleNamespace(num_key_value_groups=_groups(config), is_causal=True, training=True)


def _groups(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"]) // kv_heads(config)


def _dropout(config: Mapping[str, Any]) -> float:
    return float(config.get("attention_dropout") or 0.0)


def _reasons(expected: str, run: Callable[[], object]) -> list[str]:
    """Why torch does not take the kernel ``expected`` for ``run``, in the words that it warns in where it may take no
    other one."""
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(_BACKENDS[expected]):
        warnings.simplefilter("always")
        try:
            run()
        except RuntimeError:
            return reasons_in([str(it.message) for it in caught], expected) or ["torch gives no reason"]
    return [f"torch prefers another, though {expected} can compute it"]


def reasons_in(texts: Iterable[str], kernel: str) -> list[str]:
    """Those of torch's warnings that follow its heading for ``kernel``, without where they were triggered.

    Headings and their order are those of ``select_sdp_backend`` (ATen, ``sdp_utils.cpp``).
    """
    found: dict[str, None] = {}
    concerned = False
    for text in texts:
        shown = text.partition(" (Triggered")[0].strip()
        if shown.endswith("not used because:"):
            concerned = shown.lower().startswith(_HEADINGS[kernel])
        elif concerned and shown:
            found[shown] = None
    return list(found)
