"""Whole runs in S3 with the real worker: two nodes train, are killed, continue, and are seen from another machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from sm_llm.cli import main
from sm_llm.launcher import api
from sm_llm.launcher.find_runs import attach
from sm_llm.launcher.run import Run
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.preloaded import Preloaded

Fakes = Any
LONGER = ("task.max_steps=60", "task.checkpoint.every_steps=6", "task.logging.every_steps=20", "task.seed=4")
PLANTED = f"planted-{secrets.token_hex(8)}"


def kill_everything(run: Run) -> None:
    supervisor = psutil.Process(int(run.attempts[-1].native_id))
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def exact(run: Run) -> list[tuple[int, str, str, str]]:
    return [
        (row["step"], row["loss"].hex(), row["grad_norm"].hex(), row["learning_rate"].hex()) for row in run.metrics()
    ]


def sm_llm(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sm_llm.cli", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=500)


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_fit_on_two_nodes_in_S3_killed_once_equals_a_run_in_a_folder_bit_for_bit(
    s3_fakes: Fakes,
    bucket: str,
    s3_server: Any,
    tmp_path: Path,
    elsewhere: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    preloaded: Preloaded,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def reported(*arguments: str) -> str:
        """What ``sm-llm`` prints, in this process."""
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["sm-llm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed, errors = capfd.readouterr()
        assert not ended.value.code, errors
        return printed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUB_TOKEN", PLANTED)
    spec = s3_fakes.spec(compute={"instance_count": 2}, secrets={"HF_TOKEN": "env:HUB_TOKEN"})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    unbroken = api.launch("job.yaml", *LONGER, f"storage={tmp_path / 'folder'}")
    assert unbroken.wait() is RunState.COMPLETED

    fit = ("fit", "job.yaml", *LONGER)
    preloaded.off()  # whole process trees are killed
    first = sm_llm(*fit, "--no-wait")
    assert first.returncode == 0, first.stderr
    run = attach(storage=s3_fakes.storage)
    s3_fakes.wait_until(lambda: run.checkpoints(), seconds=200)
    kill_everything(run)
    s3_fakes.wait_until(lambda: run.state is RunState.INTERRUPTED)

    preloaded.on()
    again = sm_llm(*fit)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "continues as attempt 2 of an unfinished run in s3://" in again.stdout
    assert f"sm-llm sync {run.result_link} ./{run.id}" in again.stdout
    assert [it.state for it in run.attempts] == [None, RunState.COMPLETED]
    assert run.attempts[1].start is not None
    assert run.attempts[1].start.step >= 6
    assert exact(run) == exact(unbroken)

    verbs = ("status", "metrics", "logs", "attempts", "checkpoints")
    here = [reported(verb, run.uri, "--json") for verb in verbs]
    events = list(read_events(run.events))
    elsewhere()
    there = Run(run.uri)
    assert [reported(verb, run.uri, "--json") for verb in verbs] == here
    assert list(read_events(there.events)) == events
    assert there.root != run.root
    reported("plot", run.uri, "-o", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert json.loads(reported("ls", s3_fakes.storage, "--json"))[0]["step"] == 60

    got = sm_llm("sync", str(run.result), str(tmp_path / "model"), "--endpoint-url", s3_server.endpoint)
    assert got.returncode == 0, got.stderr
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert files == {path.name: path.read_bytes() for path in unbroken.result.iterdir()}

    client = s3_server.client
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    for key in [it["Key"] for page in pages for it in page.get("Contents", ())]:
        assert PLANTED.encode() not in client.get_object(Bucket=bucket, Key=key)["Body"].read(), key


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_workflow_in_S3_prepares_and_trains(
    s3_fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: Preloaded
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"document {number}: " + "the quick brown fox " * 40)
    train = s3_fakes.spec()["task"]
    data = {"format": "rows", "train": "steps.one.output/train", "seq_length": 16}
    spec = {
        "name": "flow",
        "storage": s3_fakes.storage,
        "storage_options": s3_fakes.options,
        "steps": {
            "one": {
                "task": {
                    "kind": "prepare",
                    "sources": ["texts"],
                    "seq_length": 16,
                    "train_tokenizer": {"vocab_size": 300},
                }
            },
            "two": {"task": {**train, "data": data, "tokenizer": "steps.one.output/tokenizer"}},
        },
    }
    run = api.launch(spec)
    assert run.wait() is RunState.COMPLETED, "\n".join(run.logs())
    assert [row["step"] for row in run.metrics()] == list(range(1, 9))
    branched = run.branch("task.max_steps=10")
    assert branched.wait() is RunState.COMPLETED, "\n".join(branched.logs())
    assert [row["step"] for row in branched.metrics()] == [9, 10]
