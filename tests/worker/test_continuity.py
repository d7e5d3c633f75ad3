"""What is said about how often a checkpoint comes, and where a proof of resume breaks."""

from __future__ import annotations

from sm_llm.worker.runtime.break_down import break_step
from sm_llm.worker.training.cadence import cadence


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
