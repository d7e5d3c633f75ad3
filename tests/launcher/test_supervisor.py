"""Local runs under the real detached supervisor, with a fake worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.failure import Failure
from sm_llm.contract.job_file import JobFile
from sm_llm.errors import RunFailed, SubmitError
from sm_llm.launcher.backends.local import local_run
from sm_llm.launcher.backends.local.attempt import GRACE_SECONDS, KILL_SECONDS, with_facts
from sm_llm.launcher.backends.local.processes import Interrupts
from sm_llm.launcher.find_runs import attach
from sm_llm.runs.events.events import read_events
from sm_llm.runs.outcome import Outcome, with_end
from sm_llm.runs.run_lock import hold, is_anyone_alive
from sm_llm.runs.run_record import Attempt
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run

pytestmark = pytest.mark.integration

Fakes = Any
SLEEP = "(scratch / 'up').touch(); time.sleep(300)"


def up(run: Run) -> bool:
    """Whether every node of the newest attempt has reported that it is up."""
    folder = run.paths.attempt_dir(run.attempts[-1].number)
    nodes = int(run.record.spec["compute"]["instance_count"])
    return len(list(folder.glob("node-*/scratch/up"))) == nodes


def test_a_run_completes_and_reports_it_everywhere(fakes: Fakes) -> None:
    fakes.use("print('Loss: 1.0'); put(4); put(None)")
    run = fakes.launch()
    assert run.wait() is RunState.COMPLETED
    assert (run.result / "result.txt").read_text() == "done"
    assert (run.result_link / "result.txt").read_text() == "done"
    (attempt,) = run.attempts
    assert attempt.state is RunState.COMPLETED
    assert attempt.ended >= attempt.started
    ends = [event for event in read_events(run.paths.events) if event["kind"] == "attempt_ended"]
    assert [event["state"] for event in ends] == ["completed"]
    assert list(run.logs()) == ["Loss: 1.0"]
    fakes.wait_until(lambda: not is_anyone_alive(run.root))  # it tells its end, then it ends
    assert not list(run.root.rglob("scratch")), "scratch is cleaned"
    assert run.record.outcome is RunState.COMPLETED


def test_the_supervisor_leads_a_session_of_its_own_and_outlives_its_launcher(fakes: Fakes) -> None:
    """A terminal that goes away sends SIGHUP to its session: the run is in none of it."""
    program = "from sm_llm.launcher.find_runs import attach\n"
    fakes.use(SLEEP)
    run = fakes.launch()
    pid = int(run.attempts[-1].native_id)
    assert os.getsid(pid) == pid != os.getsid(0)
    fakes.wait_until(lambda: up(run))
    os.kill(pid, signal.SIGHUP)
    done = subprocess.run(
        [sys.executable, "-c", program + f"run = attach({run.uri!r}); print(run.state.value); run.stop()"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "running"
    assert fakes.end(run) is RunState.STOPPED


def test_LM04_the_real_error_is_reported_not_the_tools_exit_code(fakes: Fakes) -> None:
    fakes.use("raise ValueError('rows are upside down')")
    run = fakes.launch()
    with pytest.raises(RunFailed, match="ValueError: rows are upside down"):
        run.wait()
    assert run.status().reason == "ValueError: rows are upside down"


def test_the_first_failure_file_names_the_cause_and_the_rank(fakes: Fakes) -> None:
    fakes.use(
        "failure = scratch.parent / 'output' / 'failure'\n"
        "first = scratch.parents[1] / 'node-0' / 'output' / 'failure'\n"
        "while node == 1 and not (first.exists() and first.read_text()): time.sleep(0.01)\n"
        "failure.write_text(f'rank {3 - node}: Traceback (most recent call last):\\n  File x\\nKeyError: {node}\\n')\n"
        # A disk's clock ticks every few milliseconds: without this, both files can have one time.
        "os.utime(failure, times=(time.time() + node, time.time() + node))\n"
        "sys.exit(1)"
    )
    run = fakes.launch("compute.instance_count=2")
    assert fakes.end(run) is RunState.FAILED
    (ended,) = [event for event in read_events(run.paths.events) if event["kind"] == "attempt_ended"]
    assert (ended["rank"], ended["reason"]) == (3, "rank 3: KeyError: 0")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("rank 1: data: file a.txt line 3 is empty", "rank 1: data: file a.txt line 3 is empty"),
        ("rank 0: 2 faults:\n  - a: wrong\n  - b: wrong", "rank 0: 2 faults: - a: wrong - b: wrong"),
        ("rank 2: Traceback (most recent call last):\n  File\nfoo.BarError: no\n", "rank 2: foo.BarError: no"),
        ("Traceback (most recent call last):\n  File\nKeyboardInterrupt\n", "KeyboardInterrupt"),
    ],
)
def test_a_failure_file_gives_one_line(text: str, cause: str) -> None:
    assert Failure.from_text(text).headline == cause


def test_one_failed_node_ends_the_others_within_15_seconds(fakes: Fakes) -> None:
    assert GRACE_SECONDS + KILL_SECONDS < 15
    fakes.use(f"if node == 1: raise SystemExit(3)\n{SLEEP}")
    run = fakes.launch("compute.instance_count=2")
    assert fakes.end(run) is RunState.FAILED
    assert run.status().reason == "node 1 ended with exit code 3"


def test_a_stop_asked_for_after_a_node_was_killed_does_not_hide_that(fakes: Fakes) -> None:
    dies = "(paths.root / str(os.getpid())).mkdir(); os.kill(os.getpid(), 9)"
    fakes.use(f"if node == 1: {dies}\nput(2); {SLEEP}")
    run = fakes.launch("compute.instance_count=2")
    fakes.wait_until(lambda: run.checkpoints() and list(run.root.glob("[0-9]*")))
    (killed,) = run.root.glob("[0-9]*")
    fakes.wait_until(lambda: not Path("/proc", killed.name).exists())  # its supervisor has seen it
    run.stop()
    assert fakes.end(run) is RunState.FAILED
    assert run.status().reason == "node 1 ended with exit code -9"


def test_an_end_without_a_result_is_not_called_completed(fakes: Fakes) -> None:
    fakes.use("put(2)")
    run = fakes.launch()
    with pytest.raises(RunFailed, match="completed-unpublished"):
        run.wait()


def test_a_stopped_run_with_a_checkpoint_can_be_continued_by_the_same_launch(fakes: Fakes) -> None:
    fakes.use(f"put(2); {SLEEP}")
    run = fakes.launch()
    fakes.wait_until(lambda: up(run))
    run.stop()
    assert fakes.end(run) is RunState.INTERRUPTED
    assert run.record.outcome is None
    fakes.use("put(None)")
    again = fakes.launch()
    assert (again.uri, again.continued_attempt) == (run.uri, 2)
    assert again.wait() is RunState.COMPLETED
    assert [it.number for it in again.attempts] == [1, 2]
    third = fakes.launch()
    assert third.uri != run.uri, "a completed run is not continued"
    assert third.continued_attempt is None


REPORTS_TERM = """
import signal
signal.signal(signal.SIGTERM, lambda *_: (paths.root / 'told').touch())
"""
"""Start of a fake worker that goes on when it is asked to stop."""


def test_whoever_is_asked_to_stop_again_still_saves(fakes: Fakes) -> None:
    saves = "while not (paths.root / 'asked-again').exists(): time.sleep(0.01)\ntime.sleep(0.5); put(2)"
    fakes.use(f"{REPORTS_TERM}\n(scratch / 'up').touch()\n{saves}")
    run = fakes.launch()
    fakes.wait_until(lambda: up(run))
    run.stop()
    fakes.wait_until((run.root / "told").exists)
    run.stop()
    (run.root / "asked-again").touch()
    assert fakes.end(run) is RunState.INTERRUPTED
    assert [it.step for it in run.checkpoints()] == [2]


def test_stop_now_kills_what_ignores_a_stop_asked_for_before(fakes: Fakes) -> None:
    fakes.use(REPORTS_TERM + SLEEP)
    run = fakes.launch()
    fakes.wait_until(lambda: up(run))
    run.stop()
    fakes.wait_until((run.root / "told").exists)
    assert run.state is RunState.RUNNING
    run.stop(now=True)
    assert fakes.end(run) is RunState.STOPPED


@pytest.mark.parametrize(
    ("signals", "count"),
    [("TERM", 1), ("TERM TERM TERM", 1), ("INT", 1), ("INT INT", 2), ("TERM INT", 2), ("INT TERM", 2)],
)
def test_only_an_interrupt_makes_a_stop_urgent_in_whatever_order_they_arrive(signals: str, count: int) -> None:
    taken = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    before = [signal.getsignal(number) for number in taken]
    interrupts = Interrupts()
    try:
        interrupts.install()
        for name in signals.split():
            signal.raise_signal(signal.Signals[f"SIG{name}"])
    finally:
        for number, handler in zip(taken, before, strict=True):
            signal.signal(number, handler)
    assert interrupts.count == count


def test_nodes_die_with_a_killed_supervisor_and_the_run_continues_later(fakes: Fakes) -> None:
    fakes.use(SLEEP)
    run = fakes.launch("compute.instance_count=2")
    fakes.wait_until(lambda: up(run))
    assert run.state is RunState.RUNNING
    os.kill(int(run.attempts[-1].native_id), signal.SIGKILL)
    fakes.wait_until(lambda: not is_anyone_alive(run.root))
    scripts = f"{run.root}/local".encode()
    fakes.wait_until(lambda: not [path for path in Path("/proc").glob("[0-9]*/cmdline") if scripts in read(path)])
    assert run.state is RunState.INTERRUPTED
    assert "killed" in str(run.status().reason)
    fakes.use("put(None)")
    again = fakes.launch("compute.instance_count=2")
    assert again.continued_attempt == 2
    assert again.wait() is RunState.COMPLETED
    assert not list(run.root.rglob("scratch")), "the killed attempt's scratch is cleaned too"


def test_an_attempt_that_ends_while_it_is_read_is_reported_as_it_ended(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was read before the supervisor wrote the end, the lock was checked after the supervisor had ended."""
    fakes.use("raise ValueError('rows are upside down')")
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    ended = run.attempts[-1]
    opened = ended.model_copy(update={"state": None, "reason": None, "ended": None})
    run.run_store.update(lambda record: record.with_attempt(opened))
    assert run.state is RunState.INTERRUPTED, "nobody is alive, and nobody wrote how it ended"

    def ends(_: Path) -> bool:
        run.run_store.update(lambda record: record.with_attempt(ended))
        return False

    monkeypatch.setattr(local_run, "is_anyone_alive", ends)
    assert run.describe() == (RunState.FAILED, "ValueError: rows are upside down")


def test_an_attempt_that_begins_while_it_is_read_is_running(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record was read while it was only claimed, and its launcher had finished when that was checked."""
    fakes.use("put(2); raise ValueError('x')")
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    claimed = Attempt(number=2, native_id="", host="here", started=time.time())
    run.run_store.update(lambda record: record.with_attempt(claimed))
    polls = iter([False, True])

    def begins(_: Path) -> bool:
        begun = claimed.model_copy(update={"native_id": "1"})
        run.run_store.update(lambda record: record.with_attempt(begun))
        return next(polls)

    monkeypatch.setattr(local_run, "is_anyone_alive", begins)
    assert run.state is RunState.RUNNING


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_orphans_of_a_killed_node_are_killed(fakes: Fakes) -> None:
    """torchrun puts its workers into sessions of their own: killed itself, it would leave them behind."""
    fakes.use(
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "pathlib.Path(job.run_uri, 'orphan').write_text(str(child.pid))\n"
        "os.kill(os.getpid(), 9)"
    )
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    orphan = int((run.root / "orphan").read_text())
    fakes.wait_until(lambda: not Path(f"/proc/{orphan}").exists())


def test_a_running_run_is_refused_with_its_process_and_how_to_follow(fakes: Fakes) -> None:
    fakes.use(SLEEP)
    run = fakes.launch()
    with pytest.raises(SubmitError, match=rf"process {run.attempts[0].native_id}.*sm-llm logs .*--new"):
        fakes.launch()
    other = fakes.launch(new=True)
    assert other.uri != run.uri
    for it in (run, other):
        it.stop()
        assert fakes.end(it) is RunState.STOPPED


def test_a_run_that_has_reported_its_end_is_continued_as_soon_as_its_supervisor_has_gone(fakes: Fakes) -> None:
    fakes.use("put(2); raise ValueError('x')")
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    lock = hold(run.root)
    leaves = threading.Timer(0.5, lock.release)
    leaves.start()
    fakes.use("put(None)")
    again = run.resume()
    assert not leaves.is_alive()
    assert again.wait() is RunState.COMPLETED


def test_a_run_that_has_reported_its_end_and_does_not_go_is_refused(fakes: Fakes) -> None:
    fakes.use("put(2); raise ValueError('x')")
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    fakes.monkeypatch.setattr(local_run, "LEAVE_SECONDS", 0.2)
    with hold(run.root), pytest.raises(SubmitError, match="is running already"):
        run.resume()


def test_of_two_launches_at_once_one_continues_and_one_is_refused(fakes: Fakes) -> None:
    fakes.use(SLEEP)
    first = fakes.launch()
    first.stop()
    fakes.end(first)
    outcomes: list[str] = []

    def launch() -> None:
        try:
            outcomes.append(f"attempt {fakes.launch().continued_attempt}")
        except SubmitError:
            outcomes.append("refused")

    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["attempt 2", "refused"]
    assert [it.number for it in first.attempts] == [1, 2]
    first.stop()
    fakes.end(first)


def test_DL18_runs_at_once_get_ports_of_their_own(fakes: Fakes) -> None:
    fakes.use(
        "print(sys.argv[3]); (paths.root / 'is-up').touch()\n"
        "while len(list(paths.root.parent.glob('*/is-up'))) < 4: time.sleep(0.01)\n"
        "put(None)"
    )
    runs = [fakes.launch(new=True) for _ in range(4)]
    for run in runs:
        run.wait()
    ports = {next(run.logs()) for run in runs}
    assert len(ports) == 4
    assert all(port.isdigit() for port in ports)


def test_a_supervisor_that_cannot_start_is_reported_with_its_own_words(fakes: Fakes) -> None:
    fakes.use("put(None)")
    fakes.monkeypatch.setattr("sm_llm.launcher.backends.local.local_run.SUPERVISOR", "sm_llm.launcher.nothing")
    with pytest.raises(SubmitError, match=r"supervisor could not start:\n.*No module named sm_llm.launcher.nothing"):
        fakes.launch()


def test_ctrl_c_while_the_supervisor_starts_ends_it(fakes: Fakes, tmp_path: Path) -> None:
    """It is in a session of its own, so that the terminal's Ctrl-C does not reach it."""
    pid = tmp_path / "pid"
    program = "import os, pathlib, time\npath = pathlib.Path(os.environ['PID_FILE'])\n"
    program += "path.with_suffix('.new').write_text(str(os.getpid()))\npath.with_suffix('.new').rename(path)\n"
    (tmp_path / "slow_supervisor.py").write_text(program + "time.sleep(60)")
    fakes.use("put(None)")
    fakes.monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), *sys.path])))
    fakes.monkeypatch.setenv("PID_FILE", str(pid))
    fakes.monkeypatch.setattr(local_run, "SUPERVISOR", "slow_supervisor")

    def interrupt() -> None:
        fakes.wait_until(pid.exists)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presses = threading.Thread(target=interrupt)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fakes.launch()
    finally:
        presses.join()
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_supervisor_whose_launcher_was_interrupted_records_the_end_all_the_same(fakes: Fakes) -> None:
    fakes.use("put(None)")
    with fakes.monkeypatch.context() as unstarted:
        unstarted.setattr(local_run, "_spawn", lambda *_: "0")
        run = fakes.launch()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", local_run.SUPERVISOR, run.uri, str(writer), "{}", str(Path.cwd())]
    subprocess.run(command, pass_fds=[writer], timeout=300, check=True)
    os.close(writer)
    assert run.attempts[-1].state is RunState.COMPLETED


def test_an_attempt_that_was_rolled_back_is_not_recorded_again(fakes: Fakes) -> None:
    fakes.use("put(None)")
    run = fakes.launch()
    run.wait()
    job = JobFile.read(run.paths.job_file).model_copy(update={"attempt": 2})
    assert with_facts(run.record, run.paths, job) == run.record
    gone = Attempt(number=2, native_id="1", started=1.0)
    assert with_end(run.record, run.paths, gone, Outcome(RunState.STOPPED)) == run.record
    again = with_end(run.record, run.paths, run.attempts[0], Outcome(RunState.STOPPED))
    assert again == run.record, "it has its end already"


def test_an_error_of_the_launcher_itself_ends_the_attempt_as_failed(fakes: Fakes) -> None:
    fakes.use("put(None)")
    fakes.monkeypatch.setattr("sm_llm.launcher.backends.local.backend._torchrun", lambda *_: ("/nowhere/python",))
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    assert "FileNotFoundError" in str(run.status().reason)


def test_stop_refuses_a_process_that_is_not_the_runs_supervisor(fakes: Fakes) -> None:
    from sm_llm.launcher.backends.local import local_run

    fakes.use("put(None)")
    run = fakes.launch()
    run.wait()
    with pytest.raises(SubmitError, match="is not running"):
        run.stop()
    with pytest.raises(SubmitError, match="not this run's supervisor"):
        local_run.signal_supervisor(run.run_store, os.getpid())


def test_attach_finds_runs_by_folder_id_and_name_and_names_what_there_is(fakes: Fakes) -> None:
    fakes.use("put(None)")
    first, second = fakes.launch(), fakes.launch(new=True)
    for run in (first, second):
        run.wait()
    assert attach(first.root).uri == first.uri
    assert attach(first.id, storage=fakes.storage).uri == first.uri
    assert attach("fake", storage=fakes.storage).uri == second.uri
    assert attach(storage=fakes.storage).uri == second.uri
    with pytest.raises(SubmitError, match=f"no run 'other'.*{first.id}"):
        attach("other", storage=fakes.storage)
