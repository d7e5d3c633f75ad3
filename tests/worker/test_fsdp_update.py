"""The step in one pass: torch's AdamW on clipped gradients, with the kernel written down in torch's operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sm_llm.models.families.family import Tensor
from sm_llm.spec.training import OptimSpec
from sm_llm.worker.strategies import master
from sm_llm.worker.strategies.fsdp.update import FusedUpdate, PlainUpdate, Update
from sm_llm.worker.strategies.master import MasterWeights, PlainMasters
from sm_llm.worker.training.optim import MOMENTS, build_adamw

SHAPES = {"matrix": (7, 5), "norm": (5,)}
TENSORS = {name: Tensor(shape, name, "normal", 0.02) for name, shape in SHAPES.items()}  # type: ignore[arg-type]
RATES = (1e-2, 3e-2, 2e-2, 1e-2)


def in_torch(
    parameter: torch.Tensor,
    copy: torch.Tensor | None,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    scalars: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """What ``kernels.adamw`` promises; ``test_gpu_kernels`` holds the kernel to it."""
    clip, rate, scaled_rate, inverse_root, skip = scalars.tolist()
    if skip:
        return
    slope = gradient.float() * clip
    mean, square = (moment.float() for moment in moments)
    mean = betas[0] * mean + (1 - betas[0]) * slope
    square = betas[1] * square + (1 - betas[1]) * slope.square()
    value = parameter.float() * (1 - rate * decay) - scaled_rate * mean / (square.sqrt() * inverse_root + eps)
    for location, result in ((parameter, value), (moments[0], mean), (moments[1], square), (copy, value)):
        if location is not None:
            location.copy_(result)


class Job:
    """A model of two parameters and its optimiser."""

    def __init__(
        self,
        fused: bool,
        compute: torch.dtype | None,
        betas: tuple[float, float] = (0.9, 0.999),
        moments: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
        }
        self.masters = MasterWeights(self.model, compute)
        spec = OptimSpec(betas=betas, weight_decay=0.3)
        self.optimizer = build_adamw(self.masters.parameters, TENSORS, spec, moments)
        self.updater: Update = (
            FusedUpdate(self.masters, self.optimizer, in_torch) if fused else PlainUpdate(self.masters, self.optimizer)
        )

    def micro_batch(self, number: int, *, last: bool, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.model.values():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.masters.collect_gradients(last=last)

    def step(self, number: int, max_norm: float | None = 1.0, skip: float = 0.0, micro_batches: int = 1) -> float:
        for micro in range(micro_batches):
            self.micro_batch(10 * number + micro, last=micro == micro_batches - 1)
        norm = self.updater.clip(max_norm)
        self.updater.apply(RATES[number], torch.tensor(skip))
        return norm.item()

    def state(self) -> dict[str, torch.Tensor]:
        found = {"step": self.updater.step_count.clone()}
        for name, parameter in self.masters.parameters.items():
            found[name] = parameter.detach().clone()
            found |= {f"{name}.{it}": self.optimizer.state[parameter][it].clone() for it in MOMENTS}
        return found | {f"{name}.copy": it.detach().clone() for name, it in self.model.items()}


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        bound = 1e-5 if value.dtype == torch.float32 else 1e-2  # a rounded copy may fall on the other side
        assert torch.allclose(value, second[name], rtol=bound, atol=1e-7), name


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, 1.0, 1e6])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_step_in_one_pass_is_torchs(
    compute: torch.dtype | None, max_norm: float | None, micro_batches: int
) -> None:
    fused, plain = Job(True, compute), Job(False, compute)
    for number in range(len(RATES)):
        norms = [it.step(number, max_norm, micro_batches=micro_batches) for it in (fused, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert_close(fused.state(), plain.state())
    assert fused.updater.step_count.item() == len(RATES)


@pytest.mark.parametrize("fused", [True, False])
def test_moments_in_bf16_are_rounded_once_a_step(fused: bool) -> None:
    job, by_hand = Job(fused, None, (0.9, 0.95), torch.bfloat16), Job(fused, None, (0.9, 0.95))
    held = job.state()
    assert {held[f"{name}.{moment}"].dtype for name in SHAPES for moment in MOMENTS} == {torch.bfloat16}
    for number in range(len(RATES)):
        job.step(number)
        by_hand.step(number)
        for state in by_hand.optimizer.state.values():
            for moment in MOMENTS:
                state[moment].copy_(state[moment].bfloat16())
    assert_equal({name: value.float() for name, value in job.state().items()}, by_hand.state())
    exact = Job(fused, None, (0.9, 0.95))
    for number in range(len(RATES)):
        exact.step(number)
    assert not torch.equal(exact.state()["matrix"], job.state()["matrix"])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("moments", [None, torch.bfloat16])
def test_a_skipped_step_changes_nothing_and_is_not_counted(fused: bool, moments: torch.dtype | None) -> None:
    job = Job(fused, torch.bfloat16, moments=moments)
    job.step(0)
    before = job.state()
    job.micro_batch(1, last=True, scale=float("nan"))
    assert job.updater.clip(1.0).isnan()
    job.updater.apply(1e-2, torch.tensor(1.0))
    assert all(torch.equal(value, before[name]) for name, value in job.state().items())
    other = Job(fused, torch.bfloat16, moments=moments)
    other.step(0)
    job.step(2)
    other.step(2)
    assert all(torch.equal(value, other.state()[name]) for name, value in job.state().items())


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False), (True, True)])
def test_either_way_continues_what_the_other_has_saved(first: bool, second: bool) -> None:
    """A checkpoint of one parameter, its moments and one count for all: the layout of every version."""
    whole, before, after = Job(first, torch.bfloat16), Job(first, torch.bfloat16), Job(second, torch.bfloat16)
    for number in range(2):
        whole.step(number)
        before.step(number)
    saved = copy.deepcopy(before.state())
    with torch.no_grad():
        after.updater.step_count.copy_(saved["step"])
        for name, parameter in after.masters.parameters.items():
            parameter.copy_(saved[name])
            for moment in MOMENTS:
                after.optimizer.state[parameter][moment].copy_(saved[f"{name}.{moment}"])
    after.updater.loaded()
    for number in range(2, 4):
        whole.step(number)
        after.step(number)
    compare: Any = assert_close if first != second else assert_equal
    compare(after.state(), whole.state())


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_gradients_of_an_only_micro_batch_take_no_memory_of_the_masters() -> None:
    job = Job(True, torch.bfloat16)
    job.micro_batch(0, last=True)
    assert [it.grad for it in job.masters.parameters.values()] == [None, None]
    assert {it.dtype for it in job.masters.gradients().values() if it is not None} == {torch.bfloat16}
    job.updater.clip(None)
    job.updater.apply(1e-2, torch.tensor(0.0))
    assert [it.grad for it in job.model.values()] == [None, None]
    job.micro_batch(0, last=False)
    job.micro_batch(1, last=True)
    assert {it.dtype for it in job.masters.gradients().values() if it is not None} == {torch.float32}


def test_the_norm_of_bf16_gradients_is_not_rounded() -> None:
    job = Job(True, torch.bfloat16)
    job.micro_batch(0, last=True)
    squares = sum(float(it.double().square().sum()) for it in job.masters.gradients().values() if it is not None)
    assert job.updater.clip(None).item() == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_of_parameters_that_are_gathered_in_fp8_are_gone_after_a_step(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP would add those of the next step to them."""
    monkeypatch.setattr(master, "_as_plain", lambda parameter: torch.nn.Parameter(parameter.detach()))
    sharded = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    masters = PlainMasters(sharded)
    optimizer = build_adamw(masters.parameters, TENSORS, OptimSpec())
    update: Update = FusedUpdate(masters, optimizer, in_torch) if fused else PlainUpdate(masters, optimizer)
    for parameter in sharded.values():
        parameter.grad = torch.ones_like(parameter)
    masters.collect_gradients(last=True)
    update.clip(1.0)
    update.apply(1e-2, torch.tensor(0.0))
    assert all(it.grad is None for it in sharded.values())
    assert all((it != 1).all() for it in sharded.values()), "plain parameters are in their memory"
