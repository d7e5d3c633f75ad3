"""The optimiser's step: gradient norm, clipping, AdamW or nothing, and the model's rounded copies."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sm_llm.worker.training.optim import MOMENTS, set_learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sm_llm.worker.strategies.master import MasterWeights

# Added to the norm that gradients are clipped by, as ``torch.nn.utils.clip_grads_with_norm_`` does.
_NORM_EPS = 1e-6


class Update(Protocol):
    """What ends a step. ``clip`` comes first; between the two the caller decides whether to ``skip``."""

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """The gradients' norm, an fp32 scalar on their device; the step will be clipped by it. A collective."""

    def apply(self, learning_rate: float, skip: torch.Tensor) -> None:
        """Change parameters, optimiser state and copies, unless ``skip`` (fp32 scalar) is 1; gradients are gone."""

    @property
    def step_count(self) -> torch.Tensor:
        """How many steps were applied, an fp32 scalar: one for all parameters."""

    def loaded(self) -> None:
        """Called after parameters, moments and ``step_count`` were written from outside."""


def make_update(masters: MasterWeights, optimizer: torch.optim.Optimizer) -> Update:
    """One pass over memory where the parameters are on a GPU, torch's own operations where they are not."""
    first = next(iter(masters.parameters.values()))
    # Offloaded parameters are in host memory even where a GPU computes.
    if first.device.type != "cuda":
        return PlainUpdate(masters, optimizer)
    from sm_llm.worker.strategies.fsdp.kernels import adamw

    return FusedUpdate(masters, optimizer, adamw)


class PlainUpdate:
    """torch's fused AdamW on clipped gradients (``Update``)."""

    def __init__(self, masters: MasterWeights, optimizer: torch.optim.Optimizer) -> None:
        self._masters = masters
        self._parameters = list(masters.parameters.values())
        self._optimizer = optimizer

    def clip(self, max_norm: float | None) -> torch.Tensor:
        # Computed before it is clipped by, because it is reported as it was.
        norm = _total_norm([it.grad for it in self._parameters if it.grad is not None])
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def apply(self, learning_rate: float, skip: torch.Tensor) -> None:
        set_learning_rate(self._optimizer, learning_rate)
        # What gradient scalers give fused optimisers: their kernels return early where it is 1, and no step is counted.
        self._optimizer.found_inf = skip.to(self._parameters[0].device)  # type: ignore[attr-defined]
        with self._moments_as_parameters():
            self._optimizer.step()
        # Not the optimiser's own: FSDP would add the next gradients to those that its parameters keep.
        self._masters.drop_gradients()
        self._masters.refresh()

    @contextmanager
    def _moments_as_parameters(self) -> Iterator[None]:
        """torch's AdamW takes moments of the parameters' format alone: others are widened for a step, and rounded."""
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        rounded = [{name: state[name] for name in MOMENTS} for state in states]
        for parameter, state in zip(self._parameters, states, strict=True):
            state.update({name: state[name].to(parameter.dtype) for name in MOMENTS})
        yield
        for state, before in zip(states, rounded, strict=True):
            for name, kept in before.items():
                if state[name] is not kept:
                    state[name] = kept.copy_(state[name])

    @property
    def step_count(self) -> torch.Tensor:
        """AdamW counts steps per parameter; ours all step together, so one count is saved for all."""
        return cast("torch.Tensor", self._optimizer.state[self._parameters[0]]["step"])

    def loaded(self) -> None:
        count = self.step_count
        for parameter in self._parameters:
            self._optimizer.state[parameter]["step"].copy_(count)
        self._masters.refresh()


class FusedUpdate:
    """Reads gradients once for their norm and once, with everything else, for the step (``Update``).

    Clipping is a factor that the step multiplies gradients by, and the masters' rounded copies are written beside
    them. The gradients of an only micro-batch are taken as the model gives them. The numbers are torch's AdamW's.

    ``kernel`` is ``kernels.adamw``.
    """

    def __init__(self, masters: MasterWeights, optimizer: torch.optim.Optimizer, kernel: Callable[..., None]) -> None:
        self._masters = masters
        self._optimizer = optimizer
        self._kernel = kernel
        self._step = torch.zeros((), dtype=torch.float32, device=next(iter(masters.parameters.values())).device)
        self._clip: torch.Tensor | None = None
        masters.keeps_only_gradients = True
        for parameter in masters.parameters.values():
            # One count for all parameters, updated and saved once.
            optimizer.state[parameter]["step"] = self._step

    def clip(self, max_norm: float | None) -> torch.Tensor:
        norm = _total_norm(it for it in self._masters.gradients().values() if it is not None)
        self._clip = None if max_norm is None else (max_norm / (norm + _NORM_EPS)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def apply(self, learning_rate: float, skip: torch.Tensor) -> None:
        set_learning_rate(self._optimizer, learning_rate)
        # On the device: only it knows whether this step counts.
        self._step.add_(1 - skip)
        gradients, copies = self._masters.gradients(), self._masters.copies()
        for group in self._optimizer.param_groups:
            scalars = self._scalars(learning_rate, group["betas"], skip)
            for parameter in group["params"]:
                gradient, state = gradients[parameter], self._optimizer.state[parameter]
                if gradient is None:
                    continue
                self._kernel(
                    _local(parameter),
                    copies.get(parameter),
                    _local(gradient).contiguous(),
                    (_local(state[MOMENTS[0]]), _local(state[MOMENTS[1]])),
                    scalars,
                    group["betas"],
                    group["eps"],
                    group["weight_decay"],
                )
        # Also those of a step that was skipped.
        self._masters.drop_gradients()

    def _scalars(self, rate: float, betas: tuple[float, float], skip: torch.Tensor) -> torch.Tensor:
        """What ``kernels.adamw`` reads; bias corrections in fp64, which differences of nearly 1 need."""
        count = self._step.double()
        first, second = (1 - beta**count for beta in betas)
        clip = torch.ones_like(count) if self._clip is None else self._clip.double()
        values = [clip, torch.full_like(count, rate), rate / first, second.rsqrt(), skip.double()]
        return torch.stack(values).float()

    @property
    def step_count(self) -> torch.Tensor:
        return self._step

    def loaded(self) -> None:
        self._masters.refresh()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of all gradients in all processes, fp32. A collective where they are sharded."""
    every = list(gradients)
    if isinstance(every[0], DTensor):
        return _norm_of_shards(cast("DTensor", torch.nn.utils.get_total_norm(every)))
    if all(it.dtype == torch.float32 for it in every):
        return torch.nn.utils.get_total_norm(every)
    # bf16 gradients of a bare model: their squares are added up in fp32.
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(every, 2, torch.float32)))
    return norm


def _norm_of_shards(norm: DTensor) -> torch.Tensor:
    """The whole norm from those of all processes' shards, the same bits on every one: replicas must stay equal.

    One sum over all processes, in which shards of equal content count once. (DTensor would sum over one dimension of
    the mesh after the other, in another order on each process.)
    """
    mesh, own = norm.device_mesh, norm.to_local()
    if mesh.size() == 1:
        return own
    copies = math.prod(mesh.size(dim) for dim, it in enumerate(norm.placements) if it.is_replicate())
    # Squares add up over shards, roots do not.
    squares: torch.Tensor = own.square()
    dist.all_reduce(squares)
    return (squares / copies).sqrt()
