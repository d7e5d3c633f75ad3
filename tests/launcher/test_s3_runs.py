"""Runs kept in S3, on a real server, with a fake worker: all that a folder does, also from another machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import RunFailed, StorageError, SubmitError
from sm_llm.launcher.backends.local import processes, workflow
from sm_llm.launcher.build_submission import new_record
from sm_llm.launcher.find_runs import attach, ls
from sm_llm.launcher.observe.follow import follow
from sm_llm.launcher.observe.retry_policy import RetryPolicy
from sm_llm.launcher.run import Run
from sm_llm.runs import heartbeat
from sm_llm.runs.events.events import read_events
from sm_llm.runs.events.run_metrics import to_json
from sm_llm.runs.run_lock import is_anyone_alive
from sm_llm.runs.run_record import Attempt
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import run_store_at
from sm_llm.runs.s3_run_store import S3RunStore
from sm_llm.spec.loading.load import load

if TYPE_CHECKING:
    from collections.abc import Callable

    Elsewhere = Callable[..., None]

pytestmark = pytest.mark.integration

Fakes = Any
SLEEP = "(scratch / 'up').touch(); time.sleep(300)"
EVENTS = """
from sm_llm.runs.events.events import *
log = EventWriter(paths.event_file(job.attempt, "rank0"), job.attempt)
log.write(AttemptStarted(1, "cpu", 8, {}))
"""
PLANTED = f"planted-{secrets.token_hex(8)}"


def up(run: Run) -> bool:
    return any(run.paths.attempt_dir(run.attempts[-1].number).glob("node-*/scratch/up"))


def seen(run: Run) -> dict[str, Any]:
    """What people read, without what depends on the moment or the machine."""
    return {
        "status": {**run.status().to_json(), "native_uri": None},
        "metrics": [to_json(row) for row in run.metrics()],
        "logs": list(run.logs()),
        "attempts": [it.model_dump(mode="json") for it in run.attempts],
        "checkpoints": [it.step for it in run.checkpoints()],
    }


def objects(s3_server: Any, bucket: str) -> dict[str, bytes]:
    client = s3_server.client
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    keys = [it["Key"] for page in pages for it in page.get("Contents", ())]
    return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}


def test_a_run_in_S3_is_the_same_from_another_machine(
    s3_fakes: Fakes, elsewhere: Elsewhere, bucket: str, s3_server: Any
) -> None:
    s3_fakes.use(
        EVENTS + "log.write(Step(3, 0.1 + 0.2, 1.0, 1e-3, 64)); print(f'Loss on {node}')\n"
        "if node == 0: put(4); put(None)\nelse:\n"
        " while not open_store(job.run_uri, job.spec.storage_options.model_dump()).list('ckpt/commits/final'):"
        " time.sleep(0.1)\n"
    )
    run = s3_fakes.launch("compute.instance_count=2")
    assert run.uri.startswith(f"s3://{bucket}/runs/fake-")
    assert run.wait() is RunState.COMPLETED, "\n".join(run.logs())
    assert str(run.result).startswith(f"{run.uri}/final/")
    assert run.result_link == f"{run.uri}/result"
    here = seen(run)
    assert here["metrics"][0]["loss"] == 0.1 + 0.2
    assert here["logs"] == ["[node 0] Loss on 0", "[node 1] Loss on 1"]
    elsewhere()
    for there in (
        Run(run.uri),
        attach(run.id, storage=s3_fakes.storage),
        attach("fake", storage=s3_fakes.storage),
    ):
        assert seen(there) == here
        assert there.root != run.root
    assert there.plot().is_file()
    (listed,) = ls(s3_fakes.storage)
    assert (listed.uri, listed.state, listed.step, listed.loss) == (run.uri, RunState.COMPLETED, 3, 0.1 + 0.2)
    assert not [key for key in objects(s3_server, bucket) if "/scratch/" in key or key.endswith("lock")]


def test_the_same_launch_continues_after_everything_was_killed(s3_fakes: Fakes, elsewhere: Elsewhere) -> None:
    s3_fakes.use(EVENTS + "log.write(Step(1, 1.5, 1.0, 1e-3, 64)); print('first', flush=True); put(2); " + SLEEP)
    run = s3_fakes.launch()
    s3_fakes.wait_until(lambda: up(run))
    os.kill(int(run.attempts[-1].native_id), signal.SIGKILL)
    s3_fakes.wait_until(lambda: not is_anyone_alive(run.root))
    assert run.state is RunState.INTERRUPTED
    s3_fakes.use(EVENTS + "log.write(Step(2, 1.25, 1.0, 1e-3, 64)); print('second'); put(None)")
    again = s3_fakes.launch()
    assert (again.uri, again.continued_attempt) == (run.uri, 2)
    assert again.wait() is RunState.COMPLETED
    here = seen(again)
    assert [row["loss"] for row in here["metrics"]] == [1.5, 1.25]
    elsewhere()
    there = Run(run.uri)
    assert seen(there) == here, "what the killed attempt had not shipped was shipped by the next"
    assert list(there.logs(attempt=1)) == ["first"]
    assert s3_fakes.launch().continued_attempt is None, "a completed run is not continued"
    attach(storage=s3_fakes.storage).wait()


@pytest.mark.parametrize("there", [True, False])
def test_E21_a_run_that_was_asked_to_stop_reports_it_everywhere(
    s3_fakes: Fakes, elsewhere: Elsewhere, there: bool
) -> None:
    """Until the worker has noticed: this one never does."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    s3_fakes.use(EVENTS + "log.write(Step(1, 1.5, 1.0, 1e-3, 64)); " + ignore + SLEEP)
    run = s3_fakes.launch()
    s3_fakes.wait_until(lambda: up(run))
    assert not run.status().progress.stopping
    run_store = os.environ["XDG_CACHE_HOME"]
    try:
        if there:
            elsewhere()
        Run(run.uri).stop()
        assert Run(run.uri).status().progress.stopping, "at once"
        elsewhere("third")
        s3_fakes.wait_until(lambda: Run(run.uri).status().progress.stopping)
        s3_fakes.wait_until(lambda: "stop_requested" in [it["kind"] for it in read_events(Run(run.uri).events)])
    finally:
        s3_fakes.monkeypatch.setenv("XDG_CACHE_HOME", run_store)
        run.stop(now=True, wait=True)


def test_a_run_continues_from_another_machine_only_when_the_first_is_silent(
    s3_fakes: Fakes, elsewhere: Elsewhere
) -> None:
    s3_fakes.use("put(2); " + SLEEP)
    run = s3_fakes.launch()
    s3_fakes.wait_until(lambda: up(run))
    elsewhere()
    there = Run(run.uri)
    assert there.state is RunState.RUNNING
    with pytest.raises(SubmitError, match=r"is running already.*its silence is noticed after 75 s"):
        s3_fakes.launch()
    with pytest.raises(SubmitError, match="is running"):
        there.resume()
    s3_fakes.monkeypatch.setattr("sm_llm.launcher.backends.local.local_run.SILENT_SECONDS", -1.0)
    assert there.state is RunState.INTERRUPTED
    s3_fakes.use("put(None)")
    again = s3_fakes.launch()
    assert (again.uri, again.continued_attempt) == (run.uri, 2)
    assert again.wait() is RunState.COMPLETED
    # The first machine was not dead: it learns that it has lost the run, and ends.
    s3_fakes.monkeypatch.undo()
    s3_fakes.wait_until(lambda: run.record.attempts[0].state is not None, seconds=150)
    assert run.record.attempts[1].state is RunState.COMPLETED
    s3_fakes.wait_until(lambda: not is_anyone_alive(run.root))  # it tells its end, then it ends


RACER = """
import pathlib, sys, time
from sm_llm.runs.s3_run_store import S3RunStore
from sm_llm.launcher.backends.local import backend as local
from sm_llm.launcher.backends.local.container import PORT, entry_script
from sm_llm.launcher.run import Run
uri, worker, gate, name = sys.argv[1], *map(pathlib.Path, sys.argv[2:4]), sys.argv[4]
local._torchrun = lambda job, node, rendezvous, base: (
    sys.executable, str(entry_script(base, job.task.kind)), str(node), rendezvous, PORT)
local.entrypoint_source = lambda kind: worker.read_text()
claim = S3RunStore.claim
def at_the_gate(*arguments):
    (gate / name).touch()  # it has looked, and found the run free
    while len(list(gate.iterdir())) < 2:
        time.sleep(0.01)
    claim(*arguments)
S3RunStore.claim = at_the_gate
try:
    Run(uri).resume()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def test_of_two_machines_that_continue_a_run_at_once_one_wins_and_one_line_reports_the_other(
    s3_fakes: Fakes, tmp_path: Path
) -> None:
    s3_fakes.use("put(2); raise ValueError('stop here')")
    run = s3_fakes.launch()
    s3_fakes.end(run)
    (tmp_path / "worker.py").write_text(s3_fakes.worker("print(os.environ['WHERE']); put(None)"))
    (tmp_path / "gate").mkdir()
    racers = {}
    for name in ("one", "two"):
        command = [sys.executable, "-c", RACER, run.uri, str(tmp_path / "worker.py"), str(tmp_path / "gate"), name]
        environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / name), "WHERE": name}
        racers[name] = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    reported = {name: racer.communicate(timeout=100)[1].strip() for name, racer in racers.items()}
    (winner,) = [name for name, racer in racers.items() if racer.returncode == 0]
    (loser,) = [text for text in reported.values() if text]
    assert len(loser.splitlines()) == 1
    assert loser.startswith(f"SubmitError: {run.id}: another launch was first, and has started attempt 2 on")
    assert s3_fakes.end(run) is RunState.COMPLETED
    assert [it.number for it in run.attempts] == [1, 2]
    assert list(run.logs()) == [winner]


def test_two_jobs_with_one_run_id_are_one_run(s3_fakes: Fakes, elsewhere: Elsewhere) -> None:
    s3_fakes.monkeypatch.setattr("sm_llm.launcher.lifecycle.generate_run_id", lambda name: f"{name}-same")
    s3_fakes.use(SLEEP)
    first = s3_fakes.launch(new=True)
    elsewhere()
    with pytest.raises(SubmitError, match="fake-same: there is a run of this id already"):
        s3_fakes.launch("task.max_steps=9", new=True)
    assert first.record.spec["task"]["max_steps"] == 8
    assert [it.number for it in first.attempts] == [1]
    s3_fakes.monkeypatch.undo()
    first.stop(now=True, wait=True)


def test_a_run_is_stopped_from_another_machine(s3_fakes: Fakes, elsewhere: Elsewhere) -> None:
    s3_fakes.use("put(2); " + SLEEP)
    run = s3_fakes.launch()
    s3_fakes.wait_until(lambda: up(run))
    here = os.environ["XDG_CACHE_HOME"]
    elsewhere()
    there = Run(run.uri)
    with pytest.raises(SubmitError, match="can be killed only there"):
        there.stop(now=True)
    there.stop()
    s3_fakes.wait_until(lambda: there.state.is_final)
    assert there.state is RunState.INTERRUPTED
    s3_fakes.monkeypatch.setenv("XDG_CACHE_HOME", here)
    s3_fakes.use("time.sleep(4); put(None)")
    again = s3_fakes.launch()
    assert again.wait() is RunState.COMPLETED, "a new attempt is not stopped by an old request"


def test_resume_at_a_step_branch_rerun_and_finish(s3_fakes: Fakes) -> None:
    s3_fakes.use("put(2); put(4); put(8); raise ValueError('after the last step')")
    run = s3_fakes.launch()
    with pytest.raises(RunFailed, match="after the last step"):
        run.wait()
    s3_fakes.use("stepped(3); put(4); raise ValueError('again')")
    s3_fakes.end(run.resume("task.optim.learning_rate=0.001", step=2))
    assert [it.step for it in run.checkpoints()] == [2, 4]
    assert run.record.changes == {2: ("task.optim.learning_rate=0.001",)}
    s3_fakes.use("assert job.spec.task.start.checkpoint.endswith('@4'); put(None)")
    branched = run.branch("task.max_steps=6")
    assert branched.wait() is RunState.COMPLETED, "\n".join(branched.logs())
    assert branched.storage == run.storage == s3_fakes.storage
    assert branched.record.spec["task"]["start"]["checkpoint"] == f"{run.uri}@4"
    s3_fakes.use("put(None)")
    assert run.rerun().wait() is RunState.COMPLETED


def test_what_cannot_be_started_leaves_the_attempt_to_the_next_launch(s3_fakes: Fakes) -> None:
    s3_fakes.use("put(None)")
    with s3_fakes.monkeypatch.context() as broken:
        broken.setattr("sm_llm.launcher.backends.local.local_run.SUPERVISOR", "sm_llm.launcher.nothing")
        with pytest.raises(SubmitError, match="could not start"):
            s3_fakes.launch()
    run = s3_fakes.launch()
    assert run.continued_attempt == 1
    assert run.wait() is RunState.COMPLETED


def test_a_workflow_in_S3_feeds_its_steps_by_address(s3_fakes: Fakes, elsewhere: Elsewhere) -> None:
    """In this process: a supervisor of its own would start real workers, as the integration test does."""
    s3_fakes.monkeypatch.setattr(processes, "kill_descendants", lambda: 0)
    train = s3_fakes.spec()["task"]
    prepare = {"kind": "prepare", "sources": ["builtin:python-docs"], "seq_length": 16}
    data = {"format": "rows", "train": "steps.one.output/train", "seq_length": 16}
    steps = {
        "one": {"task": {**prepare, "train_tokenizer": {"vocab_size": 300}}},
        "two": {"task": {**train, "data": data}},
    }
    s3_fakes.use(
        "if job.spec.task.kind == 'train':\n assert job.spec.task.data.train.startswith('s3://'), job.spec\n"
        " assert not job.channels\nprint(job.spec.task.kind); put(None)"
    )
    loaded = load({"name": "flow", "storage": s3_fakes.storage, "storage_options": s3_fakes.options, "steps": steps})
    run_store = run_store_at(f"{s3_fakes.storage}/flow-1", s3_fakes.options)
    run_store.create(new_record("flow-1", loaded.spec, loaded.digest, {}, [], created=1.0))
    assert workflow.run_workflow(run_store, processes.Interrupts()).state is RunState.COMPLETED, "\n".join(
        Run(run_store).logs()
    )
    elsewhere()
    there = Run(run_store.uri)
    assert there.state is RunState.COMPLETED
    assert [it.state for it in there.steps.values()] == [RunState.COMPLETED] * 2
    assert there.result == there.steps["two"].result
    assert list(there.logs()) == ["prepare", "train"]
    assert there.steps["two"].storage == s3_fakes.storage
    assert Run(f"{run_store.uri}/steps/two").id == "flow-1-two"


def test_following_from_another_machine_ends_with_the_run(s3_fakes: Fakes, elsewhere: Elsewhere) -> None:
    s3_fakes.use("for i in range(4):\n print('line', i, flush=True); time.sleep(0.3)\nput(None)")
    run = s3_fakes.launch()
    elsewhere()
    assert list(Run(run.uri).logs(follow=True)) == [f"line {i}" for i in range(4)]
    assert run.wait() is RunState.COMPLETED


def test_a_store_that_does_not_answer_is_one_clear_error(
    s3_fakes: Fakes, elsewhere: Elsewhere, capfd: pytest.CaptureFixture[str]
) -> None:
    from sm_llm.cli import main

    s3_fakes.use(EVENTS + "log.write(Step(3, 2.5, 1.0, 1e-3, 64)); put(None)")
    run = s3_fakes.launch()
    run.wait()
    assert run.metrics()
    s3_fakes.monkeypatch.setattr(
        "sm_llm.runs.s3_run_store.CONFIG", {"connect_timeout": 1, "retries": {"total_max_attempts": 1}}
    )
    s3_fakes.monkeypatch.setenv("SM_LLM_ENDPOINT_URL", "http://127.0.0.1:9")
    capfd.readouterr()
    for verb in (["status", run.uri], ["metrics", run.uri], ["logs", run.uri], ["ls", s3_fakes.storage]):
        s3_fakes.monkeypatch.setattr(sys, "argv", ["sm-llm", *verb])
        with contextlib.suppress(SystemExit):
            main()
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: s3://"), captured.err
        assert "Traceback" not in captured.err
        assert len(captured.err.strip().splitlines()) == 1
    with pytest.raises(StorageError):
        s3_fakes.launch(storage_options={"endpoint_url": "http://127.0.0.1:9"})


def test_ls_of_a_mistyped_address_states_that_nothing_is_there(
    s3_fakes: Fakes, s3_server: Any, bucket: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from sm_llm.cli import main

    s3_server.client.put_object(Bucket=bucket, Key="runs/empty/x", Body=b"x")

    def ls(address: str) -> tuple[int, str, str]:
        s3_fakes.monkeypatch.setattr(sys, "argv", ["sm-llm", "ls", address])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    mistyped = f"s3://{bucket}/rums"
    problem = f"{mistyped}: there is nothing below this address, so no run. Check it. Beside it there are: runs"
    assert ls(mistyped) == (2, "", f"error: {problem}\n")
    assert ls(f"s3://{bucket}/runs") == (0, f"no run yet in s3://{bucket}/runs\n", "")
    s3_server.client.put_object(Bucket=bucket, Key="runs/empty/run.json", Body=b"{}")
    assert "this is a run, not a folder of runs" in ls(f"s3://{bucket}/runs/empty")[2]


@pytest.mark.parametrize("way", ["watch", "wait", "logs"])
def test_whoever_follows_a_run_bears_a_store_that_is_down_for_a_while(
    s3_fakes: Fakes, elsewhere: Elsewhere, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    s3_fakes.use(EVENTS + "log.write(Step(3, 2.5, 1.0, 1e-3, 64)); print('line', flush=True); put(None)")
    run = s3_fakes.launch()
    run.wait()
    elsewhere()
    there, record, describe = Run(run.uri), S3RunStore.record, Run.describe
    clock = iter(range(100))

    def down_in_the_middle(run_store: S3RunStore) -> Any:
        if 3 <= next(clock) <= 5:
            raise StorageError(f"{run_store.uri}: cannot read 'run.json': no answer")
        return record(run_store)

    def running_at_first(self: Run) -> tuple[RunState, str | None]:
        found = describe(self)
        return found if next(clock) > 8 else (RunState.RUNNING, None)

    s3_fakes.monkeypatch.setattr(S3RunStore, "record", down_in_the_middle)
    s3_fakes.monkeypatch.setattr(Run, "describe", running_at_first)
    if way == "watch":
        reported = [
            event["message"]
            for it in follow(there, sleep=lambda _: None)
            if it and (event := it[1])["kind"] == "notice"
        ]
        assert "no answer. The run continues" in reported[0]
        assert reported[1:] == ["the run's storage answers again"]
    elif way == "wait":
        assert there.wait(sleep=lambda _: None) is RunState.COMPLETED
    else:
        assert list(there.logs(follow=True)) == ["line"]
    assert next(clock) > 8


def test_a_store_that_stays_down_ends_the_following_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm_llm.launcher.observe.retry_policy.PATIENCE_SECONDS", 0.0)
    fault = StorageError("s3://bucket/runs/job-1: no answer")
    retries = RetryPolicy(run_store_at("s3://bucket/runs/job-1"))
    assert retries.bear(fault) is not None
    with pytest.raises(StorageError, match="no answer"):
        retries.bear(fault)
    with pytest.raises(StorageError, match="no answer"):
        RetryPolicy(run_store_at("/runs/job-1")).bear(fault)


def test_S3_holds_no_secret_of_a_run(s3_fakes: Fakes, bucket: str, s3_server: Any) -> None:
    s3_fakes.monkeypatch.setenv("HUB_TOKEN", PLANTED)
    s3_fakes.use("put(2); put(None)")
    run = s3_fakes.launch(secrets={"HF_TOKEN": "env:HUB_TOKEN"})
    assert run.wait() is RunState.COMPLETED
    stored = objects(s3_server, bucket)
    assert f"runs/{run.id}/run.json" in stored
    assert f"runs/{run.id}/job.json" in stored
    assert f"runs/{run.id}/local/attempt-1/request.json" in stored
    for key, body in stored.items():
        assert PLANTED.encode() not in body, key


def test_beats_report_age_by_the_stores_clock_and_who_was_superseded(s3_fakes: Fakes, s3_server: Any) -> None:
    from sm_llm.storage.s3.s3_options import S3Options
    from sm_llm.storage.s3_store import S3Store

    bucket = str(s3_fakes.storage).split("/")[2]
    store = S3Store(bucket, "runs/x", S3Options(endpoint_url=s3_server.endpoint))
    assert heartbeat.silence(store) is None
    lost: list[int] = []
    one = heartbeat.Heartbeat(store, 1, lambda: lost.append(1))
    one.beat()
    age = heartbeat.silence(store)
    assert age is not None
    assert -2 <= age <= 5
    heartbeat.Heartbeat(store, 1).beat()
    one.beat(at_once=True)
    assert lost == [], "its own launcher's beat"
    heartbeat.Heartbeat(store, 2).beat()
    one.beat(at_once=True)
    assert lost == [1]
    body = store.get(heartbeat.KEY)
    assert body is not None
    assert json.loads(body)["attempt"] == 2


def test_a_claim_without_a_process_is_not_a_running_run(s3_fakes: Fakes) -> None:
    s3_fakes.use("put(2); raise ValueError('x')")
    run = s3_fakes.launch()
    s3_fakes.end(run)
    run.run_store.claim(Attempt.claim(2))
    assert run.state is RunState.INTERRUPTED, "its launcher was killed"
    s3_fakes.use("put(None)")
    again = s3_fakes.launch()
    assert again.continued_attempt == 3
    assert again.wait() is RunState.COMPLETED
    assert Path(run.root).is_dir()
