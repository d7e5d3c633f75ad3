"""What a resume, a rerun and a plan would not heed is refused by name, once."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.failure import Cause
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.display.summary import _next as next_words
from sm_llm.launcher.lifecycle import recorded_spec
from sm_llm.launcher.planner import plan
from sm_llm.runs.run_record import Attempt, RequestedRun
from sm_llm.runs.run_states import RunState
from sm_llm.spec.comparison.leaves import declared
from sm_llm.spec.field_classes import FieldClass
from sm_llm.spec.job import JobSpec, WorkflowSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration


def test_A3_a_resume_refuses_what_has_no_effect_on_a_run_that_exists(fakes: Any, tmp_path: Path) -> None:
    fakes.use("put(1)\nraise SystemExit(1)")
    run = fakes.launch()
    fakes.end(run)
    before = run.record
    for change in ("name=other", f"storage={tmp_path}", "task.start=scratch", f"task.start.pretrained={tmp_path}"):
        with pytest.raises(PlanError, match="has no effect on a run that") as raised:
            run.resume(change)
        path = change.partition("=")[0]
        assert [it.path for it in raised.value.issues] == [path]
        assert f"sm-llm rerun {run.uri} {change}" in str(raised.value)
    assert run.record == before


@pytest.mark.parametrize("kind", [JobSpec, WorkflowSpec])
def test_A3_name_and_place_of_a_run_are_of_their_own_class(kind: Any) -> None:
    of_the_run = [
        name for name, it in kind.model_fields.items() if (d := declared(it)) and d.field_class is FieldClass.RUN
    ]
    assert of_the_run == ["name", "storage"]


def test_B4_an_ordinary_run_is_repeated_with_another_model(fakes: Any) -> None:
    fakes.use("put(1)\nput(None)")
    run = fakes.launch()
    fakes.end(run)
    again = run.rerun("task.model.config.num_hidden_layers=1")
    fakes.end(again)
    assert again.record.spec["task"]["model"]["config"]["num_hidden_layers"] == 1


@pytest.mark.parametrize("recipe", ["tiny-local", "smoke"])
def test_E20_a_missing_start_is_reported_by_its_path(recipe: str) -> None:
    with pytest.raises(PlanError) as raised:
        plan(recipe, "task.start.pretrained=/nope")
    (reported,) = [str(it) for it in raised.value.issues]
    assert re.search(r"task\.start\.pretrained \(override\): is not there \(got '/nope'\)", reported)


def test_B6_a_failure_of_the_data_does_not_promise_that_changed_data_continue(fakes: Any) -> None:
    fakes.use("put(1)\nraise SystemExit(1)")
    run = fakes.launch()
    fakes.end(run)
    status = replace(run.status(), reason=f"{Cause.DATA}: step 2: the global batch has no label to learn from")
    reported = next_words(run, status)
    assert "With the same data continue it from its newest checkpoint, step 1" in reported
    assert f"sm-llm branch {run.uri} task.start.allow_other_data=true" in reported
    assert "the same command continues" not in reported
    assert "the same command continues" in next_words(run, run.status())


def test_12f_no_second_command_stands_beside_the_one_of_a_reason(fakes: Any) -> None:
    fakes.use("put(1)\nraise SystemExit(1)")
    run = fakes.launch()
    fakes.end(run)
    way = f"Skip them: sm-llm resume {run.uri} task.not_finite.policy=skip"
    status = replace(run.status(), reason=f"{Cause.DATA}: step 2: the global batch has no label to learn from. {way}")
    reported = next_words(run, status)
    assert reported == "What to do is in the reason above; its newest checkpoint is of step 1."


def test_12f_a_refused_change_names_what_was_written_and_where(fakes: Any) -> None:
    fakes.use("put(1)\nraise SystemExit(1)")
    run = fakes.launch()
    fakes.end(run)
    record = run.record.model_copy(update={"origins": {"task.max_steps": "job.yaml:12"}})
    with pytest.raises(SpecError, match=r"task\.max_steps \(job\.yaml:12\): give exactly one"):
        recorded_spec(record, ["task.max_epochs=1"])
    with pytest.raises(PlanError) as refused:
        run.resume("task.start.checkpoint=x")
    assert [it.path for it in refused.value.issues] == ["task.start.checkpoint"]


def test_F2_changes_of_an_attempt_that_was_killed_with_its_supervisor_go_when_the_next_resume_begins(
    fakes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.use("put(1)\nraise SystemExit(1)")
    run = fakes.launch()
    fakes.end(run)
    before, change = run.record.asked(), "task.optim.learning_rate=0.5"
    # What a machine that lost its power leaves: the change, the attempt, and no end.
    asked = RequestedRun(**{**before.model_dump(), "spec_digest": "other"})
    lost = Attempt(number=2, native_id="999999999", started=run.record.created + 1)
    run.run_store.update(lambda held: held.changed(asked, 2, [change]).with_attempt(lost))
    assert run.state is RunState.INTERRUPTED
    fakes.use("put(2)\nraise SystemExit(1)")
    capsys.readouterr()
    again = run.resume()
    assert "attempt 2 ended before its first step, so the run has not kept its changes" in capsys.readouterr().err
    fakes.end(again)
    assert (again.record.asked(), again.record.changes) == (before, {})
    assert again.record.attempts[1].dropped_changes == (change,)
