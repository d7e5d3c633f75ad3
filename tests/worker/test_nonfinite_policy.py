"""Steps that are not finite, without processes: the mask, the late reading, the judgement."""

from __future__ import annotations

import math

import pytest
import torch

from sm_llm.models.families.family import Tensor
from sm_llm.runs.events.events import Step
from sm_llm.spec.training import NotFiniteSpec, OptimSpec
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.training.nonfinite_policy import Action, NonFinitePolicy, NonFiniteWatch, not_finite, poisoned
from sm_llm.worker.training.optim import MOMENTS, build_adamw


@pytest.mark.parametrize(("norm", "expected"), [(1.0, 0.0), (0.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_the_flag_of_a_norm(norm: float, expected: float) -> None:
    flag = not_finite(torch.tensor(norm))
    assert (flag.dtype, flag.item()) == (torch.float32, expected)


@pytest.mark.parametrize("loss", [2.5, math.inf, math.nan])
@pytest.mark.parametrize("factor", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_a_loss_that_is_not_finite_poisons_its_gradient(loss: float, factor: float | torch.Tensor) -> None:
    seed = poisoned(torch.tensor(loss), factor)
    assert seed.dtype == torch.float32
    if math.isfinite(loss):
        assert seed.item() == torch.tensor(0.1).item()
    else:
        assert math.isnan(seed.item())


def test_a_masked_update_leaves_parameters_moments_and_step_count_bit_for_bit() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    optimizer = build_adamw({"w": weight}, {"w": Tensor((4, 3), "matrix", "normal", 0.02)}, OptimSpec())

    def update(gradient: torch.Tensor, skip: float) -> list[torch.Tensor]:
        weight.grad = gradient
        optimizer.found_inf = torch.tensor(skip)  # type: ignore[attr-defined]
        optimizer.step()
        state = optimizer.state[weight]
        return [it.detach().clone() for it in (weight, state["step"], *(state[name] for name in MOMENTS))]

    first = update(torch.ones(4, 3), 0.0)
    masked = update(torch.full((4, 3), math.nan), 1.0)
    assert all(torch.equal(*pair) for pair in zip(first, masked, strict=True))
    after = update(torch.ones(4, 3), 0.0)
    assert after[1].item() == 2
    assert not torch.equal(after[0], first[0])


def test_flags_on_a_cpu_are_known_at_once() -> None:
    watch = NonFiniteWatch(CpuDevice())
    watch.note(1, torch.tensor(0.0))
    assert watch.bad_steps(settle=False) == []
    watch.note(2, torch.tensor(1.0))
    assert watch.bad_steps(settle=False) == [2]
    assert watch.bad_steps(settle=True) == []


def test_stop_fails_at_the_first_and_reports_its_numbers() -> None:
    nonfinite = NonFinitePolicy(NotFiniteSpec())
    assert nonfinite.judge([7], [Step(7, math.nan, math.inf, 1e-3, 10)]) is Action.FAIL
    assert "step 7: the loss or a gradient is not finite (loss nan, gradient norm inf)" in nonfinite.message


def test_skip_counts_steps_in_a_row() -> None:
    nonfinite = NonFinitePolicy(NotFiniteSpec(policy="skip", limit=3))
    assert nonfinite.judge([3, 4]) is Action.CONTINUE
    assert nonfinite.judge([6, 7]) is Action.CONTINUE
    assert "skipped: 6, 7" in nonfinite.message
    assert nonfinite.judge([8]) is Action.FAIL
    assert "3 in a row" in nonfinite.message


def test_rollback_goes_back_once_for_a_step_and_not_for_ever() -> None:
    nonfinite = NonFinitePolicy(NotFiniteSpec(policy="rollback", limit=2))
    assert nonfinite.judge([5]) is Action.GO_BACK
    assert nonfinite.judge([5]) is Action.CONTINUE
    assert nonfinite.judge([8, 9]) is Action.GO_BACK
    assert nonfinite.judge([8]) is Action.CONTINUE
    assert nonfinite.judge([12]) is Action.FAIL
    assert "went back 2 times" in nonfinite.message
