"""Variables of a pipeline: parameters whose values, given at the start, are overrides of a step's specification."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Fault, PlanError
from sm_llm.launcher.backends.sagemaker.pipelines.settled import variable_fault
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.loading.overrides import placed
from sm_llm.spec.loading.references import workflow_job
from sm_llm.spec.validation.faults import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

TYPES: dict[type, str] = {bool: "Boolean", int: "Integer", float: "Float", str: "String"}
"""Type of a default -> type of the parameter."""
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
    """The variables ``wanted`` (name -> path), sorted by name. Raises ``PlanError`` with every fault."""
    faults: list[Fault] = []
    found: dict[str, Variable] = {}
    for name, dotted in sorted(wanted.items()):
        made = _variable(workflow, name, dotted)
        if isinstance(made, Fault):
            faults.append(made)
        elif dotted in found:
            remedy = "Keep one of the two"
            faults.append(Fault(f"variables.{name}", f"changes what {found[dotted].name} changes", dotted, remedy))
        else:
            found[dotted] = made
    if faults:
        raise PlanError(faults)
    return tuple(found.values())


def _variable(workflow: WorkflowSpec, name: str, dotted: str) -> Variable | Fault:
    where = f"variables.{name}"
    if not _NAME.fullmatch(name):
        return Fault(where, "a variable's name has letters, digits, hyphens and underscores only", name)
    whole, fault = placed(WorkflowSpec, tuple(dotted.split(".")), workflow.model_dump())
    if fault is not None:
        return Fault(where, f"names no field of a single step: {fault.problem}", dotted, fault.remedy)
    dotted = ".".join(whole)
    step, _, path = dotted.removeprefix(_STEP).partition(".")
    if not dotted.startswith(_STEP) or step not in workflow.steps or not path.startswith(("task.", "environment.")):
        known = did_you_mean(step, workflow.steps) if dotted.startswith(_STEP) else ""
        remedy = f"Write steps.STEP.task.…, for example steps.train.task.max_steps. {known}".rstrip()
        return Fault(where, "names no field that a step can change", dotted, remedy)
    value: Any = workflow.steps[step].model_dump()
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            keys = list(value) if isinstance(value, dict) else []
            return Fault(where, "there is no such field in the workflow", dotted, did_you_mean(key, keys))
        value = value[key]
    if type(value) not in TYPES:
        remedy = "Give it a value in the workflow: text, a number, or true or false"
        return Fault(where, "has no default", dotted, remedy)
    if (refused := variable_fault(workflow_job(workflow, step), path)) is not None:
        return Fault(where, refused.problem, dotted, "Write its value into the workflow")
    return Variable(name, step, path, value)
