"""Settings that are ``auto``: chosen once, kept for later attempts and for runs that continue this one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.data.describe import RowsInfo
from sm_llm.errors import RunFailed, StorageError
from sm_llm.models.config import model_config
from sm_llm.spec.machines.hardware import Card
from sm_llm.spec.tasks import TrainTask
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.training import automatic

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = model_config(preset="llama-3.2-1b", path=None, pretrained=None, overrides={})
OPEN = {
    "data": {"format": "synthetic", "seq_length": 4096, "rows": 1000},
    "model": {"preset": "llama-3.2-1b", "config": {}},
    "max_steps": 100_000,
    "precision": {"compute": "bf16"},
    "micro_batch_size": "auto",
    "global_batch_size": 8,
    "start": "auto",
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What the process's GPU is; a machine with a compiler."""
    card = Mock(return_value=Card("NVIDIA H200", 139.8))
    monkeypatch.setattr(automatic, "_card", card)
    monkeypatch.setattr(automatic, "_no_compiler", lambda: None)
    return card


def decide(run: Path, attempt: int = 1, **fields: Any) -> tuple[TrainTask, list[dict[str, Any]]]:
    """The task with its choices, and the events of them so far."""
    task = {**train_task(), **OPEN, **fields}
    job = job_file(task, run, 1, attempt)
    context = WorkerContext.read(job_environment(job))
    found = automatic.with_choices(context, TrainTask.model_validate(task, strict=False), CONFIG, CpuDevice())
    context.close()
    return found, events(run, "settings_chosen")


def test_a_choice_is_recorded_and_printed_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, [event] = decide(tmp_path / "run")
    assert found.micro_batch_size == 8
    assert found.precision.compile is True
    assert event["values"]["micro_batch_size"] == 8
    assert event["is_kept"] is False
    assert 0 < event["predicted_bytes"] < 139.8 * 2**30
    assert f"micro_batch_size 8, parallelism.activation_checkpointing none, {''}" in capsys.readouterr().out
    assert "predicted to fit" in event["reason"]


def test_a_later_attempt_keeps_it_whatever_would_be_chosen_by_then(
    tmp_path: Path, gpu: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = decide(tmp_path / "run")
    monkeypatch.setattr(automatic, "choose", Mock(side_effect=AssertionError("chosen again")))
    again, found = decide(tmp_path / "run", attempt=2)
    assert again == first
    assert again.precision.compile is True
    assert [it["is_kept"] for it in found] == [False, True]
    # On another GPU it is another choice, and that one is kept for it.
    monkeypatch.undo()
    monkeypatch.setattr(automatic, "_card", Mock(return_value=Card("NVIDIA A10G", 22.0)))
    monkeypatch.setattr(automatic, "_no_compiler", lambda: "there is none")
    other, _ = decide(tmp_path / "run", attempt=3)
    assert other.parallelism.model_dump()["activation_checkpointing"] == "full"
    assert other.precision.compile is False
    assert len(list((tmp_path / "run" / "settings").iterdir())) == 2


def test_the_first_processs_choice_is_everybodys(tmp_path: Path) -> None:
    decide(tmp_path / "run")
    [kept] = (tmp_path / "run" / "settings").iterdir()
    choice = json.loads(kept.read_text())
    choice["values"]["micro_batch_size"] = 2
    kept.write_text(json.dumps(choice))
    assert decide(tmp_path / "run")[0].micro_batch_size == 2


def test_a_run_that_continues_another_takes_its_choice(tmp_path: Path) -> None:
    decide(tmp_path / "run")
    [kept] = (tmp_path / "run" / "settings").iterdir()
    choice = json.loads(kept.read_text())
    choice["values"]["micro_batch_size"] = 4
    kept.write_text(json.dumps(choice))
    branch, [event] = decide(tmp_path / "branch", start={"checkpoint": f"{tmp_path / 'run'}@3"})
    assert branch.micro_batch_size == 4
    assert event["is_kept"] is True
    # Of other batches and lengths nothing was chosen.
    own, [event] = decide(tmp_path / "long", start={"checkpoint": f"{tmp_path / 'run'}@3"}, global_batch_size=2)
    assert own.micro_batch_size == 2
    assert event["is_kept"] is False
    # A run that leaves open what the other had fixed needs a choice of its own.
    fixed = {"micro_batch_size": 1, "precision": {"compute": "bf16", "compile": False}}
    decide(tmp_path / "fixed", **fixed)
    own, [event] = decide(tmp_path / "own", start={"checkpoint": f"{tmp_path / 'fixed'}@3"})
    assert own.micro_batch_size == 8
    assert event["is_kept"] is False


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": {"compute": "bf16", "compile": False}},
        {"parallelism": {"activation_checkpointing": "none"}},
        {"parallelism": {"offload_activations": True}},
        {"micro_batch_size": 4},
        {"global_batch_size": 4},
        {"data": {"format": "synthetic", "seq_length": 8192, "rows": 1000}},
    ],
)
def test_a_later_attempt_with_other_settings_has_a_choice_of_its_own(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also the way back, where what was fixed is left open again."""
    decide(tmp_path / "run", **changes)
    back, found = decide(tmp_path / "run", attempt=2)
    assert found[-1]["is_kept"] is False
    assert back == decide(tmp_path / "new")[0]
    again, found = decide(tmp_path / "run", attempt=3, **changes)
    assert found[-1]["is_kept"] is True
    for path, value in flat(changes):
        assert path not in found[-1]["values"], value
    # What decides nothing changes nothing.
    free = {"max_steps": 200_000, "checkpoint": {"every_steps": 7}}
    assert decide(tmp_path / "run", attempt=4, **free, **changes)[1][-1]["is_kept"] is True
    assert again.micro_batch_size in (4, 8, 2)


def flat(changes: dict[str, Any]) -> list[tuple[str, Any]]:
    nested = [
        (f"{name}.{key}", it) for name, part in changes.items() if isinstance(part, dict) for key, it in part.items()
    ]
    return nested + [(name, it) for name, it in changes.items() if not isinstance(it, dict)]


def test_the_length_in_rows_decides_whether_layers_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the plan, which reads the number of rows as well."""
    monkeypatch.setattr(automatic, "describe_rows", lambda _: RowsInfo(4096, 64, ("input_ids",)))
    rows = {"data": {"format": "rows", "train": str(tmp_path), "seq_length": 4096}, "max_steps": None}
    short, _ = decide(tmp_path / "short", **rows, max_epochs=1)
    assert short.precision.compile is False
    long, _ = decide(tmp_path / "long", **rows, max_epochs=10_000)
    assert long.precision.compile is True


def test_layers_are_not_compiled_where_a_later_attempt_finds_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decide(tmp_path / "run")[0].precision.compile is True
    monkeypatch.setattr(automatic, "_no_compiler", lambda: "there is no C compiler, which Triton needs")
    found, seen = decide(tmp_path / "run", attempt=2)
    assert found.precision.compile is False
    assert "no C compiler" in seen[-1]["reason"]


def test_a_budget_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "_no_compiler", lambda: "there is no C compiler, which Triton needs")
    budget = {"parallelism": {"activation_checkpointing": "budget"}}
    with pytest.raises(RunFailed, match=r"activation_checkpointing: the budget is .* no C compiler.* Use selective"):
        decide(tmp_path / "run", **budget)
    assert decide(tmp_path / "run")[0].precision.compile is False


def test_a_damaged_choice_is_named(tmp_path: Path) -> None:
    decide(tmp_path / "run")
    [kept] = (tmp_path / "run" / "settings").iterdir()
    kept.write_text("{}")
    with pytest.raises(StorageError, match=r"settings/nvidia-h200-.*is not a choice of settings.*Delete it"):
        decide(tmp_path / "run", attempt=2)


def test_on_a_cpu_nothing_is_kept_and_the_batch_is_what_it_was(tmp_path: Path, gpu: Mock) -> None:
    gpu.return_value = None
    found, [event] = decide(tmp_path / "run")
    assert (found.micro_batch_size, found.precision.compile) == (1, False)
    assert event["predicted_bytes"] is None
    assert not (tmp_path / "run" / "settings").exists()


@pytest.mark.parametrize(("steps", "asked"), [(3, "storage"), (3, "auto"), (100_000, "storage")])
def test_graphs_that_nothing_compiles_are_warned_of(steps: int, asked: str, tmp_path: Path) -> None:
    """A plan may not know the GPU, nor that a training on it is too short."""
    run = tmp_path / "run"
    found, _ = decide(run, max_steps=steps, precision={"compute": "bf16", "compiled_graphs": asked})
    assert found.precision.compile is (steps > 3)
    warned = [it["message"] for it in events(run, "notice") if it["level"] == "warning"]
    expected = steps == 3 and asked == "storage"
    assert any("task.precision.compiled_graphs: storage has no effect: no layers" in it for it in warned) is expected


def test_processes_on_different_gpus_are_refused() -> None:
    automatic.assert_equal([{"micro_batch_size": 1}] * 2)
    with pytest.raises(RunFailed, match=r"different GPUs.*task\.micro_batch_size"):
        automatic.assert_equal([{"micro_batch_size": 1}, {"micro_batch_size": 2}])
