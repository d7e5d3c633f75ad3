"""What only a GPU shows: compilation, utilisation, exact resume, flags read late. (Other tests here use GPUs, too.)"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from resume_configurations import poison
from worker_jobs import events, exact_steps, job_environment, job_file, losses, train_task

from sm_llm.worker.device import LAG_STEPS, gpu_or_cpu
from sm_llm.worker.main import main
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.tasks import train
from sm_llm.worker.training.nonfinite_policy import NonFiniteWatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def deterministic_only_where_asked() -> Iterator[None]:
    """The worker asks torch for determinism, which holds for the whole process."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(False)


def test_compiled_layers_learn_the_same(tmp_path: Path) -> None:
    for name, compiled in (("eager", False), ("compiled", True)):
        task = train_task(precision={"compute": "bf16", "compile": compiled}, deterministic=False)
        assert main("train", job_environment(job_file(task, tmp_path / name, 1))) == 0
    eager, compiled_losses = losses(tmp_path / "eager"), losses(tmp_path / "compiled")
    assert max(abs(eager[step] - compiled_losses[step]) for step in eager) < 2e-2
    window = events(tmp_path / "eager", "throughput")[-1]
    assert window["device_memory_bytes"] > 0
    assert 0 < window["mfu"] < 1


def test_compiled_layers_have_the_kernel_of_attention_that_is_reported(tmp_path: Path) -> None:
    """By the names of the kernels that ran; compiled graphs keep what they were traced with."""
    from torch.profiler import ProfilerActivity, profile

    task = train_task(precision={"compute": "bf16", "compile": True}, deterministic=False)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        assert main("train", job_environment(job_file(task, tmp_path / "run", 1))) == 0
    (event,) = events(tmp_path / "run", "attention_chosen")
    assert event["attention"] == event["expected"], event["reasons"]
    names = {it.key.lower() for it in found.key_averages()}
    assert any(("cudnn" if event["attention"] == "cudnn" else "flash") in it for it in names)


def run(folder: Path, task: dict[str, Any], attempt: int = 1) -> int:
    return main("train", job_environment(job_file(task, folder, 1, attempt)))


def break_and_continue(folder: Path, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise before step 8, with the checkpoint of step 6 published, and continue."""
    original = train.Trainer.take_step

    def take_step(training: train.Trainer, step: int, batches: Any) -> None:
        if step == 8:
            training.checkpointer.finish()
            raise RuntimeError("broken on purpose")
        original(training, step, batches)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "take_step", take_step)
        assert run(folder, task) == 1
    assert run(folder, task, attempt=2) == 0
    assert [event["step"] for event in events(folder, "start_chosen")] == [0, 6]


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_deterministic_job_resumes_bit_for_bit(compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = train_task(precision={"compute": compute}, deterministic=True, checkpoint={"verify_state": True})
    assert run(tmp_path / "whole", task) == 0
    (event,) = events(tmp_path / "whole", "attention_chosen")
    if compute == "fp32":
        assert event["attention"] == event["expected"] == "efficient", "grouped heads are repeated for it"
    elif event["expected"] == "cudnn":
        assert any("deterministic" in it for it in event["reasons"]), event
    break_and_continue(tmp_path / "broken", task, monkeypatch)
    assert exact_steps(tmp_path / "broken") == exact_steps(tmp_path / "whole")
    assert [event["step"] for event in events(tmp_path / "broken", "state_verified")] == [6]


def test_without_determinism_the_restored_state_is_bit_identical_and_losses_agree_as_unbroken_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = train_task(precision={"compute": "bf16"}, deterministic=False, checkpoint={"verify_state": True})
    for name in ("whole", "again"):
        assert run(tmp_path / name, task) == 0
    break_and_continue(tmp_path / "broken", task, monkeypatch)
    assert [event["step"] for event in events(tmp_path / "broken", "state_verified")] == [6]
    whole, again, broken = (losses(tmp_path / name) for name in ("whole", "again", "broken"))
    usual = max(abs(whole[step] - again[step]) for step in whole)
    assert max(abs(whole[step] - broken[step]) for step in whole) <= max(4 * usual, 1e-3)


def test_a_gradient_that_is_not_finite_is_masked_on_the_device_and_reported(tmp_path: Path) -> None:
    with poison({5: "gradient"}):
        assert run(tmp_path / "stop", train_task(precision={"compute": "bf16"})) == 1
    assert run(tmp_path / "stop", train_task(precision={"compute": "bf16"}), attempt=2) == 0
    assert [event["step"] for event in events(tmp_path / "stop", "start_chosen")] == [0, 3]
    skip = train_task(precision={"compute": "bf16"}, not_finite={"policy": "skip"})
    with poison({5: "loss", 8: "gradient"}):
        assert run(tmp_path / "skip", skip) == 0
    assert {step for step, loss in losses(tmp_path / "skip").items() if not math.isfinite(loss)} == {5}


def test_flags_are_read_late_and_nothing_waits_for_the_device() -> None:
    device = torch.device("cuda")
    watch = NonFiniteWatch(gpu_or_cpu(ProcessInfo()))
    flags = [torch.full((), float(step == 3), device=device) for step in range(1, 20)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(4_000_000_000)  # about two seconds of work that the host must not wait for
        worked = torch.cuda.Event()
        worked.record()
        for step in range(1, LAG_STEPS + 1):
            watch.note(step, flags[step - 1])
            assert watch.bad_steps(settle=False) == []
        assert not worked.query(), "the device is still at work: nothing has waited for it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.bad_steps(settle=True) == [3]


def test_a_step_makes_no_host_synchronisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself raises where an operation of the loop would wait for the device."""
    original = train.Trainer.take_step

    def take_step(training: train.Trainer, step: int, batches: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            original(training, step, batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(train.Trainer, "take_step", take_step)
    late = {"every_steps": 1000}  # the thread that writes a checkpoint waits for the device, as it should
    task = train_task(precision={"compute": "bf16"}, deterministic=False, checkpoint=late)
    assert run(tmp_path / "run", task) == 0
