"""Gradients that travel in bf16 and are added up in fp32 (``exchange_gradients``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sm_llm.worker.strategies.fsdp.reduction import GradientReduction

CPU = torch.device("cpu")


class Group:
    """Two processes, of which this is the first."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(("op", "divided_by"), [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)])
def test_what_travels_is_bf16_and_the_sum_is_not_rounded(
    monkeypatch: pytest.MonkeyPatch, op: Any, divided_by: int
) -> None:
    own, other = torch.tensor([1.0, 256.0]), torch.tensor([2**-9, 1.0])
    sent: list[torch.dtype] = []

    def exchange(received: torch.Tensor, given: torch.Tensor, group: Any) -> None:
        sent.append(given.dtype)
        received.copy_(torch.cat([given[:2], other]))

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    reduction = GradientReduction(CPU, exchanges=True, shares_memory=False)
    for _ in range(2):  # memory is asked for in pairs, again and again
        given = reduction.allocate((4,), dtype=torch.bfloat16, device=CPU)
        result = reduction.allocate((2,), dtype=torch.bfloat16, device=CPU)
        given.copy_(torch.cat([own, torch.zeros(2)]))
        reduction(result, given, Group(), op)  # type: ignore[arg-type]
        assert result.tolist() == ((own + other) / divided_by).tolist(), "257 and 1 + 2**-9 are no numbers of bf16"
    assert sent == [torch.bfloat16] * 2
    assert not torch.equal(own + other, (own + other).bfloat16().float())
