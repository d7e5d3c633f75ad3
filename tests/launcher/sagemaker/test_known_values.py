"""What the definition of a pipeline shows of its variables' values: defaults, choices, types and the platform's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sm_llm.launcher.backends.sagemaker.pipelines.known_values import KnownValues, fillings, known_values


def parameter(default: Any = None, choices: Any = None, kind: str = "String") -> SimpleNamespace:
    """As the SDK's: its classes take seconds to import."""
    expression = {"Get": "Parameters.P"}
    kinds = SimpleNamespace(value=kind)
    return SimpleNamespace(default_value=default, enum_values=choices, expr=expression, parameter_type=kinds)


def of_expression(name: str) -> SimpleNamespace:
    return SimpleNamespace(expr={"Get": name})


def join(*values: Any, on: str = "/") -> SimpleNamespace:
    return SimpleNamespace(on=on, values=list(values), expr={"Std:Join": {}})


@pytest.mark.parametrize(
    ("variable", "known"),
    [
        (parameter("a", ["a", "b"]), KnownValues(("a", "b"))),
        (parameter(None, ["a", "b"]), KnownValues(("a", "b"))),
        (parameter(0, kind="Integer"), KnownValues((0,))),
        (parameter(False, kind="Boolean"), KnownValues((False,))),
        (parameter(), KnownValues()),
        (parameter(kind="Boolean"), KnownValues(examples=(True, False))),
        (of_expression("Execution.PipelineExecutionId"), KnownValues(examples=("a1b2c3d4e5f6",))),
        (of_expression("Steps.a.ModelArtifacts.S3ModelArtifacts"), KnownValues(examples=("s3://bucket/prefix",))),
        (of_expression("Steps.a.FinalMetricDataList"), KnownValues()),
        (join("s3://b", parameter("x", ["y"])), KnownValues(("s3://b/x",))),
        (join("s3://b", of_expression("Execution.PipelineName")), KnownValues(examples=("s3://b/pipeline",))),
        (join("s3://b", parameter()), KnownValues()),
    ],
)
def test_what_is_known_of_a_variable(variable: Any, known: KnownValues) -> None:
    assert known_values(variable) == known


def test_a_value_is_filled_with_defaults_and_then_with_each_other_choice() -> None:
    value = {"a": [parameter("x", ["x", "y"]), "fixed"], "b": parameter("z", ["w"])}
    assert list(fillings(value)) == [
        {"a": ["x", "fixed"], "b": "z"}, {"a": ["y", "fixed"], "b": "z"}, {"a": ["x", "fixed"], "b": "w"},
    ]  # fmt: skip
    assert list(fillings([parameter(), "x"])) == [["x"]]
    assert list(fillings([parameter()])) == list(fillings({"a": parameter()})) == []
    assert list(fillings([])) == [[]]
    assert list(fillings("plain")) == ["plain"]
