"""Late publication of checkpoints is reported by status, logs and lists of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.runs.events.checkpoints import CheckpointPublished, PublicationLate
from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.events import EventWriter, read_events
from sm_llm.runs.events.run_metrics import summarise

if TYPE_CHECKING:
    from pathlib import Path


def test_CK01_the_status_reports_the_last_published_step_and_its_age_until_one_is_published(tmp_path: Path) -> None:
    log = EventWriter(tmp_path / "attempt-1-rank0.jsonl", 1)
    log.write(PublicationLate(1200, 3725.0, 1500, 2, "SlowDown"))
    alarm = summarise(read_events(tmp_path)).alarm
    assert alarm == "alarm: the last published step is 1200, 3,725 s ago: SlowDown"
    log.write(CheckpointPublished(1500, "s3://b/x", 10, 4.0, 0.1, 2))
    log.close()
    events = list(read_events(tmp_path))
    assert summarise(events).alarm is None
    assert (event_line(events[-1]) or "").endswith(", 2 older saves left out")
