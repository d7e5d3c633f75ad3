"""AdamW of a rank's parameters, or of its ZeRO-1 shards of them: norm, clipping and skipping belong to its step.

NxD's own clipping counts copied key/value heads once for each copy, and fused ones as if every rank had all of them.
Here each element of the model counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sm_llm.worker.training.nonfinite_policy import flag_of

if TYPE_CHECKING:
    from collections.abc import Iterable

# Added to the norm that gradients are clipped by, as ``torch.nn.utils.clip_grads_with_norm_`` does.
_CLIP_EPS = 1e-6


class ShardedAdamW(torch.optim.Optimizer):
    """Decoupled AdamW. ``prepare`` comes before each step, ``norm`` and ``flag`` are those of the last one.

    A group's ``share`` is what each element of its parameters counts in the gradient's norm: a number, or a tensor that
    is multiplied with the squares. Over all processes the shares of an element add up to 1.
    """

    norm: torch.Tensor
    flag: torch.Tensor

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "share": 1.0})
        self._rate: torch.Tensor
        self._max_norm: float | None = None
        self._targets: torch.Tensor | int = 1
        first = self.param_groups[0]["params"][0]
        # How many steps were applied, an fp32 scalar.
        self.step_count = torch.zeros((), dtype=torch.float32, device=first.device)
        for _, parameter in self._parameters():
            self.state[parameter] = {it: torch.zeros_like(parameter) for it in ("exp_avg", "exp_avg_sq")}

    def prepare(self, rate: float, max_norm: float | None, targets: torch.Tensor | int) -> None:
        """The learning rate, what the norm is clipped by, and how many labels the step has."""
        # A tensor, since a constant in the graph would be compiled again whenever it changes.
        self._rate = torch.tensor(rate, dtype=torch.float32).to(self.step_count.device)
        self._max_norm, self._targets = max_norm, targets

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update everything, or nothing where the norm is not finite or the step has no labels. A collective."""
        held = [(group, it, it.grad) for group, it in self._parameters() if it.grad is not None]
        # Nothing here asks for a number: the host would have to wait, and XLA's graph would be cut.
        self.norm = self._total_norm([(group, gradient) for group, _, gradient in held])
        self.flag = flag_of(self.norm, self._targets)
        applied = self.flag == 0
        clip = torch.ones_like(self.norm)
        if self._max_norm is not None:
            clip = (self._max_norm / (self.norm + _CLIP_EPS)).clamp(max=1.0)
        self.step_count += applied.to(torch.float32)
        for group, parameter, gradient in held:
            self._update(group, parameter, gradient * clip.to(gradient.dtype), applied)

    def _total_norm(self, gradients: list[tuple[dict[str, Any], torch.Tensor]]) -> torch.Tensor:
        squares = [(it.float().square() * group["share"]).sum() for group, it in gradients]
        total = torch.stack(squares).sum()
        # Over all processes: the shares count each element of the model once.
        dist.all_reduce(total)
        return total.sqrt()

    def _update(
        self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, applied: torch.Tensor
    ) -> None:
        (beta1, beta2), state = group["betas"], self.state[parameter]
        first = torch.lerp(state["exp_avg"], gradient, 1 - beta1)
        second = state["exp_avg_sq"] * beta2 + gradient.square() * (1 - beta2)
        bias1, bias2 = 1 - beta1**self.step_count, 1 - beta2**self.step_count
        decayed = parameter * (1 - self._rate * group["weight_decay"])
        updated = decayed - self._rate / bias1 * first / ((second / bias2).sqrt() + group["eps"])
        # Selected, not multiplied by 0: NaN times 0 is NaN.
        parameter.copy_(torch.where(applied, updated.to(parameter.dtype), parameter))
        state["exp_avg"].copy_(torch.where(applied, first, state["exp_avg"]))
        state["exp_avg_sq"].copy_(torch.where(applied, second, state["exp_avg_sq"]))

    def _parameters(self) -> Iterable[tuple[dict[str, Any], torch.nn.Parameter]]:
        return ((group, it) for group in self.param_groups for it in group["params"])
