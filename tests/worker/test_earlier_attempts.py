"""What earlier attempts reported contradicts a storage that shows none of their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.runs.events.checkpoints import CheckpointPublished
from sm_llm.runs.events.events import EventWriter, StartChosen
from sm_llm.runs.run_record import Attempt, AttemptStart, RunRecord
from sm_llm.runs.run_store import FolderRunStore
from sm_llm.worker.checkpoint.earlier_attempts import published_before

if TYPE_CHECKING:
    from pathlib import Path

SPEC = {"backend": {"name": "local"}, "task": {"kind": "train"}}


def record(*starts: AttemptStart | None) -> RunRecord:
    attempts = tuple(
        Attempt(number=number, native_id="1", started=1.0, start=start) for number, start in enumerate(starts, 1)
    )
    facts: dict[str, Any] = {"spec": SPEC, "spec_digest": "d", "attempts": attempts}
    return RunRecord(run_id="job-1", name="job", created=1.0, **facts)


def test_a_run_that_never_published_may_begin(tmp_path: Path) -> None:
    run_store = FolderRunStore(tmp_path)
    assert published_before(run_store) is None
    run_store.create(record(AttemptStart(source="scratch", step=0), None))
    writer = EventWriter(run_store.paths.event_file(1, "rank0"), 1)
    writer.write(StartChosen("scratch", 0))
    assert published_before(run_store) is None


def test_I7_events_of_an_earlier_attempt_are_believed(tmp_path: Path) -> None:
    run_store = FolderRunStore(tmp_path)
    for attempt, step in ((1, 40), (2, 60)):
        writer = EventWriter(run_store.paths.event_file(attempt, "rank0"), attempt)
        writer.write(CheckpointPublished(step, "uri", 1, 1.0, 0.0))
    run_store.paths.event_file(3, "rank0").write_text(
        '{"kind": "checkpoint_published", "step": "x"}\n{"checkpoint_published"'
    )
    assert published_before(run_store) == 60


def test_I7_the_record_of_an_attempt_that_continued_is_believed(tmp_path: Path) -> None:
    run_store = FolderRunStore(tmp_path)
    run_store.create(record(None, AttemptStart(source="checkpoint", step=20)))
    assert published_before(run_store) == 20
