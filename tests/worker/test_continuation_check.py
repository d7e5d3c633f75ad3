"""The message about the checkpoint interval, and where a proof of resume breaks."""

from __future__ import annotations

from sm_llm.worker.runtime.fault_injection import fault_step
from sm_llm.worker.training.checkpoint_interval import interval_message


def test_CK19_saving_less_often_than_the_run_is_long_is_warned_of_with_a_number_from_the_step_time() -> None:
    text, warns = interval_message(50, 6, 1000.0)
    assert warns
    assert text == (
        "no checkpoint before the end of 6 steps (about 1.7 h); task.checkpoint.every_steps=2 saves about every 33 min"
    )
    assert interval_message(50, 6, 0.1)[1], "short or not: that is not what was meant"
    assert interval_message(10, 100, 2.0) == ("a checkpoint every 10 steps, about every 20 s", False)
    text, warns = interval_message(1000, 100_000, 30.0)
    assert warns
    assert "about every 8.3 h: an interruption costs up to that; task.checkpoint.every_steps=60" in text


def test_the_nth_attempt_breaks_before_the_nth_step() -> None:
    environ = {"SM_LLM_BREAK_BEFORE_STEPS": "5,9"}
    assert [fault_step(attempt, environ) for attempt in (1, 2, 3)] == [5, 9, None]
    assert fault_step(1, {}) is None
