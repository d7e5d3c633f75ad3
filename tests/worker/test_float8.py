"""``precision.compute: fp8``: which products are in fp8, and what refuses it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from sm_llm import optional
from sm_llm.contract.fp8_products import fp8_products
from sm_llm.errors import RunFailed
from sm_llm.models.config import model_config
from sm_llm.models.families.table import family
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.strategies.fsdp import float8, float8_layers, float8_plain
from sm_llm.worker.strategies.master import PlainMasters
from sm_llm.worker.strategies.model import build_on_meta, decoder_layers
from sm_llm.worker.training import start_report

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


@pytest.mark.parametrize("preset", ["tiny", "mistral-7b", "mixtral-8x7b", "qwen2.5-0.5b", "qwen3-0.6b", "gpt-neox-20b"])
@pytest.mark.parametrize("inner", [64, 72])
def test_the_plan_counts_the_products_that_the_worker_computes_in_fp8(preset: str, inner: int) -> None:
    sizes = {
        "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": inner, "num_attention_heads": 2,
        "vocab_size": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if preset != "gpt-neox-20b":
        sizes["num_key_value_heads"] = 1
    if preset == "qwen3-0.6b":
        sizes["head_dim"] = 16
    config = model_config(preset=preset, path=None, pretrained=None, overrides=sizes)
    products = fp8_products(config)
    ((parent, name),) = decoder_layers(build_on_meta(config), config)
    layer = parent.get_submodule(name)
    linear = {it for it, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {*products.fitting, *products.others} == linear
    assert {it for takers in family(config).layer_widths(config).cheap for it in takers} >= products.fitting.keys() - {
        "self_attn.o_proj", "attention.dense"
    }  # fmt: skip
    assert float8.compute_in_float8(layer, emulate=True) == len(products.fitting)
    assert bool(products.experts) == (preset == "mixtral-8x7b")


def test_the_worker_names_products_that_stay_in_bf16() -> None:
    notices: list[Any] = []
    context: Any = SimpleNamespace(notice=lambda *words: notices.append(words))
    for compute, inner in (("bf16", 72), ("fp8", 64), ("fp8", 72)):
        task: Any = SimpleNamespace(precision=SimpleNamespace(compute=compute))
        start_report.report_products(context, task, {**CONFIG, "intermediate_size": inner})
    ((text, level),) = notices
    assert "4 of 7 linear layers of a decoder layer compute in fp8" in text
    assert ("mlp.down_proj (32 x 72)" in text, level) == (True, "warning")


def test_products_of_odd_sizes_stay_as_they_are() -> None:
    layer = torch.nn.ModuleDict({"odd": torch.nn.Linear(32, 24), "even": torch.nn.Linear(32, 48)})
    assert float8.compute_in_float8(layer, emulate=True) == 1
    assert type(layer["odd"]) is torch.nn.Linear


def gated(**config: Any) -> torch.nn.Sequential:
    """A linear layer with a bias before a feed-forward block."""
    torch.manual_seed(0)
    block = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=80, **config))
    return torch.nn.Sequential(torch.nn.Linear(32, 32), block)


def passes(layer: torch.nn.Module, given: torch.Tensor, slope: torch.Tensor) -> list[torch.Tensor]:
    own = given.clone().requires_grad_()
    result = layer(own)
    result.backward(slope)
    return [result.detach(), *(it.grad for it in (own, *layer.parameters()) if it.grad is not None)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_results_and_gradients_are_as_exact_as_those_of_torchaos_layers(compiled: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plain, together, apart = gated(), gated(), gated()
    assert float8.compute_in_float8(together, emulate=True) == 4
    assert float8_layers.is_gated(together[1])
    convert_to_float8_training(apart, config=Float8LinearConfig(emulate=True))
    given, slope = torch.randn(2, 48, 32), torch.randn(2, 48, 32)
    results = [passes(torch.compile(layer) if compiled else layer, given, slope) for layer in (plain, together, apart)]
    assert all(len(it) == 7 for it in results), "the result, and gradients of what was given, four weights and a bias"
    for exact, ours, theirs in zip(*results, strict=True):
        assert ours.shape == exact.shape
        assert relative(ours, theirs) < 0.04, "but for what lies between two neighbours of a format"
        assert 0.005 < relative(ours, exact) < 1.1 * relative(theirs, exact)


def opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile see operators that it knows nothing of, as the kernels of a GPU are."""
    library = torch.library.Library("float8_plain", "FRAGMENT")
    monkeypatch.setattr(float8_plain, "library", library, raising=False)  # it lives as long as its operators
    results = {"gated_largest": 1, "gated_largest_slopes": 1, "gated_slopes": 5, "rounded_both": 2, "turned": 1}
    operators: dict[str, Any] = {"rounded": float8_plain.rounded}
    for name, count in results.items():
        plain = getattr(float8_plain, name)
        arguments = ", ".join(f"Tensor {it}" for it in inspect.signature(plain).parameters)
        library.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * count)})")
        library.impl(name, plain, "CompositeExplicitAutograd")
        operators[name] = getattr(torch.ops.float8_plain, name)
    monkeypatch.setattr(float8_layers, "_operations", lambda _: SimpleNamespace(**operators))


def kept_bytes(layer: torch.nn.Module, given: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> int:
    """What a compiled layer keeps for its backward pass, without parameters and what it was given."""
    known = {it.untyped_storage().data_ptr() for it in (*layer.parameters(), given, *rotation)}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = torch.compile(layer)(given, position_embeddings=rotation)
    result.sum().backward()
    return sum(sizes.values())


@pytest.mark.integration
def test_a_compiled_layer_keeps_no_rounded_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its estimate of memory is that of torchao's layers, which compute them again."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    opaque(monkeypatch)
    config = LlamaConfig(**{**CONFIG, "hidden_size": 64, "intermediate_size": 256, "attn_implementation": "sdpa"})
    ours, theirs = (LlamaDecoderLayer(config, 0).bfloat16() for _ in range(2))
    assert float8.compute_in_float8(ours, emulate=True) == 7
    convert_to_float8_training(theirs, config=Float8LinearConfig(emulate=True))
    given = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    rotation = (torch.randn(1, 64, 16).bfloat16(), torch.randn(1, 64, 16).bfloat16())
    scalars = 1024
    assert kept_bytes(ours, given, rotation) == pytest.approx(kept_bytes(theirs, given, rotation), abs=scalars)


def test_inputs_and_gradients_of_other_strides_are_rounded_row_by_row() -> None:
    layers = [gated() for _ in range(2)]
    for layer in layers:
        float8.compute_in_float8(layer, emulate=True)
    given, slope = (torch.randn(1, 32, 48).transpose(1, 2) for _ in range(2))
    found = passes(layers[0], given, slope)
    for own, expected in zip(found, passes(layers[1], given.contiguous(), slope.contiguous()), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("config", [{"hidden_act": "gelu"}, {"mlp_bias": True}])
def test_another_activation_or_a_bias_leaves_the_layers_apart(config: dict[str, Any]) -> None:
    layer = gated(**config)
    assert float8.compute_in_float8(layer, emulate=True) == 4
    assert not float8_layers.is_gated(layer[1])
    assert len(passes(layer, torch.randn(2, 16, 32), torch.randn(2, 16, 32))) >= 7


def test_gradients_of_the_activation_are_those_of_torch() -> None:
    gate, up, slope = (torch.randn(7, 5, dtype=torch.float64) for _ in range(3))
    values = [it.requires_grad_() for it in (gate, up)]
    expected = torch.autograd.grad(torch.nn.functional.silu(values[0]) * values[1], values, slope)
    for found, own in zip(float8_plain.slopes(gate, up, slope), expected, strict=True):
        assert torch.allclose(found.double(), own, rtol=1e-5, atol=1e-6)


def test_weights_that_fsdp_gathers_are_rounded_as_torchao_rounds_them() -> None:
    layer = gated()
    float8.compute_in_float8(layer, emulate=True, shards=2)
    weight = layer[1].gate_proj.weight
    assert type(weight) is type(weight.detach()) is float8_layers.ShardedWeight
    (dynamic,), (scale,) = weight.fsdp_pre_all_gather(None)
    weight._precomputed_scale = scale * 1.5  # the largest values lie beyond the format
    (found,), _ = weight.fsdp_pre_all_gather(None)
    expected = (weight._tensor * scale * 1.5).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(found.float(), expected.float())
    assert not torch.equal(found.float(), dynamic.float())


def test_masters_that_fsdp_has_cut_off_are_noticed() -> None:
    """They would be updated, and the weights that are gathered would stay as they are."""
    masters = PlainMasters({"weight": torch.nn.Parameter(torch.ones(2))})
    masters.collect_gradients(last=True)
    masters._sharded["weight"] = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(AssertionError, match="FSDP has replaced weight"):
        masters.collect_gradients(last=True)


def test_a_gpu_without_fp8_is_named() -> None:
    with pytest.raises(RunFailed, match=r"A100-SXM4-40GB computes no fp8.*Use bf16"):
        float8.assert_float8(Gpu())
    float8.assert_float8(CpuDevice())


def test_the_package_it_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "is_installed", lambda module: module != "torchao")
    with pytest.raises(RunFailed, match=r"torchao is not installed.*sm_llm\[fp8\]"):
        float8.assert_float8(CpuDevice())
