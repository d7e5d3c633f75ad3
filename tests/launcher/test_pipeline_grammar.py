"""Variables of a pipeline are named by the same paths as overrides."""

from __future__ import annotations

import pytest

from sm_llm.errors import PlanError
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_variables import variables_of
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.loading.load import load


def test_a_variable_of_the_only_step_that_has_it_needs_no_step() -> None:
    workflow = load("tiny-local").spec
    assert isinstance(workflow, WorkflowSpec)
    (short,) = variables_of(workflow, {"Steps": "task.max_steps"})
    (whole,) = variables_of(workflow, {"Steps": "steps.train.task.max_steps"})
    assert short == whole
    assert (short.step, short.path, short.default) == ("train", "task.max_steps", 360)
    with pytest.raises(
        PlanError, match=r"several steps have it: prepare, train.*Write steps\.prepare\.task\.tokenizer"
    ):
        variables_of(workflow, {"Tokenizer": "task.tokenizer"})
