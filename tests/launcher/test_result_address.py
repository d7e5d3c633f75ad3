"""``RUN/result`` as a source: checked before a launch, resolved where links do not work, and given by estimators."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError
from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator
from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning.input_locations import assert_inputs_exist
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.runs.results import link_result, result_location
from sm_llm.runs.run_store import run_store_at
from sm_llm.spec.backends.local import LocalOptions
from sm_llm.storage.publication.find import find_final
from sm_llm.storage.publication.publish import new_save, publish, seal
from sm_llm.storage.publication.result import leave_pointers
from sm_llm.storage.uri import open_store
from tests.fixtures.sagemaker_calls import BUCKET, calls, job

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["calls"]


def published(uri: str, tmp_path: Path, **options: Any) -> None:
    """A run whose result holds ``train/x.txt``."""
    store = open_store(uri, options)
    store.put_if_absent("run.json", b"{}")
    working = tmp_path / "working"
    (working / "train").mkdir(parents=True)
    (working / "train" / "x.txt").write_text("x")
    save = new_save("run", None, world_size=1, node_count=1)
    publish(store, save, seal(working, tmp_path / "sealed"), node=0, leader=True, gather=lambda it: [it])


def test_C12_without_links_the_address_still_names_the_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    published(str(run), tmp_path)
    found = local_folder(str(run / "result" / "train"))
    assert found is not None
    assert (found / "x.txt").read_text() == "x"
    run_store = run_store_at(str(run), {})
    for _ in range(2):
        link_result(run_store, result_location(run_store, "run"))
        assert (run / "result" / "train" / "x.txt").read_text() == "x"
    assert sorted(it.name for it in run.iterdir() if it.name.startswith(".result")) == []


def test_C12_a_result_in_s3_is_looked_for_before_a_launch(
    tmp_path: Path, bucket: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"endpoint_url": s3_server.endpoint}
    published(f"s3://{bucket}/done", tmp_path, **options)
    open_store(f"s3://{bucket}/begun", options).put_if_absent("run.json", b"{}")
    task = {"kind": "prepare", "seq_length": 16, "train_tokenizer": {"vocab_size": 300}}

    def poll(location: str) -> str:
        sources = {**task, "sources": [f"s3://{bucket}/{location}"]}
        try:
            assert_inputs_exist(plan({"name": "x", "task": sources, "storage_options": options}))
        except PlanError as error:
            return str(error)
        return ""

    assert poll("done/result/train") == ""
    assert "is not there" in poll("done/result/other")
    assert "has not published it" in poll("begun/result/train")

    # A channel is what S3 holds there, and that is the pointers.
    monkeypatch.setattr(LocalOptions, "mounts_inputs", True)
    script = {"kind": "script", "entry": "-m json"}

    def mount(location: str) -> list[str]:
        inputs = {"x": f"s3://{bucket}/{location}"}
        try:
            assert_inputs_exist(plan({"name": "x", "task": script, "storage_options": options, "inputs": inputs}))
        except PlanError as error:
            return [f"{it.code} {it.path}: {it.remedy}" for it in error.issues]
        return []

    whole = f"result-part-not-mountable inputs.x: Give the whole result: inputs.x=s3://{bucket}/done/result"
    assert mount("done/result/train") == [whole]
    store = open_store(f"s3://{bucket}/done", options)
    leave_pointers(store, find_final(store))  # type: ignore[arg-type]
    assert (mount("done/result/train"), mount("done/result")) == ([], [])
    assert mount("done/result/train/x.txt") == [whole]


@pytest.mark.integration
def test_C12_an_estimator_reports_the_address_and_a_step_takes_it_or_the_artifacts(calls: list[Any]) -> None:
    from sagemaker.inputs import TrainingInput
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    session = PipelineSession(default_bucket=BUCKET)
    script = {"kind": "script", "entry": "-m x"}
    first = estimator(job("first", task=script), sagemaker_session=session)
    one = TrainingStep("one", step_args=first.fit())
    inputs = {
        "model": TrainingInput(one.properties.ModelArtifacts.S3ModelArtifacts, input_mode="File"),
        "same": TrainingInput(f"{first.result_uri}/", input_mode="File"),
    }
    second = estimator(job("second", task=script), sagemaker_session=session)
    two = TrainingStep("two", step_args=second.fit(inputs), depends_on=[one])
    found = json.loads(Pipeline("p", steps=[one, two], sagemaker_session=session).definition())["Steps"][1]
    locations = {
        it["ChannelName"]: it["DataSource"]["S3DataSource"]["S3Uri"] for it in found["Arguments"]["InputDataConfig"]
    }
    assert locations["model"] == {"Get": "Steps.one.ModelArtifacts.S3ModelArtifacts"}
    assert locations["same"] == f"{first.run_uri}/result/"
