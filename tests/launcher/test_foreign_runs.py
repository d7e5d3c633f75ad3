"""What somebody else put into a storage costs its own row or line: no verb ends by it, and no other run is lost."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from sm_llm import cli
from sm_llm.errors import SmLlmError
from sm_llm.launcher.attempt_outcome import failures_in_events
from sm_llm.launcher.display.tables import attempts_table, checkpoints_table, metrics_table, runs_table, status_table
from sm_llm.launcher.find_runs import ls
from sm_llm.launcher.run import Run
from sm_llm.runs.events import checkpoints, failures
from sm_llm.runs.events import events as module
from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.events import encode, read_events
from sm_llm.runs.events.run_metrics import to_json
from sm_llm.runs.run_record import Attempt, AttemptStart, RunRecord
from sm_llm.runs.run_states import RunState
from sm_llm.spec.loading.load import load
from tests.fixtures.foreign import alterations, altered
from tests.fixtures.sampling import number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPEC: dict[str, Any] = {
    "name": "fake",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 16, "rows": 64},
        "max_steps": 8,
    },
}
ACCOUNT = {
    "seq_length": 16,
    "tokenizer": {"vocab_size": 300},
    "documents": {"used": 3},
    "tokens_in": 90,
    "tokens_kept": 80,
    "splits": {"train": {"rows": 5, "documents": 3}},
}
EVENTS: list[module.Event] = [
    module.AttemptStarted(1, "cpu", 8, {"torch": "2"}),
    module.StartChosen("scratch", 0),
    module.TrackerOpened("mlflow", "id", "uri"),
    module.Notice("attention"),
    module.Step(1, 2.0, 1.0, 1e-4, 128),
    module.Throughput(1, 1.0, 1.0, 0.1, 1.0, 0.1, 5, 5),
    module.Validation(1, 2.0, 7.4, 4),
    module.Logged(1, {"accuracy": 0.5}),
    checkpoints.CheckpointPublished(1, "uri", 5, 1.0, 1.0),
    checkpoints.PublicationLate(1, 5.0, 2, 1, "the store does not answer"),
    module.Progress("restore", 1.0, 2.0),
    module.DataPrepared(ACCOUNT),
    module.Sample("prompt", "text"),
    failures.CheckpointRestored(1, 2.0, 5, 7),
    failures.Recovered(2, 60.0, 40.0, 25.0, 15.0, 10.0, 5.0, 5.0),
    failures.Stalled(1.0, 1.0, [1], [2], "detail"),
    failures.Failed("killed", "by signal 9", 0, 0, "host", 1, ""),
    failures.Stopped(1, "SIGTERM", None),
    module.StopRequested(True),
    checkpoints.NothingDone("was published", "uri"),
    module.AttemptEnded("failed", "why", 0),
]
LINES = [encode(event, attempt=1, at=1e9) for event in EVENTS]


def whole_record(name: str) -> dict[str, Any]:
    """A run.json as a launch writes it."""
    loaded = load(SPEC)
    plan = {"step": None, "settings": {"data": "synthetic"}, "facts": {"devices": "CPU"}, "warnings": ["slow"]}
    attempt = Attempt(
        number=1, native_id="1", host="elsewhere", started=1e9, ended=2e9, state=RunState.FAILED, reason="why",
        start=AttemptStart(source="scratch", step=0),
    )  # fmt: skip
    record = RunRecord(
        run_id=name, name="fake", created=1e9, spec=loaded.spec.model_dump(mode="json"), spec_digest="d",
        plan=[plan], host={"folder": "/nowhere"}, trackers={"mlflow": "id"}, changes={1: ("seed=1",)},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(record.with_attempt(attempt).to_text())
    return found


def write(root: Path, record: Any, lines: Sequence[str] = LINES, name: str = "evil") -> Path:
    """A run as it lies in a folder."""
    folder = root / name
    for inner in ("events", "logs/attempt-1"):
        (folder / inner).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "events" / "attempt-1-rank0.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events" / "attempt-1-rank0-failure.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "logs" / "attempt-1" / "node-0.log").write_text("a line\n")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A storage with one good run."""
    write(tmp_path / "runs", whole_record("good-1"), name="good-1")
    return tmp_path / "runs"


def verb(*argv: str | Path) -> str:
    """What a verb prints; its error, in words, if it has one. Any other exception fails the test."""
    done = CliRunner().invoke(cli.app, [str(it) for it in argv])
    if done.exception is not None and not isinstance(done.exception, SystemExit | SmLlmError):
        raise done.exception
    return done.output if done.exception is None else str(done.exception)


def read_all(folder: Path, root: Path) -> None:
    """All that reads a run; the good run keeps its row whatever lies beside it."""
    rows = ls(root)
    assert len(rows) == 2
    assert [it.state for it in rows if it.run_id == "good-1"] == [RunState.FAILED]
    show(runs_table(rows, 80))
    json.dumps([it.to_json() for it in rows])
    with contextlib.suppress(SmLlmError):
        run = Run(folder)
        for read in (_status, _metrics, _attempts, lambda run: show(checkpoints_table(run.checkpoints())), _logs):
            with contextlib.suppress(SmLlmError):
                read(run)
        list(failures_in_events(run.paths, 1))


def _status(run: Run) -> None:
    status = run.status()
    show(status_table(status))
    json.dumps(status.to_json())


def _metrics(run: Run) -> None:
    rows = run.metrics()
    show(metrics_table(rows))
    json.dumps([to_json(row) for row in rows])


def _attempts(run: Run) -> None:
    show(attempts_table(run))
    json.dumps([it.model_dump(mode="json") for it in run.attempts])


def _logs(run: Run) -> None:
    assert list(run.logs()) in ([], ["a line"])
    for event in read_events(run.events):
        event_line(event)


def show(table: Any) -> None:
    Console(file=io.StringIO(), width=80).print(table)


FUZZ = settings(max_examples=number(25, whole=250))


@FUZZ
@given(record=alterations(whole_record("evil")))
def test_s12_a_bad_record_costs_its_own_row(root: Path, record: Any) -> None:
    shutil.rmtree(root / "evil", ignore_errors=True)
    read_all(write(root, record), root)


@FUZZ
@given(number=st.integers(0, len(LINES) - 1), data=st.data())
def test_s12_a_bad_event_costs_its_own_line(root: Path, number: int, data: st.DataObject) -> None:
    shutil.rmtree(root / "evil", ignore_errors=True)
    line = json.dumps(data.draw(alterations(json.loads(LINES[number]))))
    folder = write(root, whole_record("evil"), [*LINES[:number], line, *LINES[number + 1 :]])
    read_all(folder, root)


def test_s12_an_event_without_one_of_its_fields_has_its_default_or_is_passed_over(root: Path) -> None:
    events = map(json.loads, LINES)
    lines = [json.dumps({key: it for key, it in event.items() if key != name}) for event in events for name in event]
    read_all(write(root, whole_record("evil"), [*LINES, *lines]), root)


@pytest.mark.parametrize(
    ("location", "value", "reason"),
    [
        (("version",), True, "record version True is not known"),
        (("created",), 1e300, "created: Input should be less than"),
        (("created",), "1", "created: Input should be a valid number"),
        (("run_id",), "../x", "'../x' cannot be a name"),
        (("run_id",), "a\x1b[2J", "cannot be a name"),
        (("attempts", 0, "number"), 10**30, r"attempts\.0\.number"),
        (("attempts", 0, "started"), float("nan"), r"attempts\.0\.started"),
        (("attempts", 0, "state"), "odd", r"attempts\.0\.state"),
        (("spec", "task"), 5, "task.kind must be text"),
        (("spec", "backend"), {}, "backend.name must be text"),
        (("spec", "backend", "name"), "moon", "names the backend 'moon'"),
        (("spec", "steps"), {"../../x": {}}, "cannot be a name"),
        (("plan", 0, "facts"), [1], "facts must be a mapping of texts"),
        (("more",), 1, "more: Extra inputs"),
    ],
)
def test_s12_a_record_that_cannot_be_read_is_a_row_with_its_reason(
    root: Path, location: tuple[Any, ...], value: Any, reason: str
) -> None:
    write(root, altered(whole_record("evil"), location[:-1], {**_at(location[:-1]), location[-1]: value}))
    rows = {it.run_id: it for it in ls(root)}
    assert (rows["good-1"].state, rows["evil"].state) == (RunState.FAILED, RunState.UNKNOWN)
    assert re.search(reason, str(rows["evil"].reason)), rows["evil"].reason


def _at(location: tuple[Any, ...]) -> Any:
    found: Any = whole_record("evil")
    for key in location:
        found = found[key]
    return found


@pytest.mark.parametrize(
    "body", ["", "[" * 100_000, "{", '{"version": 1}', "\xff", '{"version": ' + "1" * 10_000 + "}"]
)
def test_s12_a_record_that_is_not_json_is_a_row(root: Path, body: str) -> None:
    (write(root, {}) / "run.json").write_bytes(body.encode("latin-1"))
    rows = {it.run_id: it for it in ls(root)}
    assert rows["evil"].state is RunState.UNKNOWN
    assert rows["good-1"].state is RunState.FAILED


@pytest.mark.parametrize("kind", ["pipe", "folder", "a link to nothing"])
@pytest.mark.parametrize("name", ["run.json", "events/attempt-1-rank0.jsonl", "logs/attempt-1/node-0.log", "events"])
def test_s12_what_is_not_a_plain_file_stops_nothing(root: Path, name: str, kind: str) -> None:
    folder = write(root, whole_record("evil"))
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(folder / "nothing")
    if name != "run.json":
        read_all(folder, root)
    elif kind != "a link to nothing":
        assert {it.run_id for it in ls(root)} >= {"good-1"}


def test_s12_a_record_larger_than_any_is_a_row(root: Path) -> None:
    os.truncate(write(root, whole_record("evil")) / "run.json", 1 << 40)
    assert "more than" in str({it.run_id: it.reason for it in ls(root)}["evil"])


NAMES = [
    "attempt-\u0661-rank0.jsonl", "attempt-" + "9" * 200 + "-rank0.jsonl", "attempt-1-a b.jsonl", "notes.txt",
    "attempt-1-\x1b[2J.jsonl", ".attempt-1-rank0.jsonl.swp", "attempt-1-rank0.jsonl~",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_s12_an_unknown_name_among_events_is_ignored_and_reported_once(
    root: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(root, whole_record("evil"))
    (folder / "events" / name).write_text("{}\n")
    with caplog.at_level(logging.WARNING):
        read_all(folder, root)
    assert [it.getMessage() for it in caplog.records] == [f"{folder / 'events'}: ignored {name!r}: not a file of a run"]


@pytest.mark.parametrize(
    "name", ["node-.log", "node-x.log", "node-\u0661.log", "node-0.log.log", "node-" + "9" * 200 + ".log"]
)
def test_s12_an_unknown_name_among_logs_is_ignored(root: Path, name: str) -> None:
    folder = write(root, whole_record("evil"))
    (folder / "logs" / "attempt-1" / name).write_text("foreign\n")
    assert verb("logs", folder) == "a line\n"


def test_s12_an_event_that_is_not_ours_is_reported_once_and_half_a_line_never(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = [altered(json.loads(LINES[4]), ("step",), "1"), altered(json.loads(LINES[4]), ("tokens",), "2")]
    folder = write(root, whole_record("evil"), [*LINES, LINES[4][:20], *map(json.dumps, foreign)])
    (folder / "events" / "attempt-1-rank0-failure.jsonl").unlink()
    with caplog.at_level(logging.WARNING):
        read_all(folder, root)
    (message,) = (it.getMessage() for it in caplog.records)
    assert message.endswith(
        "passed over a line that is not an event of this release (step: Input should be a valid integer)"
    )
