"""The examples: planned as they are or with the capitals filled in, and run where that is cheap."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import sm_llm
from sm_llm.errors import RunFailed
from sm_llm.runs.run_states import RunState
from tests.fixtures.sagemaker_calls import calls
from tests.golden.previous_run import unpack

__all__ = ["calls"]

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_every_example_is_listed_and_tested_here() -> None:
    folders = {it.name for it in EXAMPLES.iterdir() if it.is_dir()}
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)/", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in listed] == [folder for _, folder in listed]
    assert {name for name, _ in listed} == folders
    assert all(f'"{name}' in Path(__file__).read_text() for name in folders)


def test_two_gpus_starts_a_process_for_each() -> None:
    (plan,) = sm_llm.plan(EXAMPLES / "two_gpus/job.yaml")
    assert [("--nproc-per-node=2" in command) for command in plan.command] == [True]
    (plan,) = sm_llm.plan(EXAMPLES / "two_gpus/job.yaml", "task.parallelism.tensor_parallel_degree=2")
    assert not plan.warnings


def test_a_fine_tune_is_planned_for_a_model_and_rows(tmp_path: Path) -> None:
    unpack(tmp_path / "runs")
    model = next(tmp_path.glob("runs/whole-*")) / "result"
    rows = tmp_path / "rows"
    rows.mkdir()
    line = json.dumps({"input_ids": list(range(16)), "attention_mask": [1] * 16})
    (rows / "rows.json").write_text(f"{line}\n" * 64)
    data = {"format": "json_rows", "train": str(rows), "validation": str(rows), "seq_length": 16}
    (plan,) = sm_llm.plan(
        EXAMPLES / "fine_tune/job.yaml",
        {"task.data": data, "task.start.pretrained": str(model)},
        "task.tokenizer=null",
    )
    assert plan.derived is not None
    assert plan.derived.accumulation_steps == 32
    assert plan.model is not None
    assert plan.model.parameters == 3376


@pytest.mark.integration
def test_a_pipeline_has_two_steps_and_the_second_reads_what_the_first_publishes(
    calls: list[Any],
) -> None:
    import boto3
    from sagemaker.workflow.pipeline_context import PipelineSession

    example = runpy.run_path(str(EXAMPLES / "pipeline/pipeline.py"))
    region = example["BACKEND"]["region"]
    where = {"LocationConstraint": region}
    boto3.client("s3", region_name=region).create_bucket(Bucket=example["BUCKET"], CreateBucketConfiguration=where)
    session = PipelineSession(boto3.session.Session(region_name=region), default_bucket=example["BUCKET"])
    found = json.loads(example["build"](session).definition())
    first, second = found["Steps"]
    assert (first["Name"], second["Name"], second["DependsOn"]) == ("Prepare", "Train", ["Prepare"])
    locations = {
        it["ChannelName"]: it["DataSource"]["S3DataSource"]["S3Uri"] for it in second["Arguments"]["InputDataConfig"]
    }
    run = next(it["Value"] for it in first["Arguments"]["Tags"] if it["Key"] == "sm_llm:run")
    assert locations["prepared"] == f"{run}/result"
    rate = second["Arguments"]["HyperParameters"]["task.optim.learning_rate"]
    assert rate == {"Std:Join": {"On": "", "Values": [{"Get": "Parameters.LearningRate"}]}}


def test_own_script_is_planned_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "own_script")
    (plan,) = sm_llm.plan("job.yaml")
    assert plan.world_size == 2
    assert not plan.warnings


@pytest.mark.integration
def test_own_script_trains_and_continues_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: Any
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path])))
    monkeypatch.chdir(EXAMPLES / "own_script")
    storage = f"storage={tmp_path / 'runs'}"
    run = sm_llm.launch("job.yaml", storage, "compute.processes_per_instance=1", "task.args.steps=1000000")
    deadline = time.monotonic() + 200
    while not any(info.valid for info in run.checkpoints()):
        assert not run.state.is_final, "\n".join(run.logs(tail=50))
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.stop()
    with pytest.raises(RunFailed):
        run.wait()
    assert run.state is RunState.INTERRUPTED
    newest = [info.step for info in run.checkpoints() if info.valid][-1]
    resumed = run.resume(f"task.args.steps={newest + 20}")
    assert resumed.wait() is RunState.COMPLETED
    rows = [row for row in resumed.metrics() if row["attempt"] == 2]  # the first attempt may have logged later steps
    assert [row["step"] for row in rows][-2:] == [newest + 10, newest + 20]
    assert rows[-1]["loss"] < 1e-3
    assert {it.name for it in resumed.result.iterdir()} >= {"model.pt"}
