"""The loss in the output head: that of the whole logits, chunk by chunk, with its gradients."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sm_llm.worker.strategies.fsdp import loss as fsdp_loss
from sm_llm.worker.strategies.fsdp.loss import LossHead, Vocabulary, chunk_rows, linear_loss
from sm_llm.worker.training.token_loss import IGNORED, token_loss_sum

TOKENS, WIDTH, VOCABULARY = 37, 24, 101
SHARE = 1.0038 / 1024
"""What a token's loss weighs; in bf16 it would be 1 / 1024."""


def example(
    dtype: torch.dtype = torch.float32, tokens: int = TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, weight and targets, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.3).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    targets[[0, 9, 36]] = IGNORED
    return hidden, weight, targets


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, inputs, torch.tensor(SHARE))


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_loss_sum(F.linear(hidden, weight).unsqueeze(0), targets.unsqueeze(0))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("rows", [TOKENS, 100, 12, 1])
def test_loss_and_gradients_are_those_of_the_whole_logits(rows: int) -> None:
    hidden, weight, targets = example()
    expected, found = plain(hidden, weight, targets), linear_loss(hidden, weight, targets, Vocabulary(VOCABULARY), rows)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    pairs = zip(gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True)
    assert max(relative(*pair) for pair in pairs) < 1e-5


@pytest.mark.parametrize("rows", [500, 1])
def test_in_bf16_neither_the_weight_of_a_token_nor_sums_over_chunks_are_rounded_away(rows: int) -> None:
    """A share rounded to bf16 would scale every gradient; sums in bf16 over single rows would be off by percents."""
    hidden, weight, targets = example(torch.bfloat16, tokens=500)
    found = gradients(linear_loss(hidden, weight, targets, Vocabulary(VOCABULARY), rows), hidden, weight)
    exact = [it.detach().float().requires_grad_() for it in (hidden, weight)]
    for own, expected in zip(found, gradients(plain(*exact, targets), *exact), strict=True):
        assert own.dtype == torch.bfloat16
        scale = float((own.float() * expected).sum() / expected.square().sum())
        assert scale == pytest.approx(1, abs=2e-3)
        assert relative(own, expected) < 6e-3


@pytest.mark.parametrize("target", [VOCABULARY, -1, -101])
def test_a_target_outside_of_the_vocabulary_is_not_finite(target: int) -> None:
    hidden, weight, targets = example()
    targets[5] = target
    assert linear_loss(hidden, weight, targets, Vocabulary(VOCABULARY), 10).isnan()


class ChunksAlive(TorchDispatchMode):
    """How many chunks of logits have been alive at once."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self._shape = shape
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and found.shape == self._shape:
            self._alive.append(weakref.ref(found.untyped_storage()))
            self.most = max(self.most, sum(it() is not None for it in self._alive))
        return found


def test_the_logits_of_one_chunk_exist_at_a_time() -> None:
    hidden, weight, targets = example(tokens=40)
    with ChunksAlive((8, VOCABULARY)) as chunks:
        linear_loss(hidden, weight, targets, Vocabulary(VOCABULARY), 8)
    assert chunks.most == 1


def test_nothing_counts_where_every_target_is_ignored() -> None:
    hidden, weight, targets = example()
    loss = linear_loss(hidden, weight, torch.full_like(targets, IGNORED), Vocabulary(VOCABULARY), 10)
    assert loss.item() == 0
    assert not any(it.any() for it in gradients(loss, hidden, weight))


def test_validation_computes_no_gradients() -> None:
    hidden, weight, targets = example()
    with torch.no_grad(), LargestTensor() as largest:
        loss = linear_loss(hidden, weight, targets, Vocabulary(VOCABULARY), 4)
    assert loss.item() == pytest.approx(plain(hidden, weight, targets).item(), rel=1e-6)
    assert largest.elements <= 4 * VOCABULARY


def test_the_parts_of_a_vocabulary_give_the_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes' parts, one behind the other: a first pass collects what each gives to the others."""
    hidden, weight, targets = example()
    parts = [(weight[:60].detach().requires_grad_(), 0), (weight[60:].detach().requires_grad_(), 60)]
    given: list[tuple[torch.Tensor, ...]] = []

    def joined(*statistics: Any) -> Any:
        given.append(statistics[:3])
        if len(given) <= 2:
            return statistics[:3]
        tops, totals, chosen = (torch.stack(it) for it in zip(*given[:2], strict=True))
        top = tops.amax(0)
        return top, (totals * (tops - top).exp()).sum(0), chosen.sum(0)

    monkeypatch.setattr(fsdp_loss, "_joined", joined)
    group: Any = object()
    found: list[Any] = []
    for own, first in parts * 2:
        loss = linear_loss(hidden, own, targets, Vocabulary(VOCABULARY, first, group), TOKENS)
        found.append((loss, *gradients(loss, hidden, own)))
    expected = plain(hidden, weight, targets)
    of_hidden, of_weight = gradients(expected, hidden, weight)
    assert [loss.item() for loss, *_ in found[2:]] == pytest.approx([expected.item()] * 2, rel=1e-6)
    assert relative(found[2][1] + found[3][1], of_hidden) < 1e-5
    assert relative(torch.cat([found[2][2], found[3][2]]), of_weight) < 1e-5


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for it in result if isinstance(result, tuple | list) else [result]:
            if isinstance(it, torch.Tensor) and function not in VIEWS:
                self.elements = max(self.elements, it.numel())
        return result


VIEWS = {torch.ops.aten.t.default, torch.ops.aten.detach.default}


class Model(torch.nn.Module):
    """As transformers' models are made: a head, and where to find it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


def test_a_head_gives_its_loss_while_asked_and_logits_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (hidden, _, targets) = Model(), example()
    before = model(hidden)
    head = LossHead(model)
    monkeypatch.setattr(fsdp_loss, "_HOST_BYTES", 12 * VOCABULARY * 4)
    with head.predicting(targets.unsqueeze(0)), LargestTensor() as largest:
        loss = model(hidden.unsqueeze(0))
        loss.backward()
    assert loss.item() == pytest.approx(token_loss_sum(before[None], targets[None]).item(), rel=1e-6)
    assert largest.elements == VOCABULARY * WIDTH, "the gradient of the weight; 37 tokens' logits are more"
    assert torch.equal(model(hidden), before)


def test_chunks_are_as_equal_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(VOCABULARY, WIDTH)
    assert chunk_rows(TOKENS, weight) == TOKENS
    monkeypatch.setattr(fsdp_loss, "_HOST_BYTES", 30 * VOCABULARY * 4)
    assert chunk_rows(TOKENS, weight) == 19
    monkeypatch.setattr(fsdp_loss, "_HOST_BYTES", 1)
    assert chunk_rows(TOKENS, weight) == 1
