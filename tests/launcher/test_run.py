"""The run handle, metrics, plots and the live lines, from event files written by hand."""

from __future__ import annotations

import json
import math
import signal
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from sm_llm.errors import SmLlmError, StorageError
from sm_llm.launcher.build_submission import new_record
from sm_llm.launcher.display import live, plot
from sm_llm.launcher.observe.follow import EventTail
from sm_llm.launcher.run import Run
from sm_llm.runs.events import events as ev
from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.run_metrics import metric_rows, summarise, to_json
from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_record import Attempt, RunRecord
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import FolderRunStore
from sm_llm.spec.job import JobSpec
from sm_llm.terminal import big, duration, size

if TYPE_CHECKING:
    from pathlib import Path

STARTED = ev.AttemptStarted(world_size=2, device="cpu", total_steps=40, versions={})


def step(number: int, loss: float) -> ev.Step:
    return ev.Step(step=number, loss=loss, grad_norm=1.5, learning_rate=1e-3, tokens=128)


def speed(number: int) -> ev.Throughput:
    return ev.Throughput(
        step=number, tokens_per_second=1000.0, tokens_per_second_per_device=500.0, mfu=None, step_seconds=0.5,
        data_wait_seconds=0.01, device_memory_bytes=None, host_memory_bytes=1,
    )  # fmt: skip


def write(root: Path, attempt: int, *events: ev.Event, writer: str = "rank0") -> None:
    log = ev.EventWriter(RunPaths(root).event_file(attempt, writer), attempt)
    for event in events:
        log.write(event)
    log.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run folder with a record and one attempt that failed."""
    data = {"format": "synthetic", "seq_length": 8}
    task = {"kind": "train", "model": {"preset": "tiny"}, "data": data, "max_steps": 40}
    job = JobSpec.model_validate({"name": "job", "task": task})
    record = new_record("job-1", job, "digest", {}, [], created=1.0)
    ended = Attempt(number=1, native_id="7", started=10.0, ended=70.0, state=RunState.FAILED, reason="rank 1: boom")
    folder = tmp_path / "job-1"
    folder.mkdir()
    record.with_attempt(ended).write(RunPaths(folder).record)
    return folder


def test_metrics_are_exact_and_the_newest_attempt_wins(root: Path) -> None:
    exact = 0.1 + 0.2
    write(root, 1, STARTED, step(1, 9.0), step(2, 8.0), speed(2), ev.Validation(2, 7.5, 1808.0, 64), step(3, math.nan))
    write(root, 2, STARTED, step(2, exact), step(10, 5.0))
    rows = Run(root).metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 10]
    assert [row["attempt"] for row in rows] == [1, 2, 1, 2]
    assert struct.pack("d", rows[1]["loss"]) == struct.pack("d", exact)
    assert rows[1]["validation_loss"] == 7.5
    assert rows[1]["tokens_per_second"] == 1000.0
    assert math.isnan(rows[2]["loss"])
    text = json.dumps([to_json(row) for row in rows], allow_nan=False)
    assert json.loads(text)[1]["loss"] == exact
    assert json.loads(text)[2]["loss"] == "nan"


def test_status_of_a_failed_run_names_the_reason(root: Path) -> None:
    write(root, 1, STARTED, step(1, 9.0), step(20, 8.0), speed(20), ev.Validation(20, 7.5, 1808.0, 64))
    status = Run(root).status()
    assert (status.state, status.reason, status.attempt) == (RunState.FAILED, "rank 1: boom", 1)
    assert (status.progress.step, status.progress.total_steps, status.progress.validation_loss) == (20, 40, 7.5)
    assert status.progress.eta_seconds == 10.0  # 20 steps at 0.5 s
    assert json.loads(json.dumps(status.to_json()))["state"] == "failed"


def test_OB13_a_run_without_an_end_time_is_still_running_not_a_crash(root: Path) -> None:
    from sm_llm.launcher.display.tables import status_table
    from sm_llm.runs.run_lock import hold

    open_attempt = Attempt(number=2, native_id="8", started=100.0)
    RunRecord.update(RunPaths(root).record, lambda record: record.with_attempt(open_attempt))
    with hold(root):
        status = Run(root).status()
        assert (status.state, status.ended) == (RunState.RUNNING, None)
        console = Console(width=100)
        with console.capture() as captured:
            console.print(status_table(status))
        assert "running" in captured.get()
    assert Run(root).state is RunState.INTERRUPTED


def test_a_folder_without_a_record_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no run record"):
        Run(tmp_path)


def logs_of(root: Path) -> Path:
    log = RunPaths(root).node_log(1, 0)
    log.parent.mkdir(parents=True)
    return log


def test_OB07_logs_can_be_read_from_their_end(root: Path) -> None:
    logs_of(root).write_text("".join(f"line {number}\n" for number in range(10_000)))
    RunPaths(root).node_log(1, 1).write_text("other\n")
    run = Run(root)
    assert list(run.logs(tail=2)) == ["[node 0] line 9998", "[node 0] line 9999", "[node 1] other"]
    assert list(run.logs(tail=0)) == []
    assert list(run.logs(node=0, pattern=r"line 77\d$")) == [f"line {number}" for number in range(770, 780)]
    assert sum(1 for _ in run.logs()) == 10_001
    with pytest.raises(SmLlmError, match="not a regular expression"):
        list(run.logs(pattern="("))


def test_following_logs_gives_whole_lines_and_ends_with_the_run(root: Path) -> None:
    from sm_llm.launcher.observe.logs import read_logs

    log = logs_of(root)
    log.write_bytes(b"one\ntw")
    answers = iter([True, True, False])

    def grow(_: float) -> None:
        with log.open("ab") as stream:
            stream.write(b"o\nthree")

    lines = read_logs(RunPaths(root), 1, still_running=lambda: next(answers), sleep=grow)
    assert list(lines) == ["one", "two", "threeo", "three"]


def test_lines_of_several_nodes_name_theirs_before_the_second_has_a_log(root: Path) -> None:
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.launcher.observe.logs import read_logs

    log = logs_of(root)
    log.write_text("one\n")
    answers = iter([True, False])

    def begin_second(_: float) -> None:
        RunPaths(root).node_log(1, 1).write_text("other\n")

    wanted = LogFilter().on(2, 8)
    lines = read_logs(RunPaths(root), 1, wanted, still_running=lambda: next(answers), sleep=begin_second)
    assert list(lines) == ["[node 0] one", "[node 1] other"]
    for alone in (LogFilter().on(1, 8), LogFilter(node=0).on(2, 8), LogFilter(rank=3).on(2, 8)):
        assert not alone.labels


def test_an_event_tail_gives_every_event_once_and_leaves_partial_lines(root: Path) -> None:
    write(root, 1, step(1, 9.0))
    write(root, 2, step(2, 8.0))
    tail = EventTail(FolderRunStore(root), first_attempt=2)
    assert [event["step"] for event in tail.new_events()] == [2]
    line = ev.encode(step(3, 7.0), attempt=2, at=0.0) + "\n"
    with RunPaths(root).event_file(2, "rank0").open("a") as stream:
        stream.write(line[:20])
        stream.flush()
        assert list(tail.new_events()) == []
        stream.write(line[20:])
    assert [event["step"] for event in tail.new_events()] == [3]
    assert list(tail.new_events()) == []


def test_a_plot_is_a_png_with_every_panel(root: Path) -> None:
    events: list[ev.Event] = [STARTED]
    for number in range(1, 201):
        events.append(step(number, 8.0 * 0.99**number))
        if number % 20 == 0:
            events += [speed(number), ev.Validation(number, 8.1 * 0.99**number, 1.0, 64)]
    write(root, 1, *events)
    write(root, 2, step(150, math.inf), step(151, 2.0))
    run = Run(root)
    assert run.plot() == root / "plot.png"
    assert (root / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert run.plot(root / "deep" / "er.png").is_file()
    assert not list(root.glob(".*tmp"))
    figure = plot.draw(run.metrics(), "title")
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss (nats per token)", "learning rate", "tokens per second"]
    assert "continued" in [text.get_text() for text in figure.axes[0].texts]
    assert [axes.get_yscale() for axes in figure.axes] == ["linear"] * 3


def test_a_loss_over_more_than_a_decade_gets_a_logarithmic_axis() -> None:
    rows = [{"step": number, "attempt": 1, "loss": 10.0 / number} for number in range(1, 60)]
    assert plot.draw(rows, "title").axes[0].get_yscale() == "log"


def test_a_run_without_a_step_has_nothing_to_plot(root: Path) -> None:
    with pytest.raises(SmLlmError, match="no training step"):
        Run(root).plot()


def test_smoothing_is_the_mean_of_the_values_around() -> None:
    assert plot.smooth([4.0, 2.0, 6.0, 8.0, 1.0], 3) == [3.0, 4.0, 16 / 3, 5.0, 4.5]
    assert plot.smooth([4.0, 2.0], 1) == [4.0, 2.0]


def shown(events: list[ev.Event], *, terminal: bool) -> str:
    console = Console(width=120, force_terminal=terminal, color_system=None)
    display = live.Display(console, None, "train")
    with console.capture() as captured:
        for event in events:
            display.show(ev.decode(ev.encode(event, attempt=1, at=0.0)))
    return captured.get()


def test_piped_output_is_one_plain_line_per_logged_step() -> None:
    text = shown([STARTED, step(9, 4.25), step(10, 4.125), speed(10)], terminal=False)
    assert text.splitlines()[1:] == [
        "train  step 10/40  loss 4.1250  lr 1.00e-03  grad norm 1.50  1,000 tokens/s  data wait 2.0%  15s left"
    ]


def test_the_live_line_has_loss_speed_and_what_is_left() -> None:
    written = [ev.decode(ev.encode(event, attempt=1, at=0.0)) for event in (STARTED, step(10, 4.125), speed(10))]
    line = live.live_text("train", summarise(written), 120).plain
    assert "step 10/40  loss 4.1250  1,000 tok/s  15s left" in line
    assert line.count("━") == 28


def test_a_long_phase_states_where_it_is_every_quarter() -> None:
    steps: list[ev.Event] = [ev.Progress("encode", done, 100, "MB") for done in range(0, 101, 5)]
    assert shown(steps, terminal=False).split() == [
        word for share in ("0%", "25%", "50%", "75%", "100%") for word in ("train", "encode", share)
    ]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (ev.StartChosen("scratch", 0), "starts from scratch"),
        (ev.StartChosen("checkpoint", 40, "/runs/a"), "starts from checkpoint /runs/a, 40 steps done"),
        (ev.Validation(40, 4.5, 90.02, 1), "step 40: validation loss 4.5000, perplexity 90.0"),
        (ev.Validation(40, math.inf, math.inf, 1), "step 40: validation loss inf, perplexity inf"),
        (ev.CheckpointPublished(4, "x", 74_000_000, 0.4, 0.01),
         "step 4: checkpoint published, 74.0 MB in 0.4 s (training waited 0.01 s)"),
        (ev.Notice("low disk", "warning"), "warning: low disk"),
        (ev.AttemptEnded("completed"), None),
    ],
)  # fmt: skip
def test_events_in_words(event: ev.Event, line: str | None) -> None:
    assert event_line(ev.decode(ev.encode(event, attempt=1, at=0.0))) == line


def test_words_for_numbers() -> None:
    assert [duration(it) for it in (0.4, 59.6, 95, 3700)] == ["0s", "1m00s", "1m35s", "1h01m"]
    assert [size(it) for it in (12, 1234, 73_950_000, 2.5e12)] == ["12 B", "1.2 kB", "74.0 MB", "2.5 TB"]
    assert [big(it) for it in (999, 6_163_712, 3.4e13)] == ["999", "6.16 M", "34 T"]


def test_ctrl_c_is_counted_while_watching_and_put_back_afterwards() -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    with live._counted_interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert len(interrupts) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_metric_rows_of_an_empty_folder(tmp_path: Path) -> None:
    assert metric_rows(tmp_path) == []


def test_a_run_shows_as_its_uri(root: Path) -> None:
    run: Any = Run(root)
    assert repr(run) == f"Run({str(root)!r})"


def test_watching_an_ended_run_shows_its_events_once_and_how_it_ended(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, 1, STARTED, step(10, 4.125), speed(10), ev.Sample("once", " upon a time"))
    write(root, 1, ev.AttemptEnded("failed", "rank 1: boom", 1), writer="launcher")
    assert Run(root).watch() is RunState.FAILED
    text = capsys.readouterr().out
    assert text.count("step 10/40  loss 4.1250") == 1
    assert "failed in 1m00s: rank 1: boom" in text
    assert "no checkpoint yet: the same command starts it" in text
    assert "Load it with" not in text
