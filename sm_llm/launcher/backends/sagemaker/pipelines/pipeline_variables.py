"""Variables of a pipeline: parameters whose values, given at the start, are overrides of a step's specification."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm_llm.errors import Issue, PlanError
from sm_llm.launcher.backends.sagemaker.pipelines.settled import variable_issue
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.loading.overrides import resolved
from sm_llm.spec.references import workflow_job
from sm_llm.spec.validation.fields import did_you_mean

TYPES: dict[type, str] = {bool: "Boolean", int: "Integer", float: "Float", str: "String"}
"""Type of a default -> type of the parameter."""
# The form of a parameter's name in the definition language.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,256}")
_STEP = "steps."


@dataclass(frozen=True)
class Variable:
    """One parameter of the pipeline: the path that it overrides in one step, and its default."""

    name: str
    step: str
    path: str
    default: Any

    @property
    def reference(self) -> dict[str, str]:
        return {"Get": f"Parameters.{self.name}"}


def variables_of(workflow: WorkflowSpec, wanted: Mapping[str, str]) -> tuple[Variable, ...]:
    """The variables ``wanted`` (name -> path), sorted by name. Raises ``PlanError`` with every issue."""
    if not isinstance(wanted, Mapping) or not all(isinstance(it, str) for it in [*wanted, *wanted.values()]):
        remedy = "Write {'Rate': 'steps.train.task.optim.learning_rate'}"
        message = "must be a mapping of names to the paths that they override"
        raise PlanError([Issue("pipeline-variables-invalid", "variables", message, wanted, remedy)])
    issues: list[Issue] = []
    found: dict[str, Variable] = {}
    for name, dotted in sorted(wanted.items()):
        made = _variable(workflow, name, dotted)
        if isinstance(made, Issue):
            issues.append(made)
        elif dotted in found:
            remedy = "Keep one of the two"
            issues.append(
                Issue(
                    "variable-target-repeated",
                    f"variables.{name}",
                    f"changes what {found[dotted].name} changes",
                    dotted,
                    remedy,
                )
            )
        else:
            found[dotted] = made
    if issues:
        raise PlanError(issues)
    return tuple(found.values())


def _variable(workflow: WorkflowSpec, name: str, dotted: str) -> Variable | Issue:
    where = f"variables.{name}"
    if not _NAME.fullmatch(name):
        return Issue(
            "variable-name-invalid", where, "a variable's name has letters, digits, hyphens and underscores only", name
        )
    # A short path such as max_steps is taken where it names one field alone, as for overrides.
    whole, issue = resolved(WorkflowSpec, tuple(dotted.split(".")), workflow.model_dump())
    if issue is not None:
        return Issue(
            "variable-target-ambiguous",
            where,
            f"names no field of a single step: {issue.message}",
            dotted,
            issue.remedy,
        )
    dotted = ".".join(whole)
    step, _, path = dotted.removeprefix(_STEP).partition(".")
    if not dotted.startswith(_STEP) or step not in workflow.steps or not path.startswith(("task.", "environment.")):
        known = did_you_mean(step, workflow.steps) if dotted.startswith(_STEP) else ""
        remedy = f"Write steps.STEP.task.…, for example steps.train.task.max_steps. {known}".rstrip()
        return Issue("variable-target-unsupported", where, "names no field that a step can change", dotted, remedy)
    value: Any = workflow.steps[step].model_dump()
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            keys = list(value) if isinstance(value, dict) else []
            return Issue(
                "variable-target-unknown",
                where,
                "there is no such field in the workflow",
                dotted,
                did_you_mean(key, keys),
            )
        value = value[key]
    # The type of a parameter follows from its default, and null has none.
    if type(value) not in TYPES:
        remedy = "Give it a value in the workflow: text, a number, or true or false"
        return Issue("variable-without-default", where, "has no default", dotted, remedy)
    if (refused := variable_issue(workflow_job(workflow, step), path)) is not None:
        return Issue("variable-target-fixed", where, refused.message, dotted, "Write its value into the workflow")
    return Variable(name, step, path, value)
