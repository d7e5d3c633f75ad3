"""What a person sees of plans and of runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from sm_llm.errors import warning
from sm_llm.launcher.backends.sagemaker.request.request import SageMakerTarget
from sm_llm.launcher.display.tables import metrics_table, plan_table, runs_table, status_table
from sm_llm.launcher.observe.listed import Listed
from sm_llm.launcher.observe.status import Status
from sm_llm.launcher.planner import plan
from sm_llm.runs.events.run_metrics import Summary, summarise
from sm_llm.runs.run_states import RunState
from tests.launcher.sagemaker.conftest import TINY


def shown(table: Any, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_a_plan_shows_what_is_rented_and_not_the_command_of_every_node() -> None:
    (made,) = plan(TINY, "compute.instance_count=16")
    text = shown(plan_table(made))
    assert "sagemaker: 16 x ml.p5.48xlarge, 16 x 8 = 128 processes" in text
    assert "--node_rank 1 " in text
    assert "--node_rank 2 " not in text
    assert "and so on to node 15" in text
    assert len(made.to_json()["command"]) == 16


def test_the_machines_of_groups_are_shown() -> None:
    groups = [
        {"name": name, "instance_type": f"ml.{name}.48xlarge", "instance_count": count}
        for name, count in (("p5", 2), ("p5e", 1))
    ]
    (made,) = plan(TINY, "compute.instance_count=3", backend={"instance_groups": groups})
    assert "2 x ml.p5.48xlarge and 1 x ml.p5e.48xlarge, 3 x 8 = 24 processes" in shown(plan_table(made))


def test_brackets_in_what_is_shown_are_no_markup() -> None:
    (made,) = plan(TINY)
    assert isinstance(made.target, SageMakerTarget)
    target = replace(made.target, image_uri="s3://bucket/[/x]")
    odd = replace(made, target=target, issues=(warning("sources-odd", "task.sources", "[/a] and [red] are odd"),))
    text = shown(plan_table(odd))
    assert "s3://bucket/[/x]" in text
    assert "[/a] and [red] are odd" in text


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.FAILED, RunState.RESTARTING])
def test_every_state_comes_with_its_reason(state: RunState) -> None:
    """Waiting for capacity, or a KeyError: '[/x]'."""
    assert f"{state.value}: waiting for [/x]" in shown(status_table(status_of(state)))


def test_who_waits_for_capacity_does_not_run_yet() -> None:
    """Nobody is billed before."""
    assert "waiting since" in shown(status_table(status_of(RunState.PENDING)))
    assert "running since" in shown(status_table(status_of(RunState.RUNNING)))


def test_a_plan_and_a_status_name_the_kernel_of_attention_and_a_status_how_the_start_went() -> None:
    (made,) = plan(TINY)
    assert "cudnn (expected" in shown(plan_table(made))
    assert made.to_json()["attention"] == "cudnn"
    phases = {"importing": 12.0, "idle": 0.01, "step": 7.99}
    events: list[dict[str, Any]] = [
        {"kind": "attempt_started", "total_steps": 9},
        {"kind": "attention_chosen", "attention": "flash", "expected": "cudnn", "reasons": ["no"]},
        {"kind": "start_measured", "step": 1, "seconds": 20.0, "phases": phases},
    ]
    table = status_table(replace(status_of(RunState.RUNNING), progress=summarise(events)))
    text = " ".join(shown(table).split())
    assert " attention flash " in text
    assert " start-up step 1 done 20.0 s after the start: importing 12.0 s, step 8.0 s" in text
    again = summarise([*events, events[0]])
    assert (again.attention, again.start_up) == (None, None), "of the newest attempt"


def status_of(state: RunState) -> Status:
    return Status(
        "job-1", "s3://bucket/runs/job-1", "train", state, "waiting for [/x]", 1, "us-west-2/job-1",
        "sagemaker://us-west-2/job-1", 10.0, None, Summary(), None, {}, None,
    )  # fmt: skip


def test_12f_values_that_a_program_logs_have_columns_or_are_named() -> None:
    rows = [{"step": 1, "attempt": 1, "loss": 2.0, "foo": 0.25, "top_k": 12345.0}]
    wide = shown(metrics_table(rows, 200), 200)
    for words in ("foo", "0.25", "top_k", "12345", "loss", "2.0000"):
        assert words in wide
    assert "grad norm" not in wide, "no row has a value for it"
    narrow = shown(metrics_table(rows, 22), 22)
    assert "too narrow for" in narrow
    assert "foo" in narrow
    own = [{"step": 1, "attempt": 1, "loss": 2.0, "tokens": 64}]
    assert "tokens" not in shown(metrics_table(own, 200)).replace("tokens per second", ""), "it is ours"


def test_12f_a_state_stays_whole_in_a_narrow_terminal() -> None:
    run = Listed("broken-resume-20261129-172230-e748", "/runs/x", "train", RunState.INTERRUPTED)
    lines = shown(runs_table([run], 56), 56).splitlines()
    first = next(number for number, line in enumerate(lines) if run.run_id in line)
    assert "".join(line.split()[-1] for line in lines[first : first + 2]) == "interrupted-resumable"
