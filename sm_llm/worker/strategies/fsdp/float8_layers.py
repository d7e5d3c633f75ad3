"""Linear layers and gated feed-forward blocks in fp8, on torchao's tensors. Needs torchao.

What products take is rounded to fp8 with one scale, which the tensor's largest magnitude gives: a pass over it before
the one that rounds. Those of the backward pass take tensors by columns as well. torchao's layers leave all that to
torch.compile, which looks for the scale of what a layer was given twice and is slow at storing in two layouts: here
scales are kept for the backward pass, and kernels store (float8_kernels.py).
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale, tensor_to_scale, to_fp8_saturated
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from sm_llm.worker.strategies.fsdp import float8_plain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def compute_by_kernels(layer: torch.nn.Module) -> int:
    """Let the linear layers of torchao inside of a decoder layer compute as below. Returns how many there are."""
    linears = [it for it in layer.modules() if isinstance(it, Float8Linear)]
    for module in linears:
        module.forward = MethodType(_linear, module)
        if isinstance(module.weight, WeightWithDynamicFloat8CastTensor):
            module.weight = torch.nn.Parameter(ShardedWeight._of(module.weight), module.weight.requires_grad)
    for module in filter(is_gated, layer.modules()):
        module.forward = MethodType(_gated, module)
    return len(linears)


class ShardedWeight(WeightWithDynamicFloat8CastTensor):  # type: ignore[misc]
    """torchao's, which a GPU rounds in one pass over memory before FSDP gathers it, in place of three."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        # It makes its own class of what the operations give.
        return tree_map_only(WeightWithDynamicFloat8CastTensor, cls._of, found)

    @classmethod
    def _of(cls, other: WeightWithDynamicFloat8CastTensor) -> Self:
        found: Self = cls(other._tensor, other._linear_mm_config, other._dtype)
        return found

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
        values, scale = self._tensor, self._precomputed_scale
        if scale is None:  # it looks for one, in a collective for each weight
            found: tuple[tuple[torch.Tensor], tuple[torch.Tensor]] = super().fsdp_pre_all_gather(mesh)
            return found
        return (_operations(values).rounded(values.contiguous(), scale),), (scale,)


def is_gated(module: Any) -> bool:
    """Whether it computes ``down(silu(gate(x)) * up(x))`` in fp8, without biases, as transformers' Llama does."""
    linears = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    if not all(isinstance(it, Float8Linear) and it.bias is None for it in linears):
        return False
    # transformers has a class of its own for each activation.
    values = torch.linspace(-4, 4, 9, device="cpu")
    return torch.equal(module.act_fn(values), F.silu(values))


def _linear(module: Any, given: torch.Tensor) -> torch.Tensor:
    rows = given.reshape(-1, given.shape[-1])
    result: torch.Tensor = _LinearProduct.apply(rows, module.weight.t(), module.linear_mm_config)  # type: ignore[no-untyped-call]
    if module.bias is not None:
        result = result + module.bias
    return result.view(*given.shape[:-1], -1)


def _gated(module: Any, given: torch.Tensor) -> torch.Tensor:
    weights = [it.weight.t() for it in (module.gate_proj, module.up_proj, module.down_proj)]
    rows = given.reshape(-1, given.shape[-1])
    result: torch.Tensor = _GatedProducts.apply(rows, *weights, module.down_proj.linear_mm_config)  # type: ignore[no-untyped-call]
    return result.view(*given.shape[:-1], -1)


@torch._dynamo.allow_in_graph
class _LinearProduct(torch.autograd.Function):
    """``rows @ weight`` for rows [n, h] and a weight [h, f]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, products: LinearMMConfig) -> torch.Tensor:
        cast, scale = _Cast(products), tensor_to_scale(rows, _FORWARD)
        ctx.save_for_backward(rows, weight, scale)
        ctx.products = products
        return torch.mm(cast.given(rows, scale), cast.weight(weight))

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        cast = _Cast(ctx.products)
        by_rows, by_columns = cast.slopes(slope)
        to_weight = torch.mm(by_columns, cast.by_columns(rows, scale))
        return torch.mm(by_rows, cast.weight(weight).t()), to_weight.t(), None


@torch._dynamo.allow_in_graph
class _GatedProducts(torch.autograd.Function):
    """``silu(rows @ gate) * (rows @ up) @ down`` for rows [n, h] and weights [h, f], [h, f] and [f, h]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        products: LinearMMConfig,
    ) -> torch.Tensor:
        cast = _Cast(products)
        row_scale = tensor_to_scale(rows, _FORWARD)
        given = cast.given(rows, row_scale)
        gate, up = (torch.mm(given, cast.weight(it)) for it in (gate_weight, up_weight))
        hidden_scale = amax_to_scale(_operations(gate).gated_largest(gate, up), _FORWARD)
        hidden = cast.given(F.silu(gate) * up, hidden_scale)
        ctx.save_for_backward(rows, gate, up, gate_weight, up_weight, down_weight, row_scale, hidden_scale)
        ctx.products = products
        return torch.mm(hidden, cast.weight(down_weight))

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, gate, up, gate_weight, up_weight, down_weight, row_scale, hidden_scale = ctx.saved_tensors
        cast, compute = _Cast(ctx.products), _operations(gate)
        out_rows, out_columns = cast.slopes(slope)
        inner = torch.mm(out_rows, cast.weight(down_weight).t())
        gate_largest, up_largest = compute.gated_largest_slopes(gate, up, inner)
        gate_scale, up_scale = (amax_to_scale(it, _BACKWARD) for it in (gate_largest, up_largest))
        hidden, *slopes = compute.gated_slopes(gate, up, inner, hidden_scale, gate_scale, up_scale)
        gate_rows, gate_columns = (cast.slope(it, gate_scale, gate.dtype) for it in slopes[:2])
        up_rows, up_columns = (cast.slope(it, up_scale, up.dtype) for it in slopes[2:])
        given = cast.by_columns(rows, row_scale)
        to_gate, to_up = torch.mm(gate_columns, given), torch.mm(up_columns, given)
        to_down = torch.mm(out_columns, cast.made(hidden.t(), hidden_scale, gate.dtype))
        to_rows = torch.mm(gate_rows, cast.weight(gate_weight).t()) + torch.mm(up_rows, cast.weight(up_weight).t())
        return to_rows, to_gate.t(), to_up.t(), to_down.t(), None


class _Cast:
    """Makes torchao's tensors, whose products are in fp8 and know which of a linear layer's three they are."""

    def __init__(self, products: LinearMMConfig) -> None:
        self._products = products

    def given(self, tensor: torch.Tensor, scale: torch.Tensor) -> Float8TrainingTensor:
        found: Float8TrainingTensor = hp_tensor_and_scale_to_float8(tensor, scale, _FORWARD, self._products)
        return found

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """Those that FSDP has gathered in fp8 are already."""
        if tensor_already_casted_to_fp8(tensor):
            return tensor
        found: torch.Tensor = hp_tensor_to_float8_dynamic(
            tensor, _FORWARD, self._products, gemm_input_role=GemmInputRole.WEIGHT
        )
        return found

    def made(
        self,
        bits: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        role: GemmInputRole = GemmInputRole.INPUT,
    ) -> Float8TrainingTensor:
        """Of what is in fp8 already; products with it are in ``dtype``."""
        return Float8TrainingTensor(bits, scale, dtype, self._products, role)

    def by_columns(self, rows: torch.Tensor, scale: torch.Tensor) -> Float8TrainingTensor:
        """``rows`` as the second operand of a product, which torch._scaled_mm takes by columns.

        A step of its own: torch.compile would store by columns where it computes the norm before, row by row, and once
        for each product.
        """
        # Written in another order than torchao's: torch.compile would find that both are the same and keep the rounded
        # rows of the forward pass, a byte for each element. Now it computes them again, from what a layer keeps anyway.
        bits = to_fp8_saturated(scale * rows.float(), _FORWARD)
        return self.made(_operations(bits).turned(bits.contiguous()).t(), scale, rows.dtype)

    def slopes(self, slope: torch.Tensor) -> tuple[Float8TrainingTensor, Float8TrainingTensor]:
        """A gradient [n, f], for the product that gives the input's, and [f, n], for the weight's."""
        scale = tensor_to_scale(slope, _BACKWARD)
        by_rows, by_columns = _operations(slope).rounded_both(slope.contiguous(), scale)
        return self.slope(by_rows, scale, slope.dtype), self.slope(by_columns, scale, slope.dtype)

    def slope(self, bits: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8TrainingTensor:
        return self.made(bits, scale, dtype, GemmInputRole.GRAD_OUTPUT)


def _operations(tensor: torch.Tensor) -> Any:
    """The module with what is computed for tensors of its device."""
    if tensor.is_cuda:
        from sm_llm.worker.strategies.fsdp import float8_kernels

        return float8_kernels
    return float8_plain
