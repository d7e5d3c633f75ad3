"""Workflows in turn: steps feed one another, finished ones are skipped, the first failure ends it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.errors import CheckpointError, PlanError, StorageError, SubmitError
from sm_llm.launcher import api
from sm_llm.launcher.backends.local import processes, workflow
from sm_llm.launcher.backends.local.backend import LocalBackend
from sm_llm.launcher.build_submission import new_record
from sm_llm.launcher.find_runs import attach
from sm_llm.launcher.run import Run
from sm_llm.launcher.unfinished import UnfinishedRun
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import FolderRunStore, RunStore
from sm_llm.spec.loading.load import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.runs.run_record import RunRecord

pytestmark = pytest.mark.integration

Fakes = Any

PREPARE = """
if job.spec.task.kind == "prepare":
    info = '{"seq_length": %d, "rows": 9, "columns": ["input_ids"], "vocab_size": 300}'
    put(None, {"train/rows.json": info, "train/dataset_info.json": "{}", "train/rows.arrow": "x",
         "train/state.json": '{"_data_files": [{"filename": "rows.arrow"}]}'})
    sys.exit(0)
"""


def flow(fakes: Fakes) -> dict[str, Any]:
    train = fakes.spec()["task"]
    prepare = {"kind": "prepare", "sources": ["builtin:python-docs"], "seq_length": 16}
    data = {"format": "rows", "train": "steps.one.output/train", "seq_length": 16}
    return {
        "name": "flow",
        "storage": str(fakes.storage),
        "steps": {
            "one": {"task": {**prepare, "train_tokenizer": {"vocab_size": 300}}},
            "two": {"task": {**train, "data": data}},
        },
    }


@pytest.fixture
def turn(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """One attempt of the workflow in this process; ``text`` is what the worker of step two does."""
    # The supervisor kills orphans among its children; this process's children are pytest's business.
    monkeypatch.setattr(processes, "kill_descendants", lambda: 0)
    root: Path = fakes.storage / "flow-1"

    def run(text: str, *, seq_length: int = 16, interrupts: processes.Interrupts | None = None) -> Run:
        fakes.use(PREPARE % seq_length + text)
        if not root.exists():
            loaded = load(flow(fakes))
            new_record("flow-1", loaded.spec, loaded.digest, {}, [], created=1.0).write(RunPaths(root).record)
        workflow.run_workflow(FolderRunStore(root), interrupts or processes.Interrupts())
        return Run(root)

    return run


def test_a_workflow_feeds_one_step_to_the_next(turn: Callable[..., Run]) -> None:
    run = turn("put(None)")
    assert run.state is RunState.COMPLETED, run.status().reason
    one, two = run.steps.values()
    assert (one.kind, two.kind, run.kind) == ("prepare", "train", "workflow")
    job = JobFile.read(two.paths.job_file)
    assert job.run_id == "flow-1-two"
    assert job.spec.task.kind == "train"
    assert job.spec.task.data.format == "rows"
    assert job.spec.task.data.train == f"{one.result}/train"
    assert job.channels["data_train"] == f"{one.result}/train"
    assert run.result == two.result
    assert (run.root / "result").resolve() == two.result
    assert [step.state for step in run.status().steps] == [RunState.COMPLETED] * 2


def test_the_first_step_that_fails_ends_it_and_finished_steps_are_skipped_later(turn: Callable[..., Run]) -> None:
    run = turn("raise OSError('no space left')")
    assert run.state is RunState.FAILED
    assert run.status().reason == "step two: OSError: no space left"
    assert run.result is None
    assert turn("put(None)").state is RunState.COMPLETED
    one, two = run.steps.values()
    assert [len(step.attempts) for step in (one, two, run)] == [1, 2, 2]


def test_a_step_is_planned_again_with_what_the_earlier_one_really_wrote(turn: Callable[..., Run]) -> None:
    run = turn("put(None)", seq_length=32)
    assert run.state is RunState.FAILED
    assert "step two: task.data.seq_length" in str(run.status().reason)
    assert "32 tokens each" in str(run.status().reason)


def test_an_end_that_the_storage_did_not_take_at_first_is_recorded_as_it_was(
    turn: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's result is published and its end is in the event log, then the record cannot be written."""
    update = FolderRunStore.update
    refused: list[str] = []

    def away_once(self: FolderRunStore, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        if change(self.record()).outcome is not None and self.uri not in refused:
            refused.append(self.uri)
            raise StorageError("the store is away")
        return update(self, change)

    monkeypatch.setattr(FolderRunStore, "update", away_once)
    run = turn("put(None)")
    assert len(refused) == 3, "two steps and the workflow"
    for it in (*run.steps.values(), run):
        assert it.record.outcome is RunState.COMPLETED, it.record.attempts
        ends = [event for event in read_events(it.paths.events) if event["kind"] == "attempt_ended"]
        assert [event["state"] for event in ends] == ["completed"]


def test_A3_a_step_that_has_its_result_takes_no_changes(
    fakes: Fakes, turn: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    three = {**flow(fakes), "steps": {**flow(fakes)["steps"], "three": flow(fakes)["steps"]["two"]}}
    monkeypatch.setitem(globals(), "flow", lambda fakes: three)
    run = turn("put(None) if job.run_id.endswith('-two') else sys.exit(1)")
    before = run.record
    assert [step.result is not None for step in run.steps.values()] == [True, True, False]
    for change in ("steps.one.task.seed=3", "steps.two.task.optim.learning_rate=0.001"):
        with pytest.raises(PlanError, match="has no effect: this step has its result") as raised:
            run.resume(change)
        assert [fault.path for fault in raised.value.issues] == [change.partition("=")[0]]
        with pytest.raises(UnfinishedRun) as unfinished:
            api.launch(three, change)
        assert change.partition("=")[0] in str(unfinished.value)
        assert "Continue it with the changes" not in str(unfinished.value), "a resume would refuse them"
        assert f"sm-llm resume {run.uri}" in str(unfinished.value)
    with pytest.raises(
        UnfinishedRun, match=r"with the changes: sm-llm resume \S+ steps.three.task.optim.learning_rate="
    ):
        api.launch(three, "steps.three.task.optim.learning_rate=0.001")
    assert run.record == before


def test_an_interrupt_between_steps_starts_no_other(turn: Callable[..., Run]) -> None:
    class Asked(processes.Interrupts):
        count = 1

    run = turn("put(None)", interrupts=Asked())
    assert run.state in (RunState.STOPPED, RunState.INTERRUPTED)
    assert "two" not in run.steps


def test_a_stop_file_of_the_workflow_stops_its_running_step_and_nothing_later(turn: Callable[..., Run]) -> None:
    run = turn("put(2); RunPaths(paths.root.parents[1]).stop_file.touch(); time.sleep(300)")
    assert run.state is RunState.INTERRUPTED
    assert run.status().reason == "step two: asked to stop; the newest checkpoint is safe"
    assert turn("put(None)").state is RunState.COMPLETED


def test_a_stop_file_of_a_step_stops_no_later_attempt(turn: Callable[..., Run]) -> None:
    run = turn("put(2); raise OSError('no space left')")
    run.steps["two"].paths.stop_file.touch()
    again = turn("assert not paths.stop_file.exists(); put(None)")
    assert again.state is RunState.COMPLETED, again.status().reason


def test_a_dry_run_shows_every_step_and_writes_nothing(fakes: Fakes) -> None:
    fakes.use("put(None)")
    one, two = api.launch(flow(fakes), dry_run=True)
    assert one.job.run_uri.endswith("/steps/one")
    assert two.job.spec.task.kind == "train"
    assert two.job.spec.task.data.format == "rows"
    assert two.job.spec.task.data.train == "steps.one.output/train", "not published yet, so not invented"
    assert not fakes.storage.exists()


@pytest.fixture
def at_once(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """``fakes`` whose workflows run in this process, in the folder that their supervisor would be given."""
    monkeypatch.setattr(processes, "kill_descendants", lambda: 0)

    def submit_workflow(self: Any, run_store: RunStore, attempt: int) -> str:
        with contextlib.chdir(run_store.record().host["folder"]):
            workflow.run_workflow(run_store, processes.Interrupts())
        return str(attempt)

    monkeypatch.setattr(LocalBackend, "submit_workflow", submit_workflow)
    return fakes


def test_a_workflow_is_resumed_from_another_folder_with_changes(
    at_once: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "texts").mkdir(parents=True)
    (here / "texts" / "a.txt").write_text("some text")
    there.mkdir()
    monkeypatch.chdir(here)
    spec = flow(at_once)
    spec["steps"]["one"]["task"]["sources"] = ["texts"]
    at_once.use("raise OSError('no space left')")
    run = api.launch(spec)
    assert run.state is RunState.FAILED
    with pytest.raises(CheckpointError, match="no finished step and no checkpoint"):
        run.resume()
    at_once.use(PREPARE % 16 + "put(2); raise OSError('no space left')")
    assert api.launch(spec).continued_attempt == 2
    monkeypatch.chdir(there)
    with pytest.raises(SubmitError, match=r"name the training run below it: .*/steps/two"):
        run.resume(step=2)
    two = run.steps["two"]
    before, of_step = run.record.asked(), two.record.asked()
    at_once.use(PREPARE % 16 + "assert job.spec.task.seed == 9, job.spec.task; raise OSError('no such device')")
    failed = attach(run.uri).resume("steps.two.task.seed=9")
    # No step of the workflow has worked with the change, so neither the workflow nor the step keeps it.
    assert (failed.record.asked(), two.record.asked(), failed.record.changes) == (before, of_step, {})
    assert failed.record.attempts[-1].dropped_changes == ("steps.two.task.seed=9",)
    assert "no such device" in str(failed.record.attempts[-1].reason)
    at_once.use(PREPARE % 16 + "assert job.spec.task.seed == 7, job.spec.task; put(None)")
    again = attach(run.uri).resume("steps.two.task.seed=7")
    assert again.state is RunState.COMPLETED, again.status().reason
    one, two = again.steps.values()
    assert sources(one) == [str(here / "texts")]
    assert two.record.spec["task"]["seed"] == 7
    assert JobFile.read(two.paths.job_file).spec_digest == two.record.spec_digest
    assert again.record.changes == {4: ("steps.two.task.seed=7",)}
    assert two.storage == str(at_once.storage)
    rerun = again.rerun()
    assert rerun.record.spec_digest == again.record.spec_digest
    assert sources(rerun.steps["one"]) == [str(here / "texts")]


def sources(run: Run) -> list[str]:
    """What a prepare step read."""
    task = JobFile.read(run.paths.job_file).spec.task
    assert task.kind == "prepare"
    return task.sources
