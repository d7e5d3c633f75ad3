"""A whole pipeline, run twice and with one changed variable: prepare, train and register under the real toolkit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import boto3
import pytest

from sm_llm.launcher.backends.sagemaker.pipelines import pipeline_operations as pipelines
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import Register, definition
from sm_llm.launcher.find_runs import attach
from sm_llm.runs.events.events import read_events
from sm_llm.storage.publication.publish import find_final
from sm_llm.storage.uri import open_store
from tests.fixtures.pipeline_interpreter import Interpreter

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.preloaded import Preloaded
    from tests.fixtures.s3_server import S3Server
    from tests.fixtures.sagemaker_double import SageMakerDouble


def workflow(bucket: str) -> dict[str, Any]:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip
    return {
        "name": "flow",
        "backend": {
            "name": "sagemaker", "role": "arn:aws:iam::111122223333:role/train", "region": "us-east-1",
            "max_run_seconds": 3600, "image": "built",
            "image_uri": "111122223333.dkr.ecr.us-east-1.amazonaws.com/rehearsal:1",
        },
        "storage": f"s3://{bucket}/runs",
        "compute": {"instance_type": "ml.m5.2xlarge", "processes_per_instance": 1},
        "steps": {
            "prepare": {
                "task": {
                    "kind": "prepare", "sources": [f"s3://{bucket}/text/"], "seq_length": 16,
                    "train_tokenizer": {"vocab_size": 300},
                }
            },
            "train": {
                "task": {
                    "kind": "train",
                    "model": {"preset": "tiny", "config": small},
                    "data": {"format": "rows", "train": "steps.prepare.output/train", "seq_length": 16},
                    "tokenizer": "steps.prepare.output/tokenizer",
                    "max_steps": 3,
                    "precision": {"compute": "fp32"},
                }
            },
        },
    }  # fmt: skip


@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_f02_without_a_cache_every_execution_trains_in_a_run_of_its_own(
    s3_server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: Preloaded
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, s3_server.endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train = workflow(bucket)["steps"]["train"]["task"]
    task = {**train, "tokenizer": None, "data": {"format": "synthetic", "seq_length": 16, "rows": 40}}
    found = definition({**workflow(bucket), "steps": {"train": {"task": task}}}, cache_days=None)
    pipelines.store_files(found)
    interpreter = Interpreter(tmp_path, {})
    runs = []
    for number in (1, 2):
        assert interpreter.execute(found.to_json()) == {"train": "ran"}
        (step,) = found.to_json()["Steps"]
        (tag,) = [it["Value"] for it in step["Arguments"]["Tags"] if it["Key"] == "sm_llm:run"]
        assert tag["Std:Join"]["Values"][1:] == [{"Get": "Execution.PipelineExecutionId"}]
        runs.append(attach(f"{tag['Std:Join']['Values'][0]}/execution-{number}"))
    for run in runs:
        assert [event["step"] for event in read_events(run.events) if event["kind"] == "step"] == [1, 2, 3]
        assert run.attempts[-1].start is None or run.attempts[-1].start.source == "scratch"


@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_f01_a_hand_written_step_trains_for_every_value_and_for_a_spent_cache(
    s3_server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: Preloaded
) -> None:
    from sagemaker.workflow.parameters import ParameterFloat, ParameterInteger
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator

    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, s3_server.endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sagemaker.session.sts_regional_endpoint", lambda region: s3_server.endpoint)
    flow = workflow(bucket)
    data = {"format": "synthetic", "seq_length": 16, "rows": 40}
    task = {**flow["steps"]["train"]["task"], "tokenizer": None, "data": data}
    session = PipelineSession(boto3.session.Session(region_name="us-east-1"), default_bucket=bucket)
    rate, seed = ParameterFloat("Rate", 1e-3), ParameterInteger("Seed", 0)
    est = estimator(
        {**{name: flow[name] for name in ("backend", "storage", "compute")}, "name": "by-hand", "task": task},
        sagemaker_session=session,
        hyperparameters={"task.optim.learning_rate": rate, "task.seed": seed},
    )
    step = TrainingStep("train", step_args=est.fit())
    found = json.loads(Pipeline("hand", parameters=[rate, seed], steps=[step], sagemaker_session=session).definition())
    interpreter = Interpreter(tmp_path, {})
    for values in ({}, {"Rate": 1e-5}, {"Seed": 7}, {}):
        assert interpreter.execute(found, **values) == {"train": "ran"}
    (join,) = [it["Value"]["Std:Join"] for it in found["Steps"][0]["Arguments"]["Tags"] if it["Key"] == "sm_llm:run"]
    base = join["Values"][0]
    reported = {}
    for values in ("0.001/0", "1e-05/0", "0.001/7"):
        run = attach(f"{base}/{values}")
        steps = [event for event in read_events(run.events) if event["kind"] == "step"]
        reported[values] = (len(steps), steps[0]["loss"], steps[0]["learning_rate"])
        assert run.result is not None
    assert reported["1e-05/0"][2] != reported["0.001/0"][2]
    assert reported["0.001/7"][1] != reported["0.001/0"][1]
    first = attach(f"{base}/0.001/0")
    assert first.attempts[-1].native_id.endswith("pipelines-x-train-3"), "the fourth execution, whose cache was off"
    assert first.run_store.store.get("ckpt/retired/pipelines-x-train-0/final.json") is not None


@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_steps_are_cached_and_what_follows_reads_what_exists(
    s3_server: S3Server,
    sagemaker_double: SageMakerDouble,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    preloaded: Preloaded,
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, s3_server.endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(20):
        text = f"document {number} says hello to the world, over and over again. " * 5
        s3_server.client.put_object(Bucket=bucket, Key=f"text/{number}.txt", Body=text.encode())
    variables = {"Steps": "steps.train.task.max_steps"}
    register = Register("train", "models", "111122223333.dkr.ecr.us-east-1.amazonaws.com/serve:1")
    found = definition(workflow(bucket), variables=variables, register=register)
    pipelines.store_files(found)
    interpreter = Interpreter(tmp_path, {})
    assert interpreter.execute(found.to_json()) == {"prepare": "ran", "train": "ran", "register": "ran"}
    assert set(interpreter.execute(found.to_json()).values()) == {"cached"}
    third = interpreter.execute(found.to_json(), Steps=5)
    assert third == {"prepare": "cached", "train": "ran", "register": "ran"}
    requests = [asked for name, asked in sagemaker_double.requests if name == "CreateModelPackage"]
    containers = [it["InferenceSpecification"]["Containers"][0] for it in requests]
    locations = [it["ModelDataSource"]["S3DataSource"]["S3Uri"] for it in containers]
    assert len(locations) == 2, "an equal result is registered once"
    for location, steps in zip(locations, (3, 5), strict=True):
        uri = location.partition("/final/")[0]
        commit = find_final(open_store(uri))
        assert commit is not None
        assert commit.meta["steps"] == steps
        assert location == f"{uri}/{commit.save.data_prefix}"  # the save's files, and nothing beside them
        folder = open_store(location.rstrip("/"))
        assert {it.key for it in folder.list("")} == {entry.path for entry in commit.files}
        # the worker wrote the records that no launcher could
        run = attach(uri)
        assert [row["step"] for row in run.metrics()][-1] == steps
        assert run.attempts[-1].native_id.startswith("us-east-1/pipelines-x-train-")
