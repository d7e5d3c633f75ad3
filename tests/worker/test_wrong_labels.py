"""Labels outside the vocabulary end a training by file and row; a validation loss that is not finite is warned of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import pytest
from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.launcher.display import summary
from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.events import Validation
from sm_llm.worker import validate
from sm_llm.worker.main import main
from sm_llm.worker.tasks.train import GraphExtraction, Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.observe.status import Status

LENGTH = 32


def save_rows(folder: Path, wrong: int | None = None) -> Path:
    """Eight rows whose first half is not trained on; one label of row 5 is ``wrong``."""
    import datasets

    ids = [[(7 * row + position) % 250 + 1 for position in range(LENGTH)] for row in range(8)]
    labels = [[-100] * (LENGTH // 2) + row[LENGTH // 2 :] for row in ids]
    if wrong is not None:
        labels[5][20] = wrong
    datasets.Dataset.from_dict({"input_ids": ids, "labels": labels}).save_to_disk(folder)
    return folder


def train(run: Path, rows: Path, validation: Path | None = None, **changes: Any) -> int:
    """Two steps of four rows, in order, on one process."""
    data: dict[str, Any] = {"format": "rows", "train": str(rows), "seq_length": LENGTH, "shuffle": False}
    if validation is not None:
        data["validation"] = str(validation)
    fields: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4, "max_steps": 2}
    task = train_task(data=data, checkpoint={"every_steps": 1}, optim={"warmup_steps": 1}, **fields, **changes)
    return main("train", job_environment(job_file(task, run, 1)))


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("wrong", [999, -1])
def test_no_step_learns_from_a_label_outside_the_vocabulary(wrong: int, policy: str, tmp_path: Path) -> None:
    rows = save_rows(tmp_path / "rows", wrong)
    assert train(tmp_path / "run", rows, not_finite={"policy": policy}) == 1
    reported = str(events(tmp_path / "run", "failed")[-1]["message"])
    assert f"{rows}/data-00000-of-00001.arrow: row 5 holds label {wrong} at position 20 of column labels" in reported
    assert "it must be 0 to 255" in reported
    assert "learning rate" not in reported
    assert "Traceback" not in reported
    assert all(math.isfinite(it["loss"]) for it in events(tmp_path / "run", "step"))


def test_a_validation_names_such_a_label_too(tmp_path: Path) -> None:
    rows, held_out = save_rows(tmp_path / "rows"), save_rows(tmp_path / "held-out", -1)
    assert train(tmp_path / "run", rows, held_out) == 1
    reported = str(events(tmp_path / "run", "failed")[-1]["message"])
    assert f"{held_out}/data-00000-of-00001.arrow: row 5 holds label -1 at position 20 of column labels" in reported
    assert not events(tmp_path / "run", "validation")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_is_warned_of(
    loss: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = save_rows(tmp_path / "rows")
    monkeypatch.setattr(
        "sm_llm.worker.tasks.train.validate", lambda *_, step, **__: Validation(step, loss, loss, LENGTH)
    )
    assert train(tmp_path / "run", rows, rows) == 0
    found = [it["message"] for it in events(tmp_path / "run", "notice") if "validation loss" in it["message"]]
    assert found == [validate.not_finite_warning(Validation(2, loss, loss, LENGTH))]
    assert f"step 2: the validation loss must be finite, got {loss}" in found[0]
    assert "task.not_finite" in found[0]
    [event] = events(tmp_path / "run", "validation")
    assert event_line(event) == f"step 2: validation loss {loss}, perplexity {loss}"


def test_a_finite_one_and_one_that_nothing_computes_are_not() -> None:
    assert validate.not_finite_warning(Validation(1, 9.0, math.inf, 1)) is None
    assert (Trainer.computes, GraphExtraction.computes) == (True, False)


def test_the_summary_points_to_the_warning() -> None:
    def reached(loss: float) -> str:
        values = type("Values", (), {"loss": 2.0, "validation_loss": loss})
        return summary._reached(cast("Status", type("Status", (), {"progress": values})))

    assert reached(math.nan) == " at loss 2.0000, validation loss nan (not finite: see the warnings in its logs)"
    assert reached(2.5) == " at loss 2.0000, validation loss 2.5000"
