"""What may change between a checkpoint and its continuation, and what is said about how often one comes."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import CheckpointError
from sm_llm.worker.break_down import break_step
from sm_llm.worker.cadence import cadence
from sm_llm.worker.continuity import check_continuation, differences

NOW: dict[str, Any] = {
    "total_steps": 100,
    "schedule_steps": 100,
    "warmup_steps": 5,
    "schedule": "cosine",
    "learning_rate": 1e-3,
    "global_batch_size": 8,
    "seq_length": 32,
    "rows": 96,
    "seed": 0,
}


def refusal(stated: bool = False, **before: Any) -> str:
    try:
        check_continuation({**NOW, **before}, NOW, 40, schedule_is_stated=stated)
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_same_job_goes_on() -> None:
    assert refusal() == ""
    assert refusal(learning_rate=2e-3) == "", "whoever changes the rate itself means it"
    assert differences({**NOW, "learning_rate": 2e-3}, NOW) == ["learning_rate: 0.002 -> 0.001"]


def test_a_schedule_of_another_length_must_be_stated() -> None:
    told = refusal(total_steps=50, schedule_steps=50)
    assert "the cosine schedule spanned 50 steps and would now span 100" in told
    assert "task.optim.schedule_steps: 50 keeps its course after step 40, 100 is the new one" in told
    assert refusal(stated=True, total_steps=50, schedule_steps=50) == ""


@pytest.mark.parametrize(("warmup", "refused"), [(5, False), (3, True)])
def test_a_constant_rate_has_no_length_but_its_warm_up_may(warmup: int, refused: bool) -> None:
    now = {**NOW, "schedule": "constant"}
    before = {**now, "schedule_steps": 60, "warmup_steps": warmup}
    if refused:
        with pytest.raises(CheckpointError, match="schedule_steps"):
            check_continuation(before, now, 40, schedule_is_stated=False)
    else:
        check_continuation(before, now, 40, schedule_is_stated=False)


def test_another_order_of_data_is_refused_with_all_reasons_at_once() -> None:
    told = refusal(stated=True, global_batch_size=4, seed=7, rows=100)
    for words in ("global_batch_size was 4", "seed was 7", "training rows was 100", "Set it to 4", "sm-llm branch"):
        assert words in told


def test_checkpoints_that_know_less_are_compared_in_what_they_know() -> None:
    check_continuation({"total_steps": 100}, NOW, 40, schedule_is_stated=False)


def test_CK19_saving_less_often_than_the_run_is_long_is_warned_of_with_a_number_from_the_step_time() -> None:
    text, warns = cadence(50, 6, 1000.0)
    assert warns
    assert text == (
        "no checkpoint before the end of 6 steps (about 1.7 h); task.checkpoint.every_steps=2 saves about every 33 min"
    )
    assert cadence(50, 6, 0.1)[1], "short or not: that is not what was meant"
    assert cadence(10, 100, 2.0) == ("a checkpoint every 10 steps, about every 20 s", False)
    text, warns = cadence(1000, 100_000, 30.0)
    assert warns
    assert "about every 8.3 h: an interruption costs up to that; task.checkpoint.every_steps=60" in text


def test_the_nth_attempt_breaks_before_the_nth_step() -> None:
    environ = {"SM_LLM_BREAK_BEFORE_STEPS": "5,9"}
    assert [break_step(attempt, environ) for attempt in (1, 2, 3)] == [5, 9, None]
    assert break_step(1, {}) is None
