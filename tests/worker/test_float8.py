"""``precision.compute: fp8``: which products are in fp8, and what refuses it."""

from __future__ import annotations

import pytest
import torch

from sm_llm import optional
from sm_llm.errors import RunFailed
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.strategies.fsdp import float8
from sm_llm.worker.strategies.model import build_on_meta, decoder_layers

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


class Gpu(CpuDevice):
    """A GPU without fp8 tensor cores, to those who ask."""

    type = "cuda"  # type: ignore[assignment]
    name = "NVIDIA A100-SXM4-40GB"  # type: ignore[assignment]


def test_the_linear_layers_of_decoder_layers_multiply_in_fp8_and_keep_their_names() -> None:
    model = build_on_meta(CONFIG)
    names = [name for name, _ in model.named_parameters()]
    counts = [
        float8.compute_in_float8(parent.get_submodule(name), emulate=True)
        for parent, name in decoder_layers(model, CONFIG)
    ]
    assert counts == [7, 7], "queries, keys, values, output, gate, up, down"
    assert [name for name, _ in model.named_parameters()] == names, "checkpoints are those of bf16"
    assert type(model.get_output_embeddings()) is torch.nn.Linear  # type: ignore[operator]


def test_products_of_odd_sizes_stay_as_they_are() -> None:
    layer = torch.nn.ModuleDict({"odd": torch.nn.Linear(32, 24), "even": torch.nn.Linear(32, 48)})
    assert float8.compute_in_float8(layer, emulate=True) == 1
    assert type(layer["odd"]) is torch.nn.Linear


def test_a_gpu_without_fp8_is_named() -> None:
    with pytest.raises(RunFailed, match=r"A100-SXM4-40GB computes no fp8.*Use bf16"):
        float8.assert_float8(Gpu())
    float8.assert_float8(CpuDevice())


def test_the_package_it_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "is_installed", lambda module: module != "torchao")
    with pytest.raises(RunFailed, match=r"torchao is not installed.*sm_llm\[fp8\]"):
        float8.assert_float8(CpuDevice())
