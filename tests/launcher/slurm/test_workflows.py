"""Workflows on Slurm: one job per step, each behind those that it reads from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.errors import SubmitError
from sm_llm.launcher.api import preview
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.slurm import workflows
from sm_llm.launcher.backends.slurm.backend import SlurmBackend
from sm_llm.launcher.backends.slurm.cluster import Cluster
from sm_llm.launcher.backends.slurm.shell import UNPACK
from sm_llm.launcher.backends.slurm.transport import CommandResult, LocalTransport
from sm_llm.launcher.build_submission import new_record
from sm_llm.launcher.submission import submit_workflow
from sm_llm.runs.run_record import Attempt
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import run_store_at
from sm_llm.spec.loading.load import load
from tests.launcher.slurm.conftest import TINY, VENV
from tests.launcher.slurm.test_slurm_end_to_end import SECONDS, job_of, spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from sm_llm.runs.run_store import RunStore
    from tests.fixtures.slurm import SlurmCluster

PREPARE = {"kind": "prepare", "seq_length": 64, "train_tokenizer": {"vocab_size": 300}}


def flow(folder: Path, **fields: Any) -> dict[str, Any]:
    """Rows, a program that checks them, and a training that reads the rows once the program has ended well."""
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2_000)
    program = folder / "program"
    program.mkdir(exist_ok=True)
    (program / "check.py").write_text(
        "import os, pathlib, sys\n"
        "rows = pathlib.Path(os.environ['SM_CHANNEL_ROWS'])\n"
        "print('rows', sorted(it.name for it in rows.iterdir()), sys.argv[1:])\n"
        f"sys.exit(0 if pathlib.Path({str(folder / 'accepted')!r}).exists() else 'the rows are not accepted')\n"
    )
    train = {**TINY["task"], "data": {"format": "rows", "train": "steps.rows.output/train", "seq_length": 64}}
    check = {"kind": "script", "entry": "check.py", "source": str(program), "args": ["inputs.rows"]}
    return {
        "name": "flow",
        "steps": {
            "rows": {"task": {**PREPARE, "sources": [str(folder / "corpus.txt")]}},
            "check": {"task": check, "inputs": {"rows": "steps.rows.output/train"}},
            "train": {"task": train, "after": ["check"]},
        },
        "compute": {"instance_count": 1, "processes_per_instance": 1},
        "storage": str(folder / "runs"),
        "backend": {**VENV, "shared_folder": str(folder)},
        **fields,
    }


def test_a_dry_run_shows_what_every_step_waits_for(tmp_path: Path) -> None:
    _, found = preview(flow(tmp_path))
    rows, check, train = (it.request for it in found)
    assert [it["after"] for it in (rows, check, train)] == [[], ["<rows>"], ["<rows>", "<check>"]]
    printed = "".join(it.document for it in found)
    assert printed.count("\n#SBATCH --job-name=") == 3
    assert "# Step train: sbatch --dependency=afterok:<rows>:<check> job.sh\n#!/bin/bash\n" in printed
    killed = "#SBATCH --kill-on-invalid-dep=yes\n"
    assert [killed in it["script"] for it in (rows, check, train)] == [False, True, True]
    job = found[2].job
    workflow_uri = job.run_uri.removesuffix("/steps/train")
    assert job.spec.task.data.train == f"{workflow_uri}/steps/rows/result/train"  # type: ignore[union-attr]
    assert job.run_id == f"{workflow_uri.rpartition('/')[2]}-train"


@dataclass
class Queue:
    """A login node that gives numbers to jobs, and refuses the one after ``most``."""

    most: int = 9
    where: str = "login"
    submitted: list[str] = field(default_factory=list)
    """What each job waits for."""
    cancelled: list[str] = field(default_factory=list)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        if argv[0] == "sh" and "sbatch" in argv[2]:
            if len(self.submitted) == self.most:
                return CommandResult(1, b"", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
            self.submitted.append(argv[-1])
            return CommandResult(0, f"{len(self.submitted)}\n".encode(), "")
        if argv[:3] == ["sh", "-c", UNPACK]:  # no job of it runs any code
            return CommandResult(0, b"", "")
        if argv[0] == "scancel":
            self.cancelled.append(argv[1])
        return LocalTransport().run(argv, stdin=stdin) if argv[0] in ("sh", "test") else CommandResult(0, b"", "")


def begun(folder: Path, queue: Queue, source: Any = None) -> tuple[RunStore, SlurmBackend]:
    """The workflow's record, and a backend whose login node is ``queue``."""
    loaded = load(source or flow(folder))
    run_store = run_store_at(folder / "runs" / "flow-1")
    run_store.create(new_record("flow-1", loaded.spec, loaded.digest, {}, [], created=1.0))
    return run_store, SlurmBackend(connect=lambda _: Cluster(queue))


def test_steps_are_submitted_behind_one_another(tmp_path: Path) -> None:
    queue = Queue()
    run_store, target = begun(tmp_path, queue)
    assert submit_workflow(target, run_store, 1) == "localhost/1,2,3"
    assert queue.submitted == ["", "afterok:1", "afterok:1:2"]
    assert [it.record().attempts[0].native_id for _, it in workflows.steps_of(run_store, run_store.record())] == [
        "localhost/1", "localhost/2", "localhost/3",
    ]  # fmt: skip
    native = target.parse_native("slurm://localhost/1,2,3")
    assert native is not None
    assert native.find_run() is None
    assert run_store.record().attempts[0].native_uri("slurm") == native.uri


def test_a_step_that_is_refused_takes_the_others_with_it(tmp_path: Path) -> None:
    queue = Queue(most=2)
    run_store, target = begun(tmp_path, queue)
    with pytest.raises(SubmitError, match="QOSMaxSubmitJobPerUserLimit"):
        submit_workflow(target, run_store, 1)
    assert queue.cancelled == ["2", "1"]
    assert run_store.record().attempts == ()


@pytest.mark.parametrize(
    ("states", "state", "reason"),
    [
        (["completed", "failed", "stopped"], RunState.FAILED, "step check: words of check"),
        (["completed", "interrupted-resumable", "stopped"], RunState.INTERRUPTED, "step check: words of check"),
        (
            ["completed", "failed", "running"],
            RunState.RUNNING,
            "step check: words of check; step train: words of train",
        ),
        (["restarting", "pending", "pending"], RunState.RESTARTING, "step rows: words of rows"),
        (["completed", "unknown", "pending"], RunState.UNKNOWN, "step check: words of check"),
        (["completed", "completed-unpublished", "stopped"], RunState.COMPLETED_UNPUBLISHED, "step check"),
        (["completed", "completed-unchanged", "completed"], RunState.COMPLETED, ""),
    ],
    ids=str,
)
def test_the_state_of_a_workflow(states: list[str], state: RunState, reason: str, tmp_path: Path) -> None:
    run_store, target = begun(tmp_path, Queue())
    submit_workflow(target, run_store, 1)
    reported = dict(zip(("rows", "check", "train"), states, strict=True))

    def describe(location: RunStore) -> NativeState:
        return NativeState(RunState(reported[location.root.name]), f"words of {location.root.name}")

    native = workflows.state_of(run_store, run_store.record(), describe)
    assert native.state is state
    assert reason in native.detail
    assert run_store.record().attempts[0].state is (state if state.is_final else None)


def test_a_launcher_that_died_leaves_a_workflow_that_ends(tmp_path: Path) -> None:
    run_store, target = begun(tmp_path, Queue())
    run_store.claim(Attempt(number=1, native_id="", started=1.0))
    run_store.update(lambda held: held.with_attempt(Attempt(number=1, native_id="", started=1.0)))
    native = target.describe(run_store)
    assert (native.state, native.detail) == (RunState.STOPPED, "step rows: its job was never submitted")


def test_waiting_steps_are_cancelled_before_the_running_one_is_asked_to_stop(tmp_path: Path) -> None:
    queue = Queue()
    run_store, target = begun(tmp_path, queue)
    submit_workflow(target, run_store, 1)
    states = {"rows": RunState.COMPLETED, "check": RunState.RUNNING, "train": RunState.PENDING}
    workflows.stop(
        run_store, run_store.record(), Cluster(queue), lambda it: NativeState(states[it.root.name]), now=True
    )
    assert queue.cancelled == ["3", "2"]


def steps(run: Run) -> list[RunState]:
    return [it.state for it in run.status().steps]


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_prepare_check_train_on_a_cluster(slurm: SlurmCluster, tmp_path: Path) -> None:
    backend = spec(tmp_path)["backend"]
    run = sm_llm.launch(flow(tmp_path, backend=backend, environment={"OMP_NUM_THREADS": "1"}))
    slurm.await_state(lambda: run.state.is_final, SECONDS)
    assert (run.state, steps(run)) == (RunState.FAILED, [RunState.COMPLETED, RunState.FAILED, RunState.STOPPED])
    assert str(run.status().reason).startswith("step check: ")
    assert "the rows are not accepted" in "\n".join(run.steps["check"].logs())
    assert run.steps["train"].status().reason == "cancelled: a job that it waits for has failed"

    (tmp_path / "accepted").touch()
    again = run.resume()
    first = job_of(again.steps["rows"])
    assert again.wait() is RunState.COMPLETED
    assert [len(it.attempts) for it in again.steps.values()] == [1, 2, 2]
    assert job_of(again.steps["rows"]) == first
    assert any("rows ['data-" in line or "rows ['dataset" in line for line in again.steps["check"].logs())
    assert len(again.metrics()) == TINY["task"]["max_steps"]
    assert (again.root / "result" / "config.json").is_file()
