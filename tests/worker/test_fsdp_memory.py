"""What the fsdp strategy's options do for memory; that they leave the losses alone is shown elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from live_memory import LiveMemory
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor.parallel import SequenceParallel
from worker_jobs import train_task

from sm_llm.contract.memory_estimate import activation_bytes
from sm_llm.models.config import model_config, normalise
from sm_llm.models.families.table import family
from sm_llm.spec.parallelism.base import Layout
from sm_llm.spec.parallelism.fsdp import FsdpSpec
from sm_llm.spec.tasks import PrecisionSpec, TrainTask
from sm_llm.worker.device import gpu_or_cpu
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.strategies.fsdp import strategy as fsdp
from sm_llm.worker.strategies.fsdp import tensor as fsdp_tensor
from sm_llm.worker.strategies.fsdp.attention import CausalAttention
from sm_llm.worker.strategies.fsdp.memory import wrap_layer
from sm_llm.worker.strategies.model import build_on_meta, decoder_layers
from sm_llm.worker.strategies.weights import InitialWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

SEQUENCE = 32


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fsdp.FsdpStrategy]]:
    """Strategies of one process, closed at the end."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert "MASTER_ADDR" not in os.environ
    made: list[fsdp.FsdpStrategy] = []
    yield made
    for strategy in made:
        strategy.close()


def built(
    made: list[fsdp.FsdpStrategy], dropout: float = 0.0, tied: bool = True, **parallelism: Any
) -> fsdp.FsdpStrategy:
    """A model under FSDP2 on one process, which offloading asks for."""
    fields = train_task(parallelism={"offload_optimizer": True, **parallelism})
    task = TrainTask.model_validate(fields, strict=False)
    changes = {**task.model.config, "attention_dropout": dropout, "tie_word_embeddings": tied}
    config = model_config(preset=task.model.preset, path=None, pretrained=None, overrides=changes)
    strategy = fsdp.FsdpStrategy(task, ProcessInfo(), gpu_or_cpu(ProcessInfo()))
    made.append(strategy)
    strategy.setup()
    strategy.build(config, InitialWeights(family(config).tensors(config), 0))
    return strategy


def backward(strategy: fsdp.FsdpStrategy, *, last: bool) -> None:
    ids = torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE)
    with strategy._accumulating(last):
        strategy._loss_sum(ids, ids).backward()  # type: ignore[no-untyped-call]


def test_gradients_are_sharded_after_every_micro_batch_not_after_the_last_alone(
    alone: list[fsdp.FsdpStrategy],
) -> None:
    """Until the last, a process would hold those of the whole model: 270 GB of a 70B model in fp32."""
    strategy = built(alone)
    backward(strategy, last=False)
    assert isinstance(strategy._model, FSDPModule)
    assert [name for name, it in strategy._parameters.items() if it.grad is None] == []
    first = strategy._update.clip(None).item()
    backward(strategy, last=True)
    assert strategy._update.clip(None).item() == pytest.approx(2 * first, rel=1e-5)


def test_fsdp2_is_reported_what_the_options_state(
    alone: list[fsdp.FsdpStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[dict[str, Any]] = []
    original = fsdp.fully_shard

    def spy(module: torch.nn.Module, **options: Any) -> Any:
        reported.append(options)
        return original(module, **options)

    monkeypatch.setattr(fsdp, "fully_shard", spy)
    built(alone, reshard_after_forward=False)
    assert all(isinstance(it["offload_policy"], CPUOffloadPolicy) for it in reported)
    assert [it["reshard_after_forward"] for it in reported] == [False] * 3
    assert {it["mp_policy"].reduce_dtype for it in reported} == {torch.float32}
    reported.clear()
    built(alone)
    assert [it["reshard_after_forward"] for it in reported] == [True, True, False], "the root is needed again at once"


def test_table_and_head_are_groups_of_their_own_unless_they_share_a_weight(
    alone: list[fsdp.FsdpStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One collective for the token table, one for each layer, one for norm and head: each when it is needed."""
    reported: list[Any] = []
    original = fsdp.fully_shard

    def spy(module: Any, **options: Any) -> Any:
        names = [type(it).__name__ for it in (module if isinstance(module, list) else [module])]
        reported.append((names, options["reshard_after_forward"]))
        return original(module, **options)

    monkeypatch.setattr(fsdp, "fully_shard", spy)
    built(alone, tied=False)
    layer = ["LlamaDecoderLayer"]
    assert reported == [
        (["Embedding"], True),
        (layer, True),
        (layer, True),
        (["LlamaRMSNorm", "Linear"], False),
        (["LlamaForCausalLM"], False),
    ]
    reported.clear()
    built(alone, tied=True)
    assert [names for names, _ in reported] == [layer, layer, ["LlamaForCausalLM"]]


def kept_bytes(**options: Any) -> int:
    """Bytes alive after the forward pass of four small layers, for the backward pass."""
    spec = FsdpSpec.model_validate(options, strict=False)
    layers = torch.nn.Sequential(*(wrap_layer(_block(), number, spec, keep_rng=False) for number in range(4)))
    with LiveMemory(layers) as live:
        output = layers(torch.ones(8, 16, requires_grad=True))
        return live.bytes - output.untyped_storage().nbytes()


def _block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.SiLU(), torch.nn.Linear(64, 16), torch.nn.SiLU())


def test_each_way_of_checkpointing_keeps_less_than_the_one_before() -> None:
    kept = [
        kept_bytes(activation_checkpointing=kind, checkpoint_every_layers=2)
        for kind in ("none", "every_nth", "selective", "full")
    ]
    assert kept == sorted(set(kept), reverse=True)
    assert kept_bytes(activation_checkpointing="every_nth", checkpoint_every_layers=4) > kept[1]


def test_a_layer_that_is_computed_again_drops_the_same(alone: list[fsdp.FsdpStrategy]) -> None:
    norms = []
    for kind in ("none", "full"):
        strategy = built(alone, dropout=0.5, activation_checkpointing=kind)
        strategy.train_mode(True)
        torch.manual_seed(0)
        backward(strategy, last=True)
        norms.append(strategy._update.clip(None).item())
    torch.manual_seed(1)
    backward(strategy, last=True)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert strategy._update.clip(None).item() != pytest.approx(2 * norms[0], rel=1e-3), "it does drop something"


def test_sequence_parallelism_splits_what_is_between_the_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(fsdp_tensor, "parallelize_module", lambda model, mesh, plan, **_: plans.append(plan))
    for sequence_parallel in (True, False):
        fsdp_tensor.split_matrices(Mock(), Mock(), sequence_parallel=sequence_parallel)
    norms = [plan["model.layers.*.input_layernorm"] for plan in plans]
    assert [isinstance(it, SequenceParallel) for it in norms] == [True, False]


def test_offloaded_activations_leave_through_saved_tensor_hooks() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

    spec = FsdpSpec(activation_checkpointing="every_nth", offload_activations=True)
    wrapped = [isinstance(wrap_layer(_block(), number, spec, keep_rng=False), OffloadWrapper) for number in range(4)]
    assert wrapped == [True, False, True, False], "what is not computed again stays"


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 64},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "gpt_neox": {"hidden_act": "gelu_fast"},
}
TOKENS = 64


def shape(model_type: str, layers: int) -> Any:
    small = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "vocab_size": 64}
    return normalise({"model_type": model_type, **small, "num_hidden_layers": layers, **SHAPES[model_type]})


def counted(config: Any, spec: FsdpSpec) -> int:
    """Bytes that a forward pass of transformers' model in bf16 leaves, counted without doing its arithmetic."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention = CausalAttention(None, None, torch.device("cpu"))
    attention.prepare(TOKENS)
    model = build_on_meta(config, attention.register(), torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        for number, (parent, name) in enumerate(decoder_layers(model, config)):
            parent.register_module(name, wrap_layer(parent.get_submodule(name), number, spec, keep_rng=False))
        with LiveMemory(model) as live:
            logits = model(input_ids=torch.zeros((1, TOKENS), dtype=torch.int64), use_cache=False).logits
            kept = live.bytes
        del logits
    return kept


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("model_type", SHAPES)
def test_the_plan_estimates_what_a_layer_of_transformers_keeps(model_type: str, kind: str) -> None:
    spec = FsdpSpec.model_validate({"activation_checkpointing": kind}, strict=False)
    configs = [shape(model_type, layers) for layers in (1, 2)]
    found = [counted(config, spec) for config in configs]
    precision = PrecisionSpec(compute="bf16")
    expected = [activation_bytes(config, spec.memory(), Layout(), precision)[0] for config in configs]
    assert (found[1] - found[0]) / TOKENS == pytest.approx(expected[1] - expected[0], rel=0.03)
