"""What a training reports of its start: its phases, and the kernel that computes attention."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from worker_jobs import MODEL, events, job_environment, job_file, train_task

from sm_llm.models.config import model_config
from sm_llm.runs.events.events import AttentionChosen, read_events
from sm_llm.runs.events.run_metrics import summarise
from sm_llm.runs.run_paths import RunPaths
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.main import main
from sm_llm.worker.runtime.start_phases import COMPILING, FIRST_STEP, StartPhases, process_began
from sm_llm.worker.strategies.fsdp.attention import CausalAttention
from sm_llm.worker.strategies.fsdp.attention_kernel import found_kernel, reasons_in, settle_order
from sm_llm.worker.strategies.weights import InitialWeights
from sm_llm.worker.tasks import train
from sm_llm.worker.training.start_report import report_attention

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = model_config(preset="tiny", path=None, pretrained=None, overrides=MODEL)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def phases_of(*steps: tuple[str, float]) -> tuple[StartPhases, Clock]:
    clock = Clock()
    phases = StartPhases(clock, began=98.0)
    for name, seconds in steps:
        phases.enter(name)
        clock.now += seconds
    return phases, clock


def test_phases_follow_each_other_and_add_up_to_the_whole() -> None:
    phases, _ = phases_of(("importing", 5.0), ("drawing", 3.0), ("importing", 1.0), (FIRST_STEP, 7.0))
    assert phases.doing == FIRST_STEP
    assert phases.seconds == 18.0
    assert phases.ended(None) == {"starting": 2.0, "importing": 6.0, "drawing": 3.0, FIRST_STEP: 7.0}


def test_compilation_is_a_phase_of_its_own_within_the_first_step() -> None:
    phases, _ = phases_of((FIRST_STEP, 7.0))
    found = phases.ended(4.5)
    assert found == {"starting": 2.0, COMPILING: 4.5, FIRST_STEP: 2.5}
    assert list(found)[-1] == FIRST_STEP


def test_the_beginning_of_this_process_is_the_kernels() -> None:
    """By another of its clocks: of the folder in /proc, which is made with the process."""
    now = time.time()
    child = os.fork()
    if not child:
        # In the child, which has just begun; a second for the resolution of both clocks on a busy machine.
        os._exit(0 if abs(process_began(time.time()) - now) < 30 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process_began(now) < now


def test_a_training_reports_its_start_in_events_log_and_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_file(train_task(max_steps=2), tmp_path / "run", 1)
    assert main("train", job_environment(job)) == 0
    (start,) = events(tmp_path / "run", "start_measured")
    assert start["step"] == 1
    names = list(start["phases"])
    assert names[0] == "starting"
    assert names[-1] == FIRST_STEP
    assert "building the model and drawing its initial weights" in names
    assert "loading the checkpoint" not in names
    assert sum(start["phases"].values()) == pytest.approx(start["seconds"], abs=0.05)
    (attention,) = events(tmp_path / "run", "attention_chosen")
    assert (attention["attention"], attention["expected"]) == ("flash", None)
    printed = capsys.readouterr().out
    assert "attention: flash\n" in printed
    assert "step 1 done " in printed
    status = summarise(read_events(RunPaths(tmp_path / "run").events))
    assert status.attention == "flash"
    assert status.start_up is not None
    assert status.start_up.startswith("step 1 done ")


def test_a_resume_draws_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, original = tmp_path / "run", train.Trainer.take_step

    def take_step(training: train.Trainer, step: int, batches: Any) -> None:
        if step == 5:
            training.checkpointer.finish()
            raise RuntimeError("broken on purpose")
        original(training, step, batches)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "take_step", take_step)
        assert main("train", job_environment(job_file(train_task(), run, 1))) == 1
    drawn: list[str] = []
    monkeypatch.setattr(InitialWeights, "read", lambda _, name, *__: drawn.append(name))
    assert main("train", job_environment(job_file(train_task(), run, 1, attempt=2))) == 0
    assert drawn == []
    start = events(run, "start_measured")[-1]
    assert start["step"] == 4
    assert {"building the model", "loading the checkpoint"} <= set(start["phases"])


def prepared(window: int | None = None, device: str = "cpu", length: int = 16) -> CausalAttention:
    attention = CausalAttention(window, None, torch.device(device))
    attention.prepare(length)
    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_is_the_one_that_runs(dtype: torch.dtype, window: int | None) -> None:
    assert found_kernel(prepared(window), CONFIG, dtype, None).attention == "flash"
    with sdpa_kernel([SDPBackend.MATH]):
        assert found_kernel(prepared(window), CONFIG, dtype, None).attention == "math"


def test_a_slower_kernel_than_expected_has_reasons() -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        found = found_kernel(prepared(), CONFIG, torch.float32, "cudnn")
    assert (found.attention, found.expected) == ("math", "cudnn")
    assert found.reasons == ["torch gives no reason"], "on a CPU it gives none"
    assert found_kernel(prepared(), CONFIG, torch.float32, "efficient").reasons == [], "flash is faster"


def test_the_reasons_are_those_of_torch_for_the_kernel_that_was_expected() -> None:
    """What torch warned of on a GPU, in its order, with the origins that it adds."""
    origin = " (Triggered internally at /pytorch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:1010.)"
    texts = [
        f"Memory efficient kernel not used because:{origin}",
        f"Memory Efficient attention has been runtime disabled.{origin}",
        f"Flash attention kernel not used because:{origin}",
        f"Flash attention has been runtime disabled.{origin}",
        f"cuDNN attention kernel not used because:{origin}",
        f"cuDNN SDPA is not deterministic.{origin}",
        f"cuDNN SDPA is not deterministic.{origin}",
    ]
    assert reasons_in(texts, "cudnn") == ["cuDNN SDPA is not deterministic."]
    assert reasons_in([texts[4].replace("cuDNN", "CuDNN"), *texts[5:]], "cudnn") == ["cuDNN SDPA is not deterministic."]
    assert reasons_in(texts, "flash") == ["Flash attention has been runtime disabled."]
    assert reasons_in(texts, "efficient") == ["Memory Efficient attention has been runtime disabled."]


@pytest.mark.parametrize("window", [None, 4])
def test_repeated_key_heads_give_what_grouped_ones_give(window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    found = []
    for repeats in (False, True):
        attention = prepared(window)
        attention.repeats_keys = repeats
        result = attention.torchs(module, query, key, value, scaling=0.3)  # type: ignore[arg-type]  # what is read of it
        found.append([result, *torch.autograd.grad(result.square().sum(), (query, key, value))])
    for grouped, repeated in zip(*found, strict=True):
        torch.testing.assert_close(repeated, grouped)


def test_the_expected_kernel_is_tried_first_until_the_strategy_closes() -> None:
    order: Any = torch._C._get_sdp_priority_order
    before = order()
    with settle_order("cudnn"):
        assert order()[0] == SDPBackend.CUDNN_ATTENTION.value
        assert torch.backends.cuda.flash_sdp_enabled()
    assert order() == before
    for expected in (None, "flex", "ring", "efficient"):
        with settle_order(expected):
            assert order() == before


def test_a_slower_kernel_is_warned_of_by_name(tmp_path: Path) -> None:
    context = WorkerContext.read(job_environment(job_file(train_task(), tmp_path / "run", 1)))
    report_attention(context, AttentionChosen("flash", "cudnn", ["cuDNN attention has been runtime disabled."]))
    report_attention(context, None)
    context.close()
    (event,) = events(tmp_path / "run", "attention_chosen")
    assert event["expected"] == "cudnn"
    (notice,) = events(tmp_path / "run", "notice")
    assert notice["level"] == "warning"
    assert "computed by flash, not by cudnn" in notice["message"]
    assert "runtime disabled" in notice["message"]
