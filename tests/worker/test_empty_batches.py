"""Rows without labels to learn from: the step is refused or skipped by name, and everything beside it is right."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from worker_jobs import events, job_environment, job_file, losses, train_task

from sm_llm.errors import DataError
from sm_llm.spec.parallelism.base import Layout
from sm_llm.spec.training import NotFiniteSpec
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.main import main
from sm_llm.worker.training.batch_transfer import loss_share
from sm_llm.worker.training.nonfinite_policy import NO_TARGETS, NonFinitePolicy, NonFiniteWatch, flag_of

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 32


def write_rows(folder: Path, masked: set[int], count: int = 16) -> Path:
    """Rows of 32 tokens; those ``masked`` hold padding only."""
    folder.mkdir()
    lines = []
    for number in range(count):
        ids = [(7 * number + location) % 250 + 1 for location in range(LENGTH)]
        lines.append({"input_ids": ids, "attention_mask": [int(number not in masked)] * LENGTH})
    (folder / "rows.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def train(run: Path, rows: Path, attempt: int = 1, **changes: Any) -> int:
    """Three steps of four rows, in order, on one process."""
    data = {"format": "json_rows", "train": str(rows), "seq_length": LENGTH, "shuffle": False}
    fields = {
        "data": data,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "max_steps": 3,
        "logging": {"every_steps": 1},
        "optim": {"warmup_steps": 1},
    }
    task = train_task(checkpoint={"every_steps": 1}, validation={}, **{**fields, **changes})
    return main("train", job_environment(job_file(task, run, 1, attempt)))


def reason(run: Path) -> str:
    return str(events(run, "failed")[-1]["message"])


def test_F6_a_global_batch_without_labels_is_refused_by_its_rows(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", {4, 5, 6, 7})
    assert train(tmp_path / "run", rows) == 1
    reported = reason(tmp_path / "run")
    assert "step 2: the global batch has no label to learn from" in reported
    assert f"({rows}/rows.json:5,6,7,8)" in reported
    assert f"sm-llm resume {tmp_path / 'run'} task.not_finite.policy=skip" in reported
    assert "Changed rows need a new run (fit --new)" in reported
    assert "and resume" not in reported, "rows that are left out change the data, which no resume accepts"
    assert "Traceback" not in reported
    # The way out that the message names works, from the checkpoint of step 1.
    assert train(tmp_path / "run", rows, attempt=2, not_finite={"policy": "skip"}) == 0
    assert events(tmp_path / "run", "start_chosen")[-1]["step"] == 1


def test_F6_without_a_checkpoint_the_way_out_begins_anew(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", {0, 1, 2, 3})
    assert train(tmp_path / "run", rows) == 1
    assert f"Skip them: sm-llm rerun {tmp_path / 'run'} task.not_finite.policy=skip." in reason(tmp_path / "run")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_F6_such_a_batch_is_skipped_by_policy_and_counted(policy: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", {4, 5, 6, 7})
    assert train(tmp_path / "run", rows, not_finite={"policy": policy}) == 0
    found = losses(tmp_path / "run")
    assert math.isnan(found[2])
    assert math.isfinite(found[3])
    notices = [it["message"] for it in events(tmp_path / "run", "notice")]
    assert "step 2: the global batch has no label to learn from; skipped, 1 so far" in notices
    assert any("4 rows without a label to learn from" in it for it in notices)


def test_F6_an_empty_micro_batch_beside_others_changes_no_mean(tmp_path: Path) -> None:
    """Two micro-batches of two rows: the first of step 2 is padding, so its loss is that of the other alone."""
    both = write_rows(tmp_path / "both", {4, 5})
    assert train(tmp_path / "half-empty", both) == 0
    single = write_rows(tmp_path / "single", set())
    lines = (single / "rows.json").read_text().splitlines(keepends=True)
    # Every row twice: the mean over twice as many equal rows is the same mean.
    (single / "rows.json").write_text("".join([*lines[:4], *lines[6:8], *lines[6:8], *lines[8:]]))
    assert train(tmp_path / "doubled", single) == 0
    first, second = losses(tmp_path / "half-empty"), losses(tmp_path / "doubled")
    assert first[2] == pytest.approx(second[2], abs=1e-6)
    assert first[3] == pytest.approx(second[3], abs=1e-5)


def test_F6_data_without_any_label_fail_before_the_first_step(tmp_path: Path) -> None:
    everything = write_rows(tmp_path / "rows", set(range(16)))
    assert train(tmp_path / "run", everything) == 1
    assert "task.data.train: none of the 16 rows has a label to learn from" in reason(tmp_path / "run")
    sound = write_rows(tmp_path / "sound", set())
    data = {"format": "json_rows", "train": str(sound), "validation": str(everything), "seq_length": LENGTH}
    assert train(tmp_path / "other", sound, data=data) == 1
    assert "task.data.validation: none of the 16 rows" in reason(tmp_path / "other")
    assert not events(tmp_path / "other", "step")


@pytest.mark.parametrize("norm", [0.0, 1.5, math.inf, math.nan])
def test_the_flag_of_a_step_without_labels(norm: float) -> None:
    bad = 0.0 if math.isfinite(norm) else 1.0
    for none, some in ((0, 5), (torch.tensor(0.0, dtype=torch.float64), torch.tensor(5.0, dtype=torch.float64))):
        assert flag_of(torch.tensor(norm), none).item() == NO_TARGETS
        assert flag_of(torch.tensor(norm), some).item() == bad
        assert flag_of(torch.tensor(norm), none).dtype == torch.float32
    layout = Layout(shard=2)
    for none in (0, torch.tensor(0.0, dtype=torch.float64)):
        assert math.isfinite(float(loss_share(layout, none)))


def test_the_watch_keeps_them_apart() -> None:
    watch = NonFiniteWatch(CpuDevice())
    for step, flag in ((1, NO_TARGETS), (2, 1.0), (3, 0.0)):
        watch.note(step, torch.tensor(flag))
    assert watch.bad_steps(settle=True) == [2]
    assert watch.without_targets() == [1]
    assert watch.without_targets() == []


def test_skipping_such_steps_has_the_policys_limit() -> None:
    nonfinite = NonFinitePolicy(NotFiniteSpec(policy="skip", limit=3))
    nonfinite.judge_empty([3, 4])
    nonfinite.judge_empty([6])
    assert nonfinite.message.endswith("skipped, 3 so far")
    nonfinite.judge_empty([7])
    with pytest.raises(DataError, match="3 in a row"):
        nonfinite.judge_empty([8])


def test_only_steps_that_follow_one_another_are_in_a_row() -> None:
    nonfinite = NonFinitePolicy(NotFiniteSpec(policy="skip", limit=3))
    nonfinite.judge_empty([3, 7, 11])
    nonfinite.judge_empty([12, 14])
    assert nonfinite.message.endswith("skipped, 5 so far")
    with pytest.raises(DataError, match="3 in a row"):
        nonfinite.judge_empty([15, 16, 18])
