"""What float8_kernels.py computes, in torch's operations: for CPUs, and as what the kernels are tested against.

It takes what the kernels take: they read memory row by row, whatever the strides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_largest(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate) * up).abs().max()


def gated_largest_slopes(gate: torch.Tensor, up: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.stack([it.abs().max() for it in slopes(gate, up, slope)])


def slopes(gate: torch.Tensor, up: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``gate`` and ``up`` in fp32, from that of ``silu(gate) * up``."""
    gate, up, slope = gate.float(), up.float(), slope.float()
    share = gate.sigmoid()
    return slope * up * share * (1 + gate * (1 - share)), slope * gate * share


def gated_slopes(
    gate: torch.Tensor,
    up: torch.Tensor,
    slope: torch.Tensor,
    hidden_scale: torch.Tensor,
    gate_scale: torch.Tensor,
    up_scale: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    assert all(it.is_contiguous() for it in (gate, up, slope))
    of_gate, of_up = slopes(gate, up, slope)
    in_gate, in_up = (_cast(*it, torch.float8_e5m2) for it in ((of_gate, gate_scale), (of_up, up_scale)))
    return turned(rounded(F.silu(gate) * up, hidden_scale)), in_gate, turned(in_gate), in_up, turned(in_up)


def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _cast(values, scale, torch.float8_e4m3fn)


def rounded_both(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert values.is_contiguous()
    found = _cast(values, scale, torch.float8_e5m2)
    return found, turned(found)


def turned(values: torch.Tensor) -> torch.Tensor:
    assert values.is_contiguous()
    return values.t().contiguous()


def _cast(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-limit, limit).to(dtype)
