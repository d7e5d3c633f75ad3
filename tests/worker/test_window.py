"""Attention in a sliding window: blocks of FlexAttention give what a mask gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sm_llm.worker.strategies.fsdp import attention
from sm_llm.worker.strategies.fsdp.attention import CausalAttention

LENGTH, WINDOW = 40, 7


class Layer(torch.nn.Module):
    """What transformers passes as the module; two query heads share a key head."""

    is_causal = True
    num_key_value_groups = 2


def attended(attend: CausalAttention, **options: Any) -> torch.Tensor:
    attend.prepare(LENGTH)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, LENGTH, 8, generator=generator) for heads in (4, 2, 2))
    return attend.attend(Layer(), query, key, value, None, scaling=0.3, **options)[0]


@pytest.fixture
def on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with FlexAttention's own eager form."""
    monkeypatch.setattr(attention, "BLOCK_DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "_flex_attention", attention._plain_flex_attention)


def test_blocks_give_what_a_mask_gives(on_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = CausalAttention(WINDOW, None, torch.device("cpu"))
    by_blocks = attended(found)
    assert found._blocks is not None
    monkeypatch.setattr(attention, "BLOCK_DEVICES", ())
    assert torch.allclose(by_blocks, attended(CausalAttention(WINDOW, None, torch.device("cpu"))), atol=1e-5)
    assert not torch.allclose(by_blocks, attended(CausalAttention(None, None, torch.device("cpu"))), atol=1e-2)


def test_dropout_keeps_the_window(on_blocks: None) -> None:
    """FlexAttention has no dropout; without a mask the whole sequence would be attended to."""
    found = CausalAttention(WINDOW, None, torch.device("cpu"), drops=True)
    assert torch.allclose(attended(found), attended(CausalAttention(WINDOW, None, torch.device("cpu"))), atol=1e-5)
    assert found.mask is not None
    assert found._blocks is None
