"""Steps of the SageMaker SDK that are not made by ``fit``, and what building an estimator costs, with the real SDK."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator
from tests.fixtures.sagemaker_calls import BUCKET, calls, job
from tests.launcher.test_estimator_arguments import refused
from tests.launcher.test_tuner_checks import RATE, tuned

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["calls"]
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:We are deprecating:DeprecationWarning")]


def _training(est: Any) -> str:
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import TrainingStep

    step = TrainingStep("a", estimator=est, inputs={"train": f"s3://{BUCKET}/other"})
    return str(Pipeline("p", steps=[step], sagemaker_session=est.sagemaker_session).definition())


def _tuning(est: Any) -> str:
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import TuningStep

    step = TuningStep("a", tuner=tuned(RATE, est=est))
    return str(Pipeline("p", steps=[step], sagemaker_session=est.sagemaker_session).definition())


def _after_a_job(est: Any) -> Any:
    est.fit(wait=False)
    return _training(est)


def _after_a_tuner(est: Any) -> Any:
    tuned(RATE, est=est).fit(wait=False)
    return _training(est)


def _by_airflow(est: Any) -> Any:
    return est.prepare_workflow_for_training()


def _untimed(definition: str) -> str:
    """Without the time that the SDK writes into the hyperparameters of a tuning job."""
    return re.sub(r'"sagemaker_job_name": "[^,]*,', "", definition)


@pytest.mark.parametrize("use", [_training, _tuning, _after_a_job, _after_a_tuner, _by_airflow])
@pytest.mark.parametrize("is_pipeline", [True, False])
def test_S12_10_a_step_that_passes_fit_by_is_refused(
    use: Callable[[Any], Any], is_pipeline: bool, calls: list[Any]
) -> None:
    import sagemaker
    from sagemaker.workflow.pipeline_context import PipelineSession

    session = (PipelineSession if is_pipeline else sagemaker.Session)(default_bucket=BUCKET)
    est = estimator(job(), sagemaker_session=session)
    refused(lambda: use(est), "estimator: is used without fit", "step_args=estimator.fit(inputs)")


def test_S12_10_steps_of_fit_and_of_a_tuner_are_defined_as_before(calls: list[Any]) -> None:
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep, TuningStep

    session = PipelineSession(default_bucket=BUCKET)
    one, two = (estimator(job(name), sagemaker_session=session) for name in ("one", "two"))
    steps = [
        TrainingStep("a", step_args=one.fit(wait=False)),
        TuningStep("b", step_args=tuned(RATE, est=two).fit(wait=False)),
    ]
    pipeline = Pipeline("p", steps=steps, sagemaker_session=session)
    two.set_hyperparameters(**{"task.max_steps": 5})  # of a later job: what fit was given stays
    first = pipeline.definition()
    assert _untimed(first) == _untimed(pipeline.definition())
    assert '"task.max_steps"' not in first
    two.instance_count = 4
    refused(pipeline.definition, "instance_count: ")
    assert not calls


def test_S12_05_building_an_estimator_validates_no_configuration_of_ours(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sagemaker.utils

    seen: list[Any] = []
    monkeypatch.setattr(sagemaker.utils, "validate_sagemaker_config", seen.append)
    session = sagemaker.Session(default_bucket=BUCKET)
    for _ in range(2):
        estimator(job(), sagemaker_session=session)
    assert seen == []
    assert session.sagemaker_config["SageMaker"]["PythonSDK"]["Modules"]["TelemetryOptOut"] is True


def test_S12_05_defaults_of_the_user_hold_while_an_estimator_is_built(calls: list[Any]) -> None:
    import sagemaker

    session = sagemaker.Session(default_bucket=BUCKET)
    session.sagemaker_config = {
        "SchemaVersion": "1.0",
        "SageMaker": {"TrainingJob": {"Tags": [{"Key": "team", "Value": "x"}]}},
    }
    estimator(job(), sagemaker_session=session).fit(wait=False)
    assert {"Key": "team", "Value": "x"} in calls[-1][1]["Tags"]


@pytest.mark.parametrize("answer", ["no such job", "another job", "this job", "no answer"])
def test_S12_23_a_job_that_the_service_refuses_leaves_no_run_that_waits_for_it(
    answer: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import botocore.client
    from botocore.exceptions import ClientError, EndpointConnectionError

    from sm_llm.launcher.find_runs import attach

    est = estimator(job())
    original = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]

    def call(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "CreateTrainingJob":
            raise ClientError({"Error": {"Code": "ValidationException", "Message": "no"}}, operation)
        if operation != "DescribeTrainingJob":
            return original(self, operation, arguments)
        if answer == "no such job":
            error = {"Code": "ValidationException", "Message": "Requested resource not found."}
            raise ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": 400}}, operation)  # type: ignore[typeddict-item]
        if answer == "no answer":
            raise EndpointConnectionError(endpoint_url="https://x")
        path = est.output_path if answer == "this job" else "s3://elsewhere"
        return {"OutputDataConfig": {"S3OutputPath": path}, "TrainingJobStatus": "InProgress"}

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
    with pytest.raises(ClientError):
        est.fit(wait=False)
    (left,) = attach(est.run_uri).record.attempts
    assert (left.state is None) is (answer in ("this job", "no answer"))
