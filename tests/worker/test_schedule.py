"""Learning rates at the places that matter, and plateau's memory."""

from __future__ import annotations

import itertools
import math

import pytest

from sm_llm.spec.training import OptimSpec
from sm_llm.worker.training.schedule import Plateau, learning_rate


def rates(total: int = 100, warmup: int = 10, **fields: object) -> list[float]:
    spec = OptimSpec.model_validate({"learning_rate": 1.0, "min_learning_rate": 0.1, **fields})
    return [learning_rate(spec, step, total, warmup) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd", "exponential", "plateau"])
def test_warmup_is_linear_and_never_zero(schedule: str) -> None:
    assert rates(schedule=schedule)[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates(warmup=0, schedule=schedule)[0] > 0.9


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "exponential"])
def test_the_last_step_has_the_floor_and_only_it(schedule: str) -> None:
    found = rates(schedule=schedule)
    assert found[-1] == pytest.approx(0.1)
    assert found[-2] > 0.1
    assert all(later <= earlier for earlier, later in itertools.pairwise(found[9:]))


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates(total=110, schedule="cosine")[59] == pytest.approx(0.55)


def test_wsd_is_stable_until_its_decay() -> None:
    found = rates(schedule="wsd", decay_fraction=0.2)
    assert found[9:80] == [1.0] * 71
    assert found[89] == pytest.approx(0.55)


def test_exponential_falls_by_a_constant_factor() -> None:
    found = rates(schedule="exponential")
    factors = [later / earlier for earlier, later in itertools.pairwise(found[10:])]
    assert max(factors) == pytest.approx(min(factors))


def test_constant_ignores_the_floor() -> None:
    assert set(rates(schedule="constant")[9:]) == {1.0}


def test_a_single_step_trains_at_the_peak_or_the_floor() -> None:
    assert rates(total=1, warmup=1) == [1.0]
    assert rates(total=1, warmup=0, schedule="constant") == [1.0]


def test_plateau_waits_for_its_patience_and_remembers() -> None:
    spec = OptimSpec(schedule="plateau", plateau_factor=0.5, plateau_patience=1, learning_rate=1.0)
    plateau = Plateau()
    scales = []
    for loss in (3.0, 2.0, 2.0, 2.0, 2.5, 2.5, 1.0):
        plateau.observe(loss, spec)
        scales.append(plateau.scale)
    assert scales == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    again = Plateau()
    again.load(plateau.state())
    assert again == plateau
    assert learning_rate(spec, 50, 100, 0, plateau.scale) == 0.25


def test_plateau_state_is_json_before_the_first_validation() -> None:
    plateau = Plateau()
    assert plateau.state()["best"] is None
    plateau.load(plateau.state())
    assert plateau.best == math.inf
