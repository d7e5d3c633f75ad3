"""Which products of a model's decoder layers are computed in fp8, by the sizes of their matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.models.families.table import family
from sm_llm.spec.parallelism.base import FP8_UNIT
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.models.families.family import Config, Tensor


def fits(*sizes: int) -> bool:
    """Whether a product takes matrices of these sizes in fp8."""
    return all(size % FP8_UNIT == 0 for size in sizes)


def is_gathered(rows: int, shards: int) -> bool:
    """Whether FSDP gathers a matrix of so many rows, whose product is in fp8, from ``shards`` processes in fp8."""
    # It pads shards that are uneven: it replaces torchao's tensor by a copy, which has no scale and which the optimiser
    # does not know. Those are gathered as they are.
    return rows % shards == 0


@dataclass(frozen=True)
class Fp8Products:
    """The linear layers of a decoder layer by name, [output, input], and what else multiplies there."""

    fitting: Mapping[str, Tensor]
    """Those that compute in fp8."""
    others: Mapping[str, Tensor]
    """Those with a size that does not fit."""
    experts: float
    """Share of the layer's parameters in experts, which are no linear layers."""

    @property
    def left_out(self) -> str:
        """How many compute in fp8, and what stays in bf16; "" where nothing does."""
        kept = []
        # A layer of odd sizes stays as it is without a word of torchao.
        if self.others:
            listed = ", ".join(f"{name} ({' x '.join(map(str, it.shape))})" for name, it in self.others.items())
            kept.append(f"{listed} with a size that is no multiple of {FP8_UNIT}")
        if self.experts:
            kept.append(f"the experts, {self.experts:.0%} of its parameters")
        if not kept:
            return ""
        total = counted(len(self.fitting) + len(self.others), "linear layer")
        return f"{len(self.fitting)} of {total} of a decoder layer compute in fp8; in bf16 stay {', and '.join(kept)}"

    def gathered(self, shards: int) -> int:
        """Parameters of a layer that are gathered in fp8 from ``shards`` processes."""
        return sum(it.size for it in self.fitting.values() if is_gathered(it.shape[0], shards))


def fp8_products(config: Config) -> Fp8Products:
    """Those of a model with a canonical ``config``, whose decoder layers are all alike."""
    kind = family(config)
    linear = kind.linear_layers(config)
    layer = kind.one_layer(config)
    # By their names in published files; transformers keeps all of a layer in two parameters.
    experts = sum(it.size for name, it in layer.items() if ".experts." in name)
    fitting = {name: it for name, it in linear.items() if fits(*it.shape)}
    others = {name: it for name, it in linear.items() if name not in fitting}
    return Fp8Products(fitting, others, experts / sum(it.size for it in layer.values()))
