"""Master parameters for a model that one process computes in another format, as FSDP2 keeps them for many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from sm_llm.worker.strategies.model import plain

if TYPE_CHECKING:
    from collections.abc import Mapping


class MasterWeights:
    """The parameters that the optimiser and the checkpoints see, and the compute copies inside the model.

    The numbers are those of FSDP2's mixed precision on one process, bit for bit, without its bookkeeping: weights are
    rounded once per step, and gradients of micro-batches are added up in the masters' format. When the model computes
    in that format (``compute`` is None, or theirs) the masters are its own parameters and nothing is copied.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], compute: torch.dtype | None) -> None:
        is_apart = compute is not None and any(it.dtype != compute for it in parameters.values())
        self._copies: list[torch.nn.Parameter] = list(parameters.values()) if is_apart else []
        # Whether the gradients of an only micro-batch stay with the copies, as they are.
        self.keeps_only_gradients = False
        if not self._copies:
            self.parameters = dict(parameters)
            return
        self.parameters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        for copy in self._copies:
            # The model keeps its parameter objects, and with them their names and hooks; only their memory is replaced.
            copy.data = copy.data.to(compute)

    @torch.no_grad()
    def collect_gradients(self, *, last: bool) -> None:
        """Add the gradients of one micro-batch to the masters' and free them."""
        masters = self.parameters.values()
        sums = [master.grad for master in masters if master.grad is not None]
        if not self._copies or (last and not sums and self.keeps_only_gradients):
            return
        gradients = [copy.grad for copy in self._copies if copy.grad is not None]
        if not sums:
            for master, gradient in zip(masters, gradients, strict=True):
                # The first micro-batch needs no memory set to 0 before.
                master.grad = gradient.to(master.dtype)
        else:
            # One kernel for many tensors: a loop would start one for each parameter.
            torch._foreach_add_(sums, gradients)
        for copy in self._copies:
            copy.grad = None

    def gradients(self) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        """By master parameter: its sum, or what an only micro-batch has left in the copy's format."""
        if not self._copies:
            return {master: master.grad for master in self.parameters.values()}
        pairs = zip(self.parameters.values(), self._copies, strict=True)
        return {master: copy.grad if master.grad is None else master.grad for master, copy in pairs}

    def copies(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """By master parameter, its rounded copy; empty where there are none."""
        found = zip(self.parameters.values(), self._copies, strict=False)
        return {master: copy.detach() for master, copy in found}

    def drop_gradients(self) -> None:
        """Free all of them."""
        for parameter in [*self.parameters.values(), *self._copies]:
            parameter.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the model after they changed."""
        if self._copies:
            copies: list[torch.Tensor] = [*self._copies]
            torch._foreach_copy_(copies, [*self.parameters.values()])


class PlainMasters(MasterWeights):
    """Plain parameters in the memory of sharded ones whose parts FSDP gathers in another format.

    Optimiser, kernels and checkpoints know nothing of the class of such parts.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._sharded = dict(parameters)
        super().__init__({name: _as_plain(it) for name, it in parameters.items()}, None)

    def collect_gradients(self, *, last: bool) -> None:
        """Those that FSDP has summed so far belong to the plain parameters."""
        for name, sharded in self._sharded.items():
            own = self.parameters[name]
            assert _memory(own) == _memory(sharded), f"FSDP has replaced {name}: it would train without effect"
            own.grad = sharded.grad

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for sharded in self._sharded.values():
            sharded.grad = None


def _memory(parameter: torch.Tensor) -> int:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return plain(local).data_ptr()


def _as_plain(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if not isinstance(parameter, DTensor) or (inner := plain(parameter._local_tensor)) is parameter._local_tensor:
        return parameter
    whole = DTensor.from_local(
        inner.detach(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return torch.nn.Parameter(whole)
