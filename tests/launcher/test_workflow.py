"""Workflows in turn: steps feed one another, finished ones are skipped, the first failure ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.contract.run_paths import RunPaths
from sm_llm.contract.states import RunState
from sm_llm.launcher import api, processes, workflow
from sm_llm.launcher.run import Run
from sm_llm.launcher.stage import new_record
from sm_llm.spec.load import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Fakes = Any

PREPARE = """
if job.spec.task.kind == "prepare":
    info = '{"seq_length": %d, "rows": 9, "columns": ["input_ids"], "vocab_size": 300}'
    put(None, {"train/rows.json": info, "train/dataset_info.json": "{}", "train/state.json": "{}"})
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
        workflow.run_workflow(root, interrupts or processes.Interrupts())
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


def test_an_interrupt_between_steps_starts_no_other(turn: Callable[..., Run]) -> None:
    interrupts = processes.Interrupts()
    interrupts.count = 1
    run = turn("put(None)", interrupts=interrupts)
    assert run.state in (RunState.STOPPED, RunState.INTERRUPTED)
    assert "two" not in run.steps


def test_a_dry_run_shows_every_step_and_writes_nothing(fakes: Fakes) -> None:
    fakes.use("put(None)")
    one, two = api.launch(flow(fakes), dry_run=True)
    assert one.job.run_uri.endswith("/steps/one")
    assert two.job.spec.task.kind == "train"
    assert two.job.spec.task.data.format == "rows"
    assert two.job.spec.task.data.train == "steps.one.output/train", "not published yet, so not invented"
    assert not fakes.storage.exists()
