"""The run handle on runs with a fake worker: resume, finish, rerun, branch, stop, attach, ls, and the run record."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.errors import CheckpointError, PlanError, RunFailed, RunNotFound, SmLlmError, SubmitError
from sm_llm.launcher.find_runs import attach, ls
from sm_llm.launcher.lifecycle import differences
from sm_llm.launcher.tools.shell import shell_command
from sm_llm.runs.events.events import read_events
from sm_llm.runs.events.run_metrics import to_json
from sm_llm.runs.run_states import RunState
from sm_llm.storage.publication.pins import pinned

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run

pytestmark = pytest.mark.integration

Fakes = Any
SLEEP = "(scratch / 'up').touch(); time.sleep(300)"
EVENTS = """
from sm_llm.runs.events.events import *
log = EventWriter(paths.event_file(job.attempt, "rank0"), job.attempt)
log.write(AttemptStarted(1, "cpu", 8, {}))
"""
"""Start of a fake worker that writes events."""


def job_of(run: Run) -> JobFile:
    return JobFile.read(run.paths.job_file)


def up(run: Run) -> bool:
    return any(run.paths.attempt_dir(run.attempts[-1].number).glob("node-*/scratch/up"))


def stopped(fakes: Fakes, *steps: int, **changes: Any) -> Run:
    """A run that has published checkpoints of ``steps`` and was stopped."""
    fakes.use("".join(f"put({step}); " for step in steps) + SLEEP)
    run: Run = fakes.launch(new=True, **changes)
    fakes.wait_until(lambda: up(run))
    run.stop(wait=True)
    return run


# --- resume


def test_a_resume_asks_the_worker_for_a_checkpoint_and_continues_as_the_next_attempt(fakes: Fakes) -> None:
    run = stopped(fakes, 2, 4)
    fakes.use("put(None)")
    again = run.resume()
    assert again.wait() is RunState.COMPLETED
    assert (again.uri, again.continued_attempt, [it.number for it in again.attempts]) == (run.uri, 2, [1, 2])
    assert job_of(run).resume == "newest"
    assert job_of(run).attempt == 2


def test_resuming_at_an_earlier_step_takes_the_later_checkpoints_back(fakes: Fakes) -> None:
    run = stopped(fakes, 2, 4, 6)
    fakes.use("put(4); put(None)")
    again = run.resume(step=2)
    assert again.wait() is RunState.COMPLETED
    assert job_of(run).resume == 2
    assert [it.step for it in run.checkpoints()] == [2, 4], "4 was published anew, 6 is gone"
    retired = sorted(path.name for path in (run.root / "ckpt/retired/attempt-2").iterdir())
    assert retired == ["step-00000004.json", "step-00000006.json"]


@pytest.mark.parametrize("step", [None, 3])
def test_a_requested_resume_that_finds_nothing_is_an_error(fakes: Fakes, step: int | None) -> None:
    run = stopped(fakes, *([] if step is None else [2, 4]))
    with pytest.raises(CheckpointError) as reported:
        run.resume(step=step)
    words = str(reported.value)
    assert ("no usable checkpoint of step 3" in words and "Usable steps: 2, 4" in words) or "sm-llm rerun" in words
    assert len(run.attempts) == 1


def test_a_damaged_checkpoint_is_named_when_it_is_asked_for(fakes: Fakes) -> None:
    run = stopped(fakes, 2, 4)
    (broken,) = run.root.glob("ckpt/step-00000004/*/data/result.txt")
    broken.write_text("longer than before")
    assert [(it.step, it.valid) for it in run.checkpoints()] == [(2, True), (4, False)]
    with pytest.raises(CheckpointError, match=r"damaged: step 4: 'result.txt' has 18 bytes"):
        run.resume(step=4)


def test_a_deep_look_finds_altered_contents_of_the_same_size(fakes: Fakes) -> None:
    run = stopped(fakes, 2)
    (altered,) = run.root.glob("ckpt/step-00000002/*/data/result.txt")
    altered.write_text("gone")
    assert [it.valid for it in run.checkpoints()] == [True]
    (found,) = run.checkpoints(deep=True)
    assert not found.valid
    assert "other content" in found.reason


def test_a_resume_with_changes_keeps_them_in_the_record_with_their_origin(fakes: Fakes) -> None:
    run = stopped(fakes, 2)
    before = run.record
    fakes.use("put(None)")
    run.resume("task.optim.max_grad_norm=0.5", "task.logging.every_steps=3").wait()
    record = run.record
    assert record.spec["task"]["optim"]["max_grad_norm"] == 0.5
    assert record.changes == {2: ("task.optim.max_grad_norm=0.5", "task.logging.every_steps=3")}
    assert record.origins["task.optim.max_grad_norm"] == "override"
    assert record.origins["task.max_steps"] == before.origins["task.max_steps"]
    assert record.spec_digest != before.spec_digest
    assert job_of(run).spec_digest == record.spec_digest
    assert job_of(run).spec.task.logging.every_steps == 3  # type: ignore[union-attr]


def test_a_refused_resume_changes_nothing(fakes: Fakes) -> None:
    fakes.use(f"put(2); put(4); {SLEEP}")
    run = fakes.launch()
    fakes.wait_until(lambda: up(run))
    before = run.record
    with pytest.raises(SubmitError, match=r"is running\. Stop it first"):
        run.resume("task.seed=9", step=2)
    assert run.record == before
    assert [it.step for it in run.checkpoints()] == [2, 4]
    run.stop(now=True, wait=True)


def test_a_completed_run_is_not_resumed_but_branched(fakes: Fakes) -> None:
    fakes.use("put(8); put(None)")
    run = fakes.launch()
    run.wait()
    with pytest.raises(SubmitError, match=r"completed.*sm-llm branch"):
        run.resume()


# --- finish


def test_finish_publishes_what_was_completed_but_not_published(fakes: Fakes) -> None:
    fakes.use(EVENTS + "put(8)")
    run = fakes.launch()
    with pytest.raises(RunFailed, match="completed-unpublished"):
        run.wait()
    assert run.result is None
    fakes.use("put(None)")
    assert run.finish().wait() is RunState.COMPLETED
    assert (run.result / "result.txt").is_file()
    with pytest.raises(SubmitError, match="is completed"):
        run.finish()


def test_finish_refuses_a_run_with_steps_left(fakes: Fakes) -> None:
    fakes.use(EVENTS + "put(4)")
    run = fakes.launch()
    fakes.end(run)
    with pytest.raises(SubmitError, match=r"4 of 8 steps saved.*sm-llm resume"):
        run.finish()


# --- rerun and branch


@pytest.fixture
def relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A prepare job whose input is relative to the folder it is launched from, the working folder; ``there`` exists."""
    texts = tmp_path / "here" / "texts"
    texts.mkdir(parents=True)
    (texts / "a.txt").write_text("words " * 50)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return {"task": {"kind": "prepare", "sources": ["texts"], "seq_length": 16}}


def test_a_launch_from_another_folder_continues_a_run_whose_inputs_are_relative(
    fakes: Fakes, relative: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.use("raise OSError('no space left')")
    run = fakes.launch(**relative)
    with pytest.raises(RunFailed, match="no space left"):
        run.wait()
    monkeypatch.chdir(tmp_path / "there")
    fakes.use("put(None)")
    again = fakes.launch(**relative)
    assert (again.uri, again.continued_attempt) == (run.uri, 2)
    assert again.wait() is RunState.COMPLETED
    # A run that none continues is planned here, where the folder is not.
    with pytest.raises(PlanError, match=r"task\.sources\.0.*is not there"):
        fakes.launch(**relative, new=True)
    with pytest.raises(PlanError, match=r"task\.sources\.0.*is not there"):
        fakes.launch(**relative, name="another")


def test_a_rerun_from_the_record_has_the_same_digest_and_reads_the_same_folders(
    fakes: Fakes, relative: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.use("put(None)")
    run = fakes.launch(**relative)
    run.wait()
    monkeypatch.chdir(tmp_path / "there")
    again = attach(run.uri).rerun()
    assert again.wait() is RunState.COMPLETED
    assert again.uri != run.uri
    assert again.storage == run.storage
    assert again.record.spec_digest == run.record.spec_digest
    assert again.record.spec == run.record.spec
    assert again.record.made_from == run.id
    assert job_of(again).spec.task.sources == [str(tmp_path / "here" / "texts")]  # type: ignore[union-attr]
    assert again.attempts[0].inputs == run.attempts[0].inputs
    fakes.use(SLEEP)
    third = again.rerun("task.seed=1")
    assert os.readlink(f"/proc/{third.attempts[0].native_id}/cwd") == str(tmp_path / "there"), (
        "a recorded folder is data"
    )
    third.stop(now=True, wait=True)
    assert third.record.spec_digest != run.record.spec_digest
    assert third.record.origins["task.seed"] == "override"
    assert job_of(third).spec.task.sources == [str(tmp_path / "here" / "texts")]  # type: ignore[union-attr]


def test_a_rerun_states_what_is_not_as_it_was(fakes: Fakes) -> None:
    fakes.use("put(None)")
    run = fakes.launch()
    run.wait()
    assert differences(run.record) == []
    old = run.record.model_copy(
        update={"versions": {**run.record.versions, "numpy": "1.0"}, "code_digest": "0", "host": {}}
    )
    found = differences(old)
    assert any(line.startswith("numpy 1.0 -> ") for line in found)
    assert "the code of sm_llm" in found


def test_a_branch_is_a_new_run_from_a_checkpoint_of_another(fakes: Fakes) -> None:
    run = stopped(fakes, 2, 4)
    fakes.use("put(None)")
    other = run.branch("task.max_steps=16", step=2)
    other.wait()
    assert other.uri != run.uri
    assert job_of(other).spec.task.start.checkpoint == f"{run.uri}@2"  # type: ignore[union-attr]
    assert job_of(other).resume is None
    assert other.record.made_from == run.id
    assert other.record.spec["task"]["max_steps"] == 16
    assert [it.step for it in run.checkpoints()] == [2, 4]
    assert pinned(run.run_store.store, time.time()) == {2}
    assert len(run.attempts) == 1
    with pytest.raises(CheckpointError, match="no usable checkpoint of step 3"):
        run.branch(step=3)
    for change, path in (("task.max_steps=2", "task.max_steps"), ("task.no_such=1", "task.no_such")):
        with pytest.raises(SmLlmError, match=path):
            run.branch(change, step=4)
    assert pinned(run.run_store.store, time.time()) == {2}, "a refused branch pins nothing"
    with pytest.raises(SmLlmError, match="max_steps"):
        run.branch("task.max_steps=1", step=2)
    assert pinned(run.run_store.store, time.time()) == {2}, "nor does it release what another branch needs"


# --- the record


def test_the_record_reports_what_was_sent_read_and_reached(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.txt").write_text("text")
    fakes.use(
        EVENTS + "log.write(StartChosen('checkpoint', 4, '/other', 'abc'))\n"
        "log.write(TrackerOpened('mlflow', 'id-7', 'http://x'))\nput(None)"
    )
    task = {"kind": "prepare", "sources": [str(tmp_path / "rows")], "seq_length": 16}
    run = fakes.launch(task=task)
    run.wait()
    record = run.record
    (attempt,) = record.attempts
    assert json.loads((run.root / str(attempt.request)).read_text())["nodes"][0]["argv"]
    assert attempt.host == socket.gethostname()
    assert attempt.start is not None
    assert (attempt.start.source, attempt.start.step, attempt.start.digest) == ("checkpoint", 4, "abc")
    (manifest,) = attempt.inputs.values()
    assert (manifest.uri, manifest.files, manifest.bytes, manifest.of) == (str(tmp_path / "rows"), 1, 4, "content")
    assert record.trackers == {"mlflow": "id-7"}
    assert re.fullmatch(r"[0-9a-f]{64}", str(record.code_digest))
    assert record.origins["task.seq_length"]
    assert record.versions["python"]
    assert record.outcome is RunState.COMPLETED
    assert run.cost is None
    assert run.status().to_json()["trackers"] == {"mlflow": "http://x"}


def test_a_manifest_follows_the_content_and_of_large_inputs_the_listing(tmp_path: Path) -> None:
    from sm_llm.launcher.job_inputs import manifest

    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_text("one")
    first = manifest(tmp_path)
    (tmp_path / "deep" / "a").write_text("two")
    second = manifest(tmp_path)
    assert first.digest != second.digest
    assert (first.files, first.bytes) == (second.files, second.bytes) == (1, 3)
    (tmp_path / "deep" / "a").rename(tmp_path / "deep" / "b")
    assert manifest(tmp_path).digest != second.digest
    large = manifest(tmp_path, content_bytes=2)
    assert large.of == "listing"
    os.utime(tmp_path / "deep" / "b", (1, 1))
    assert manifest(tmp_path, content_bytes=2).digest != large.digest
    assert manifest(tmp_path / "deep" / "b").files == 1


def test_C8_a_run_inside_an_input_is_not_a_part_of_what_was_read(tmp_path: Path) -> None:
    from sm_llm.launcher.job_inputs import manifest

    (tmp_path / "a.txt").write_text("text")
    before = manifest(tmp_path)
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"run_id": "x"}')
    assert manifest(tmp_path) == before


def test_CK33_a_tracker_keeps_its_id_over_all_attempts_also_after_a_killed_supervisor(fakes: Fakes) -> None:
    fakes.use(EVENTS + f"log.write(TrackerOpened('mlflow', 'id-7')); put(2); {SLEEP}")
    run = fakes.launch()
    fakes.wait_until(lambda: up(run))
    os.kill(int(run.attempts[-1].native_id), 9)
    fakes.wait_until(lambda: run.state is RunState.INTERRUPTED)
    assert run.record.trackers == {}, "nobody could note it"
    fakes.use(f"assert job.trackers == {{'mlflow': 'id-7'}}, job.trackers; put(4); {SLEEP}")
    run.resume()
    fakes.wait_until(lambda: up(run))
    run.stop(wait=True)
    assert job_of(run).trackers == {"mlflow": "id-7"}
    fakes.use("assert job.trackers == {'mlflow': 'id-7'}, job.trackers; put(None)")
    assert run.resume().wait() is RunState.COMPLETED
    branch = run.branch("task.seed=2", step=4)
    fakes.end(branch)
    assert job_of(branch).trackers == {}, "another run, another id"


# --- how it ends


def test_wait_names_the_first_failing_rank_and_where_to_read_on(fakes: Fakes) -> None:
    fakes.use(
        "failure = scratch.parent / 'output' / 'failure'\n"
        "failure.write_text('rank 1: ValueError: rows are upside down')\nsys.exit(1)"
    )
    run = fakes.launch("compute.processes_per_instance=2")
    with pytest.raises(RunFailed, match=r"failed: rank 1: .*upside down.*sm-llm logs .* --rank 1"):
        run.wait()
    assert run.attempts[0].rank == 1


def test_stop_now_kills_what_ignores_a_request(fakes: Fakes) -> None:
    fakes.use(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}")
    run = fakes.launch("backend.stop_seconds=10000")  # the time that a request gets, and this is none
    fakes.wait_until(lambda: up(run))
    assert run.stop(now=True, wait=True) is RunState.STOPPED
    with pytest.raises(SubmitError, match="is not running"):
        run.stop()


def test_a_run_on_another_machine_is_asked_by_a_stop_file(fakes: Fakes) -> None:
    fakes.use(SLEEP)
    run = fakes.launch()
    fakes.wait_until(lambda: up(run))
    pid = run.attempts[0].native_id

    def as_of(host: str, native_id: str) -> None:
        update = {"host": host, "native_id": native_id}
        run.run_store.update(lambda held: held.with_attempt(held.attempts[0].model_copy(update=update)))

    as_of("elsewhere", "1")
    with pytest.raises(SubmitError, match="runs on elsewhere"):
        run.stop(now=True)
    assert not run.paths.stop_file.exists()
    run.stop()
    assert run.paths.stop_file.exists()
    as_of(socket.gethostname(), pid)  # as its own machine sees it
    os.kill(int(pid), 15)
    fakes.wait_until(lambda: run.record.attempts[0].state is not None)
    fakes.use("put(None)")
    again = fakes.launch()
    again.wait()
    assert not run.paths.stop_file.exists(), "a new attempt is not stopped by an old request"


def test_stopping_a_run_that_was_never_started_is_refused(fakes: Fakes) -> None:
    fakes.use("put(None)")
    fakes.monkeypatch.setattr("sm_llm.launcher.backends.local.local_run.SUPERVISOR", "sm_llm.launcher.nothing")
    with pytest.raises(SubmitError):
        fakes.launch()
    with pytest.raises(SubmitError, match="is not running: it is pending"):
        attach(storage=fakes.storage).stop()


def verb(*words: str) -> tuple[int, str]:
    """Exit code and output of ``sm-llm`` in this process."""
    from typer.testing import CliRunner

    from sm_llm.cli.app import app

    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_E21_stopping_a_run_that_has_ended_is_a_message(fakes: Fakes) -> None:
    fakes.use("put(None)")
    run = fakes.launch()
    fakes.end(run)
    code, shown = verb("stop", run.uri)
    assert (code, shown) == (0, f"{run.id} is completed: there is nothing to stop\n")


def test_S12_39_a_run_without_metrics_and_checkpoints_is_a_message(fakes: Fakes) -> None:
    fakes.use("put(None)")
    run = fakes.launch()
    fakes.end(run)
    assert verb("metrics", run.uri) == (0, f"{run.id} has no metrics: no step of it has reported any\n")
    assert verb("checkpoints", run.uri) == (0, f"{run.id} has no checkpoint\n")
    assert verb("metrics", run.uri, "--json") == verb("checkpoints", run.uri, "--json") == (0, "[]\n")


# --- logs


def test_lines_of_several_processes_are_distinguished_by_rank(fakes: Fakes) -> None:
    fakes.use(
        "print('torchrun says'); print(f'[rank {2 * node}] Loss: 1'); print(f'[rank {2 * node + 1}] other')\nput(None)"
    )
    run = fakes.launch("compute.instance_count=2", "compute.processes_per_instance=2")
    fakes.end(run)
    assert list(run.logs(rank=3)) == ["other"]
    assert list(run.logs(rank=2, pattern="Loss")) == ["Loss: 1"]
    assert list(run.logs(node=1, tail=1, pattern="rank 2")) == ["[rank 2] Loss: 1"], "the last lines that match"
    with pytest.raises(SmLlmError, match="no rank 4: the run has 4 processes"):
        list(run.logs(rank=4))
    with pytest.raises(SmLlmError, match="no attempt 2; there are: 1"):
        list(run.logs(attempt=2))


def test_one_process_on_a_node_is_its_whole_log(fakes: Fakes) -> None:
    fakes.use("print(f'I am {node}'); put(None)")
    run = fakes.launch("compute.instance_count=2")
    fakes.end(run)
    assert list(run.logs(rank=1)) == ["I am 1"]


# --- attach and ls


def test_a_run_is_found_by_its_native_job_while_it_lives_and_afterwards(fakes: Fakes) -> None:
    fakes.use(SLEEP)
    run = fakes.launch()
    native = str(run.native_uri)
    assert native == f"local://{socket.gethostname()}/{run.attempts[0].native_id}"
    assert attach(native, storage=fakes.storage / "not-here").uri == run.uri, "the process itself tells"
    run.stop(now=True, wait=True)
    assert attach(native, storage=fakes.storage).uri == run.uri
    with pytest.raises(SubmitError, match="no run with the native job local://nowhere/1"):
        attach("local://nowhere/1", storage=fakes.storage)
    assert attach(f"file://{run.uri}").uri == run.uri


def test_ls_lists_every_run_of_a_storage_root_with_where_it_stands(fakes: Fakes) -> None:
    fakes.use(EVENTS + "log.write(Step(3, 2.5, 1.0, 1e-3, 64)); put(None)")
    done = fakes.launch()
    done.wait()
    fakes.use(SLEEP)
    running = fakes.launch(new=True)
    (fakes.storage / "torn").mkdir()
    (fakes.storage / "torn" / "run.json").write_text('{"version": 99}')
    try:
        found = {it.run_id: it for it in ls(fakes.storage)}
        assert found[done.id].state is RunState.COMPLETED
        assert (found[done.id].step, found[done.id].total_steps, found[done.id].loss) == (3, 8, 2.5)
        assert (found[running.id].state, found[running.id].ended) == (RunState.RUNNING, None), "OB13"
        assert found["torn"].state is RunState.UNKNOWN
        assert "version 99" in str(found["torn"].reason)
        json.dumps([it.to_json() for it in found.values()], allow_nan=False)
        from sm_llm.launcher.display.tables import runs_table

        assert runs_table(list(found.values())).row_count == 3
    finally:
        running.stop(now=True, wait=True)
    with pytest.raises(RunNotFound, match=r"nothing: there is no such folder, so no run\. Check the address"):
        ls(fakes.storage / "nothing")
    with pytest.raises(RunNotFound, match="this is a run, not a folder of runs"):
        ls(done.uri)
    fakes.monkeypatch.chdir(fakes.storage)
    assert ls() == [], "nothing was ever launched in this folder"


def test_a_glance_reads_only_the_ends_of_a_long_log(tmp_path: Path) -> None:
    from sm_llm.runs.events import events as ev
    from sm_llm.runs.events.run_metrics import glance, summarise

    log = ev.EventWriter(tmp_path / "attempt-1-rank0.jsonl", 1)
    log.write(ev.AttemptStarted(1, "cpu", 5000, {}))
    for step in range(1, 3001):
        log.write(ev.Step(step, 1.0 / step, 1.0, 1e-3, 64))
    log.close()
    found, whole = glance(tmp_path), summarise(read_events(tmp_path))
    assert (found.step, found.total_steps, found.loss) == (3000, 5000, 1.0 / 3000)
    assert found == whole


# --- the contract


def test_LM01_a_local_run_needs_no_docker(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    fakes.use("import os; print('base', os.environ['SAGEMAKER_BASE_DIR']); put(None)")
    run = fakes.launch()
    assert fakes.end(run) is RunState.COMPLETED, "\n".join(run.logs())
    assert any(line.startswith("base /") for line in run.logs())
    with pytest.raises(SubmitError, match="is in no container"):
        shell_command(run)


def test_LM02_a_script_finds_every_contract_file_on_every_fake_host(fakes: Fakes) -> None:
    fakes.use("""
base = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"])
config = base / "input" / "config"
hosts = json.loads((config / "resourceconfig.json").read_text())
assert hosts["hosts"] == json.loads(os.environ["SM_HOSTS"]) == ["algo-1", "algo-2", "algo-3"]
assert hosts["current_host"] == os.environ["SM_CURRENT_HOST"] == f"algo-{node + 1}"
for name in ("hyperparameters.json", "inputdataconfig.json"):
    json.loads((config / name).read_text())
for folder in ("model", "output/data", "code", "input/data"):
    assert (base / folder).is_dir(), folder
assert pathlib.Path.cwd() == base / "code"
if node == 0: put(None)
""")
    run = fakes.launch("compute.instance_count=3")
    assert fakes.end(run) is RunState.COMPLETED, "\n".join(run.logs())


def test_OB01_OB03_metrics_keep_every_digit_and_what_is_not_a_number(fakes: Fakes) -> None:
    fakes.use(
        EVENTS + "values = [7e-5, 1e-4, 1.2e3, -3e-2, .5, 1234.5, 0.1 + 0.2, float('nan'), float('inf')]\n"
        "for step, value in enumerate(values, 1): log.write(Step(step, value, 1.0, value, 64))\nput(None)"
    )
    run = fakes.launch()
    run.wait()
    rows = run.metrics()
    wanted = [7e-5, 1e-4, 1.2e3, -3e-2, 0.5, 1234.5, 0.1 + 0.2]
    assert [row["loss"] for row in rows[:-2]] == [row["learning_rate"] for row in rows[:-2]] == wanted
    assert [repr(row["loss"]) for row in rows[-2:]] == ["nan", "inf"]
    shown = json.loads(json.dumps([to_json(row) for row in rows], allow_nan=False))
    assert [row["loss"] for row in shown] == [*wanted, "nan", "inf"]
    assert json.loads(json.dumps(run.status().to_json(), allow_nan=False))["progress"]["loss"] == "inf"
    assert json.dumps([it.to_json() for it in ls(fakes.storage)], allow_nan=False)
