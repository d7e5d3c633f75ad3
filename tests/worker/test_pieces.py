"""The worker's parts on their own: loss, optimiser groups, masters, random state, step buffer, meter, weights."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sm_llm.errors import CheckpointError, RunFailed
from sm_llm.models.config import model_config
from sm_llm.models.families.family import Tensor
from sm_llm.models.weights_check import compare_weights
from sm_llm.spec.training import OptimSpec
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.strategies.master import MasterWeights
from sm_llm.worker.strategies.weights import InitialWeights, PretrainedWeights
from sm_llm.worker.training import random_state
from sm_llm.worker.training.optim import MOMENTS, build_adamw, is_decayed
from sm_llm.worker.training.step_metrics import Costs, StepBuffer, ThroughputMeter
from sm_llm.worker.training.token_loss import next_tokens, token_loss_sum

if TYPE_CHECKING:
    from pathlib import Path


def test_token_loss_is_that_of_hugging_face() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator).to(torch.bfloat16)
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    labels[0, 4:] = -100
    counted = int((labels[:, 1:] != -100).sum())
    expected = ForCausalLMLoss(logits, labels, vocab_size=11)
    assert token_loss_sum(logits, next_tokens(labels)).item() / counted == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("group", "decay_embeddings", "expected"),
    [
        ("matrix", False, True),
        ("norm", True, False),
        ("bias", True, False),
        ("embedding", True, True),
        ("embedding", False, False),
    ],
)
def test_what_is_decayed(group: str, decay_embeddings: bool, expected: bool) -> None:
    tensor = Tensor((2, 2), group, "normal", 0.02)  # type: ignore[arg-type]
    assert is_decayed(tensor, OptimSpec(decay_embeddings=decay_embeddings)) is expected


def test_adamw_with_its_state_made_early_steps_like_torchs_own() -> None:
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    spec = OptimSpec(learning_rate=0.1, weight_decay=0.3)
    own = build_adamw({"w": ours}, {"w": Tensor((4, 3), "matrix", "normal", 0.02)}, spec)
    assert set(own.state[ours]) == {"step", *MOMENTS}
    plain = torch.optim.AdamW([theirs], lr=0.1, betas=spec.betas, eps=spec.eps, weight_decay=0.3, fused=True)
    for _ in range(3):
        for parameter, optimizer in ((ours, own), (theirs, plain)):
            parameter.grad = parameter.detach().sin()
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_masters_add_up_gradients_in_fp32() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    masters = MasterWeights({"w": parameter}, torch.bfloat16)
    assert parameter.dtype == torch.bfloat16
    for value in (1.0, 2**-10):  # the sum needs more than bf16's eight bits
        parameter.grad = torch.full((2,), value, dtype=torch.bfloat16)
        masters.collect_gradients(last=False)
        assert parameter.grad is None
    master = masters.parameters["w"]
    assert master.grad is not None
    assert master.grad.tolist() == [1 + 2**-10] * 2
    with torch.no_grad():
        master.fill_(3.0)
    masters.refresh()
    assert parameter.tolist() == [3.0, 3.0]


def test_masters_of_an_fp32_model_are_its_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert MasterWeights({"w": parameter}, torch.float32).parameters["w"] is parameter


def test_masters_of_a_model_that_computes_in_their_format_are_its_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert MasterWeights({"w": parameter}, torch.bfloat16).parameters["w"] is parameter


def test_random_state_survives_json() -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))

    device = CpuDevice()
    random_state.seed_everything(3, 1, device)
    draw()
    saved = json.loads(json.dumps(random_state.capture(device)))
    first = [draw() for _ in range(3)]
    random_state.restore(saved, device)
    assert [draw() for _ in range(3)] == first


def test_ranks_draw_different_numbers() -> None:
    drawn = set()
    for rank in range(4):
        random_state.seed_everything(0, rank, CpuDevice())
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 4


def test_step_buffer_gives_back_every_step_in_order() -> None:
    buffer = StepBuffer(CpuDevice(), capacity=2)
    buffer.record(1, torch.tensor(6.0), torch.tensor(0.5), 3, 0.1)
    assert not buffer.is_full
    buffer.record(2, torch.tensor(8.0), torch.tensor(0.25), torch.tensor(4.0), 0.2)
    assert buffer.is_full
    steps = buffer.flush()
    assert [(it.step, it.loss, it.grad_norm, it.learning_rate, it.tokens) for it in steps] == [
        (1, 2.0, 0.5, 0.1, 3),
        (2, 2.0, 0.25, 0.2, 4),
    ]
    assert buffer.flush() == []


def test_meter_leaves_pauses_out_and_names_its_formula() -> None:
    now = [0.0]
    costs = Costs(tokens_per_step=100, flops_per_token=5.0, flops_formula="6N", peak_flops=1000.0, world_size=2)
    meter = ThroughputMeter(costs, CpuDevice(), 10, clock=lambda: now[0])
    now[0] = 4.0
    with meter.paused():
        now[0] = 14.0
    window = meter.read(14, data_wait_seconds=0.5)
    assert window.step_seconds == 1.0
    assert window.tokens_per_second == 100.0
    assert window.tokens_per_second_per_device == 50.0
    assert window.mfu == 0.25
    now[0] = 16.0
    assert meter.read(15, data_wait_seconds=0.75).data_wait_seconds == 0.25


def test_the_training_line_keeps_what_hang_detection_matches() -> None:
    from sm_llm.runs.events.events import Step

    def line(world_size: int) -> str:
        now = [0.0]
        costs = Costs(
            tokens_per_step=100, flops_per_token=5.0, flops_formula="6N", peak_flops=1e12, world_size=world_size
        )
        meter = ThroughputMeter(costs, CpuDevice(), 0, clock=lambda: now[0])
        now[0] = 1.0
        return meter.line(Step(5, 2.5, 0.75, 1e-3, 100), meter.read(5, 0.0), 10)

    for part in ("step 5/10", "Loss: 2.5000", "500 tokens/s/device", "MFU", "6N", "grad norm 0.750", "lr 1.000e-03"):
        assert part in line(1)
    assert "in all" not in line(1)
    assert " | 125 tokens/s/device | 500 tokens/s in all | " in line(4)


TENSORS = {"a": Tensor((4, 3), "matrix", "normal", 0.02), "b": Tensor((2,), "norm", "ones")}


def test_pretrained_weights_are_read_by_slice(tmp_path: Path) -> None:
    values = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2)}
    save_file(values, tmp_path / "model.safetensors")
    reader = PretrainedWeights(tmp_path, compare_weights(tmp_path, TENSORS))
    assert torch.equal(reader.read("a", (1, 0), (2, 3)), values["a"][1:3])
    assert torch.equal(reader.read("b", (0,), (2,)), values["b"])


def test_pretrained_weights_trust_the_index_not_the_file_names(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 3)}, tmp_path / "odd.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "name.safetensors")
    index = {"weight_map": {"a": "odd.safetensors", "b": "name.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert PretrainedWeights(tmp_path, compare_weights(tmp_path, TENSORS)).read("b", (0,), (1,)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"a": torch.zeros(4, 3)}, "lacks b"),
        ({"a": torch.zeros(4, 2), "b": torch.ones(2)}, r"shape \[4, 2\]"),
    ],
)
def test_pretrained_weights_that_do_not_fit_are_refused(
    values: dict[str, torch.Tensor], reported: str, tmp_path: Path
) -> None:
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reported):
        PretrainedWeights(tmp_path, compare_weights(tmp_path, TENSORS))


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="safetensors"):
        PretrainedWeights(tmp_path, compare_weights(tmp_path, TENSORS))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pretrained_weights_that_are_not_finite_are_refused(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    values = {"a": torch.zeros(4, 3, dtype=dtype), "b": torch.ones(2)}
    values["a"][2, 1] = value
    save_file(values, tmp_path / "model.safetensors")
    reader = PretrainedWeights(tmp_path, compare_weights(tmp_path, TENSORS))
    assert reader.read("a", (0, 0), (2, 3)).shape == (2, 3)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: a holds NaN or infinity, first at \[2, 1\]\. Fetch"
    ):
        reader.read("a", (1, 0), (3, 3))


def test_pretrained_weights_as_large_as_their_format_are_read(tmp_path: Path) -> None:
    largest = torch.finfo(torch.float32).max
    save_file({"a": torch.full((4, 3), largest), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    reader = PretrainedWeights(tmp_path, compare_weights(tmp_path, TENSORS))
    assert reader.read("a", (0, 0), (4, 3)).max() == largest


def test_initial_weights_slice_the_family_distribution() -> None:
    reader = InitialWeights(TENSORS, seed=5)
    whole = reader.read("a", (0, 0), (4, 3))
    assert torch.equal(reader.read("a", (2, 0), (1, 3)), whole[2:3])


def test_all_cores_draw_the_same_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    tensors = {"w": Tensor((1500, 300), "matrix", "normal", 0.02, zero_row=3)}
    whole = InitialWeights(tensors, seed=5, sharers=1000).read("w", (0, 0), (1500, 300))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    for sharers, threads in ((1, 6), (2, 3), (6, 1)):
        reader = InitialWeights(tensors, 5, sharers)
        assert reader._threads == threads
        assert torch.equal(reader.read("w", (0, 0), (1500, 300)), whole)
        assert torch.equal(reader.read("w", (700, 10), (600, 200)), whole[700:1300, 10:210])
    assert not whole[3].any()


def test_a_model_that_a_checkpoint_follows_draws_nothing_and_cannot_be_mistaken_for_one_with_values() -> None:
    from unittest.mock import Mock

    from sm_llm.worker.checkpoint.start_resolver import Start, first_weights
    from sm_llm.worker.strategies.model import build_on_meta, materialise

    config = model_config(preset="tiny", path=None, pretrained=None, overrides={})
    for source in ("checkpoint", "branch"):
        assert first_weights(Mock(), Start(source, 3, commit=Mock()), config, 0) is None
    context = Mock(process=ProcessInfo())
    assert isinstance(first_weights(context, Start("scratch"), config, 0), InitialWeights)
    model = build_on_meta(config)
    materialise(model, torch.device("cpu"), torch.device("cpu"), None)
    assert all(it.isnan().all() for it in model.parameters())
    assert all(it.isfinite().all() for it in model.buffers())


def test_tokens_of_a_process_are_known_before_its_first_forward_pass() -> None:
    """The loss looks for its targets before the model has seen a sequence, and when the length changes."""
    from unittest.mock import Mock

    from sm_llm.worker.strategies.fsdp.attention import CausalAttention

    context = Mock(size=lambda: 2, get_local_rank=lambda: 1)
    attention = CausalAttention(None, context, torch.device("cpu"))
    for length, expected in ((8, [2, 3, 4, 5]), (4, [1, 2])):
        assert attention.own(torch.arange(length)[None]).tolist() == [expected]


def test_process_info_reads_torchruns_variables() -> None:
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }
    process = ProcessInfo.read(environ)
    assert process == ProcessInfo(rank=5, world_size=8, local_rank=1, local_world_size=4, node=1, node_count=2)
    assert not process.is_leader
    assert not process.is_node_leader
    assert ProcessInfo.read({}).is_leader


def test_a_worker_without_job_file_states_who_starts_it() -> None:
    with pytest.raises(RunFailed, match="SM_LLM_JOB_FILE"):
        WorkerContext.read({})
