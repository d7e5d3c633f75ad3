"""What a user gives an estimator: as fields of the specification, or refused before anything is stored."""

from __future__ import annotations

from typing import Any

import pytest
from sagemaker.instance_group import InstanceGroup

from sm_llm.launcher.backends.sagemaker.sdk.sdk_checks import ESTIMATOR_CHECKERS, EstimatorCall
from sm_llm.launcher.backends.sagemaker.sdk.sdk_overrides import as_fields, fit_issues, hyperparameter_issues
from sm_llm.spec.validation.runner import run
from tests.launcher.sagemaker.conftest import SCRIPT, TINY, plan_of, render


class Estimator:
    """Takes what the SDK's estimators take: names of its own, and any others, which it drops."""

    def __init__(self, role: Any = None, instance_count: Any = None, tags: Any = None, **kwargs: Any) -> None:
        """Names only."""


class Special(Estimator):
    """Adds to what its base takes."""

    def __init__(self, container_log_level: int = 20, enable_network_isolation: bool = False, **kwargs: Any) -> None:
        """Names only."""


class Variable:
    """Known to a pipeline alone."""

    expr = "Parameters.Count"

    def __init__(self, default_value: Any = None) -> None:
        self.default_value = default_value

    def __str__(self) -> str:
        raise TypeError("no text, as in the SDK")


def test_arguments_that_have_a_field_become_it_and_the_rest_stays() -> None:
    tags = [{"Key": "a", "Value": "1"}]
    fields, rest = as_fields({"role": "r", "tags": tags, "container_log_level": 10, "instance_count": None})
    assert fields == {"backend.role": "r", "backend.tags": {"a": "1"}}
    assert rest == {"container_log_level": 10}


def test_groups_bring_their_number_of_nodes() -> None:
    fields, _ = as_fields({"instance_groups": [InstanceGroup("a", "ml.p5.48xlarge", 3)]})
    assert fields["compute.instance_count"] == 3
    assert fields["backend.instance_groups"][0]["name"] == "a"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"instance_cuont": 4}, "Did you mean instance_count"),
        ({"framework_version": "2.8.0"}, "backend.image_version"),
        ({"distribution": {"mpi": {"enabled": True}}}, "task.parallelism"),
        ({"output_path": "s3://b/x"}, "Give storage"),
        ({"enable_network_isolation": True}, "without network"),
        ({"instance_count": Variable()}, "how many processes"),
    ],
)
def test_an_argument_that_would_be_dropped_or_break_the_job_is_refused(kwargs: dict[str, Any], words: str) -> None:
    issues = run(ESTIMATOR_CHECKERS, EstimatorCall(Special, None, kwargs))
    assert [it.path for it in issues] == list(kwargs)
    assert words in " ".join(map(str, issues))


def test_a_variable_of_a_pipeline_goes_to_the_sdk_as_it_is() -> None:
    variable = Variable()
    assert as_fields({"role": variable}) == ({}, {"role": variable})


@pytest.mark.parametrize(
    ("job", "given", "path", "words"),
    [
        (TINY, {"task.max_step": 5}, "task.max_step", "Did you mean task.max_steps"),
        (TINY, {"task.max_steps": "x"}, "task.max_steps", "expected a whole number"),
        (TINY, {"backend.spot": True}, "backend.spot", "settled"),
        (TINY, {"environment.X": "y" * 2499}, "environment.X", "2501 characters"),
        (SCRIPT, {"lr": 0.1}, "lr", "task.args"),
        (TINY, {"task.max_step": Variable(5)}, "task.max_step", "Did you mean task.max_steps"),
        (TINY, {"task.lr": Variable(5)}, "task.lr", "Did you mean task.optim.learning_rate?"),
        (TINY, {"lr": 5}, "lr", "Did you mean task.optim.learning_rate?"),
    ],
)
def test_a_hyperparameter_that_the_worker_or_the_service_would_refuse(
    job: dict[str, Any], given: dict[str, Any], path: str, words: str
) -> None:
    (fault,) = hyperparameter_issues(render(job), plan_of(job), given)
    assert fault.path == f"hyperparameters.{path}"
    assert words in str(fault)


def test_hyperparameters_that_fit_are_not_refused() -> None:
    given = {"task.max_steps": 7, "environment.NOTE": 'it\'s "q"\n日本', "task.seed": Variable()}
    assert list(hyperparameter_issues(render(TINY), plan_of(TINY), given)) == []
    (fault,) = hyperparameter_issues(render(TINY), plan_of(TINY), {f"environment.V{n}": 1 for n in range(100)})
    assert "at most 100" in str(fault)
    (fault,) = hyperparameter_issues(render(TINY), plan_of(TINY), {"task.seed": object()})
    assert "JSON" in str(fault)


@pytest.mark.parametrize(
    ("inputs", "job_name", "path"),
    [
        ({"job": "s3://bucket/x"}, None, "inputs.job"),
        ({"corpus": "/data/corpus"}, None, "inputs.corpus"),
        ({"training": "file:///data/corpus"}, None, "inputs.training"),
        ({f"c{n}": "s3://bucket/x" for n in range(20)}, None, "inputs"),
        ({"my corpus": "s3://bucket/x"}, None, "inputs"),
        ({}, "my_job x", "job_name"),
    ],
)
def test_what_fit_cannot_send(inputs: dict[str, Any], job_name: str | None, path: str) -> None:
    assert [fault.path for fault in fit_issues(render(SCRIPT), inputs, job_name)] == [path]


def test_what_fit_can_send() -> None:
    assert list(fit_issues(render(SCRIPT), {"corpus": "s3://bucket/x", "other": Variable()}, "my-job")) == []
