"""Public reports of errors of requests, sessions and pipelines that belong to no other module; each named by its id."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError, SpecError, SubmitError
from sm_llm.launcher import aws_account as accounts
from sm_llm.launcher.api import launch
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import definition
from sm_llm.launcher.backends.sagemaker.sdk.sdk_arguments import arguments
from sm_llm.launcher.find_runs import attach
from sm_llm.launcher.tools.shell import shell, shell_command
from sm_llm.storage.s3.s3_client import as_session, connect
from sm_llm.storage.s3.s3_options import S3Options
from tests.launcher.sagemaker.conftest import SCRIPT, TINY, render

if TYPE_CHECKING:
    from tests.fixtures.s3_server import S3Server
    from tests.fixtures.sagemaker_double import SageMakerDouble


def test_HP20_what_the_service_quotes_twice_is_bare_in_the_record(
    bucket: str, s3_server: S3Server, sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_LLM_ENDPOINT_URL", s3_server.endpoint)
    storage = {"storage": f"s3://{bucket}/runs", "storage_options": {"endpoint_url": s3_server.endpoint}}
    name = launch({**TINY, **storage}).attempts[-1].native_id.partition("/")[2]
    described = sagemaker_double.jobs[name]
    quoted = described["HyperParameters"]["sagemaker_submit_directory"]
    assert quoted.startswith('"s3://')  # what the toolkit wants
    found = attach(described["TrainingJobArn"])
    shown = found.record.model_copy(update={"git": None})  # the diff of a checkout may hold anything
    assert '\\"s3://' not in shown.to_text()
    assert arguments(described)["source_dir"] == quoted.strip('"')
    assert arguments(described)["entry_point"] == "train.py"


def test_SR21_one_session_serves_every_call_of_a_job(
    bucket: str, s3_server: S3Server, sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    fresh = accounts.fresh_session

    def counted() -> Any:
        made.append(fresh())
        return made[-1]

    accounts.account.cache_clear()
    monkeypatch.setattr(accounts, "fresh_session", counted)
    storage = {"storage": f"s3://{bucket}/runs", "storage_options": {"endpoint_url": s3_server.endpoint}}
    run = launch({**TINY, **storage})
    name = run.attempts[-1].native_id.partition("/")[2]
    sagemaker_double.move(name, "Training")
    list(run.logs())
    run.stop()
    sagemaker_double.move(name, "Stopped")
    run.describe()
    assert len(made) == 1
    accounts.account.cache_clear()


def test_SR21_what_is_stored_for_a_session_uses_its_credentials() -> None:
    import botocore.session

    assumed = botocore.session.get_session()
    assumed.set_credentials("ASSUMED", "secret", "token")
    with as_session(assumed):
        assert connect(S3Options())[0] is assumed
    assert connect(S3Options())[0] is not assumed


def flow(**changes: Any) -> dict[str, Any]:
    job = {"task": SCRIPT["task"], "compute": SCRIPT["compute"]}
    return {
        "name": "flow",
        "backend": SCRIPT["backend"],
        "storage": SCRIPT["storage"],
        "steps": {"run": job},
        **changes,
    }


@pytest.mark.parametrize("length", [256, 257, 3000])
def test_PL05_arguments_of_any_length_lie_in_S3_and_not_in_the_step(length: int) -> None:
    text = "d" * length
    long = {**flow()["steps"]["run"], "task": {**SCRIPT["task"], "args": ["--description", text]}}
    found = definition(flow(steps={"run": long}))
    assert text not in json.dumps(found.to_json())
    (body,) = (body for uri, body in found.steps[0].uploads.items() if uri.endswith("job.json"))
    assert json.loads(body)["spec"]["task"]["args"][1] == text


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"name": "n" * 257}, "name"),
        ({"steps": {"s" * 65: flow()["steps"]["run"]}}, "steps." + "s" * 65),
        ({"name": "my_flow"}, "name"),
    ],
    ids=["a long name", "a long step", "an underscore"],
)
def test_PL05_names_that_the_service_refuses_are_reported_early(changes: dict[str, Any], path: str) -> None:
    with pytest.raises((PlanError, SpecError)) as caught:
        definition(flow(**changes))
    assert path in {fault.path for fault in caught.value.issues}


def test_OB14_a_derived_time_limit_reaches_the_worker_which_stops_before_it() -> None:
    submission = render(TINY)
    limit = submission.request["StoppingCondition"]["MaxRuntimeInSeconds"]
    assert submission.job.spec.backend.max_run_seconds == limit  # type: ignore[union-attr]


def test_a_shell_is_a_session_in_the_container_where_the_job_allows_it(
    bucket: str, s3_server: S3Server, sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = {"storage": f"s3://{bucket}/runs", "storage_options": {"endpoint_url": s3_server.endpoint}}
    closed = launch({**TINY, **storage})
    with pytest.raises(SubmitError, match=r"without remote debugging. Launch with backend.remote_debug=true"):
        shell_command(closed)
    run = launch({**TINY, **storage}, "backend.remote_debug=true", new=True)
    with pytest.raises(SubmitError, match="is in status Starting"):
        shell_command(run)
    name = run.attempts[-1].native_id.partition("/")[2]
    sagemaker_double.move(name, "Training")
    target = f"sagemaker-training-job:{name}_algo-2"
    assert shell_command(run, 1) == ["aws", "ssm", "start-session", "--target", target, "--region", "us-west-2"]
    with pytest.raises(SubmitError, match="has the nodes 0 to 1, not 2"):
        shell_command(run, 2)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        SubmitError, match=f"aws is not installed.*The command: aws ssm start-session --target {target}"
    ):
        shell(run, 1)
