"""How long a recovery took, split as far as it is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.events import AttemptStarted, EventWriter, Notice, Step, last_events, read_events
from sm_llm.runs.events.failures import Recovered, Stopped
from sm_llm.runs.events.run_metrics import summarise
from sm_llm.worker.checkpoint.recovery import Recovery

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STARTED = AttemptStarted(2, "cpu", 100, {})
STEP = Step(1, 2.0, 1.0, 1e-3, 10)


def recovered(folder: Path, *earlier: Any, environ: Mapping[str, str] = {}) -> Recovered | None:
    """What is reported by a worker that begins at 1040, whose earlier start wrote its last event at 1000."""
    path = folder / "attempt-1-rank0.jsonl"
    log = EventWriter(path, 1, clock=lambda: 1000.0)
    for event in earlier:
        log.write(event)
    log.close()
    emitted: list[Any] = []
    context: Any = SimpleNamespace(began=1040.0, earlier_events=last_events(path), emit=emitted.append)
    times = iter([1041.0, 1045.0, 1048.0, 1050.0, 1052.0, 1055.0])
    timer = Recovery(context, environ, clock=lambda: next(times))
    with timer.restoring():  # 3 s
        pass
    with timer.restoring():  # 2 s
        pass
    timer.stepped(8)
    timer.stepped(9)
    assert len(emitted) <= 1
    return emitted[0] if emitted else None


def test_all_parts_are_known_where_the_scheduler_states_its_times(tmp_path: Path) -> None:
    environ = {"SM_LLM_QUEUED_AT": "1020", "SM_LLM_BEGAN_AT": "1035"}
    found = recovered(tmp_path, STARTED, STEP, environ=environ)
    assert found == Recovered(
        8, seconds=55.0, down_seconds=35.0, detection_seconds=20.0, requeue_seconds=15.0, start_seconds=12.0,
        restore_seconds=5.0, first_step_seconds=3.0,
    )  # fmt: skip
    assert event_line({"kind": "recovered", **vars(found)}) == (
        "recovered: step 8 done 55.0 s after the last sign of life "
        "(detection 20.0 s, requeue 15.0 s, start 12.0 s, restore 5.0 s, first step 3.0 s)"
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SM_LLM_QUEUED_AT": "", "SM_LLM_BEGAN_AT": ""},
        {"SM_LLM_QUEUED_AT": "990", "SM_LLM_BEGAN_AT": "1035"},  # clocks that differ
        {"SM_LLM_QUEUED_AT": "1020", "SM_LLM_BEGAN_AT": "1041"},
        {"SM_LLM_QUEUED_AT": "nan", "SM_LLM_BEGAN_AT": "nan"},
    ],
)
def test_what_the_scheduler_does_not_state_is_not_invented(tmp_path: Path, environ: dict[str, str]) -> None:
    found = recovered(tmp_path, STARTED, STEP, environ=environ)
    assert found is not None
    assert (found.detection_seconds, found.requeue_seconds) == (None, None)
    assert (found.down_seconds, found.start_seconds, found.seconds) == (40.0, 7.0, 55.0)
    assert "(down 40.0 s, start 7.0 s" in str(event_line({"kind": "recovered", **vars(found)}))


def test_a_first_start_and_one_after_a_stop_in_order_recover_from_nothing(tmp_path: Path) -> None:
    assert recovered(tmp_path) is None
    assert recovered(tmp_path, STARTED, STEP, Stopped(3, "the time limit", 3), Notice("closing")) is None
    assert recovered(tmp_path, STARTED, STEP) is not None, "the start before that one was broken off"


def test_the_status_shows_the_newest_recovery(tmp_path: Path) -> None:
    log = EventWriter(tmp_path / "attempt-1-rank0.jsonl", 1)
    for seconds in (90.0, 60.0):
        log.write(Recovered(4, seconds, 30.0, None, None, 5.0, 3.0, 2.0))
    log.close()
    assert "60.0 s after the last sign of life" in str(summarise(read_events(tmp_path)).recovery)


def test_the_end_of_a_log_is_read_from_any_byte_on(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1-rank0.jsonl"
    log = EventWriter(path, 1)
    for number in range(2_000):
        log.write(Notice(f"notice {number}"))
    log.close()
    found = last_events(path)
    assert found[-1]["message"] == "notice 1999"
    assert 100 < len(found) < 2_000
