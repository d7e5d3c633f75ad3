"""The learning rate of every optimiser step, as a pure function of the step, and the state that plateau needs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm_llm.spec.training import OptimSpec


def learning_rate(spec: OptimSpec, step: int, total_steps: int, warmup_steps: int, plateau_scale: float = 1.0) -> float:
    """The rate used by optimiser step ``step`` (1-based) of ``total_steps``.

    Warm-up is ``peak * step / warmup_steps``: the first step's rate is never zero and step ``warmup_steps`` has the
    peak. After it the schedule runs from the peak to the floor, which the last step has. ``cosine`` is Loshchilov and
    Hutter 2017 (equation 5, one cycle); ``wsd`` is Hu et al. 2024 (warm-up, stable, decay) with a linear decay.
    """
    peak, floor = spec.learning_rate, spec.min_learning_rate
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if spec.schedule == "constant":
        return peak
    if spec.schedule == "plateau":
        return max(floor, peak * plateau_scale)
    return _decayed(spec, _progress(spec, step, total_steps, warmup_steps))


def _progress(spec: OptimSpec, step: int, total_steps: int, warmup_steps: int) -> float:
    """How much of the decay is done after ``step``: 0 at its start, 1 at the last step."""
    start = warmup_steps
    if spec.schedule == "wsd":
        start = max(warmup_steps, total_steps - math.ceil(spec.decay_fraction * total_steps))
    return min(1.0, max(0, step - start) / max(1, total_steps - start))


def _decayed(spec: OptimSpec, progress: float) -> float:
    peak, floor = spec.learning_rate, spec.min_learning_rate
    if spec.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if spec.schedule == "exponential":
        return float(peak * (floor / peak) ** progress)
    return peak + (floor - peak) * progress


@dataclass
class Plateau:
    """Reduces the rate when validation loss stops falling (``torch.optim.lr_scheduler.ReduceLROnPlateau``, mode min).

    Every rank sees the same validation loss, so every rank holds the same state.
    """

    scale: float = 1.0
    best: float = math.inf
    bad_validations: int = 0

    def observe(self, loss: float, spec: OptimSpec) -> None:
        """Count one validation; after more than ``plateau_patience`` without a new best the rate falls."""
        if loss < self.best:
            self.best, self.bad_validations = loss, 0
            return
        self.bad_validations += 1
        if self.bad_validations > spec.plateau_patience:
            self.scale, self.bad_validations = self.scale * spec.plateau_factor, 0

    def state(self) -> dict[str, Any]:
        """JSON form; infinity is written as null."""
        return {**asdict(self), "best": self.best if math.isfinite(self.best) else None}

    def load(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self.scale, self.bad_validations = float(state["scale"]), int(state["bad_validations"])
        self.best = math.inf if state["best"] is None else float(state["best"])
