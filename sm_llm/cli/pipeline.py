"""The verbs of SageMaker Pipelines, in a group of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, Overrides, Spec, print_json
from sm_llm.errors import Issue, SpecError
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

PIPELINE_VERBS = {
    "render": "sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations:definition",
    "upsert": "sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations:upsert",
    "start": "sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations:start",
    "status": "sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations:status",
    "logs": "sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations:logs",
    "stop": "sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations:stop",
}
"""Every verb of the group and the Python function that does its work."""

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a workflow as a SageMaker Pipeline.")
app.add_typer(group, name="pipeline")

_VARIABLE = "NAME=PATH, for example Steps=steps.train.task.max_steps"
Variables = Annotated[
    list[str] | None,
    typer.Option("--variable", metavar="NAME=PATH", help="Parameter and what it overrides: Rate=steps.train.task.…"),
]
Execution = Annotated[str, typer.Argument(metavar="EXECUTION", help="ARN of an execution.")]


def _pairs(texts: Sequence[str] | None, form: str) -> dict[str, str]:
    """NAME=… texts as a mapping; ``form`` shows one. Raises ``SpecError``."""
    found: dict[str, str] = {}
    issues = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        # The value may be empty, the name may not.
        if not (name and equals):
            issues.append(Issue("pipeline-argument-malformed", text, f"is not written {form}"))
        elif name in found:
            issues.append(Issue("pipeline-argument-repeated", name, "is given twice", value, "Keep one"))
        found[name] = value
    if issues:
        raise SpecError(issues)
    return found


@group.command()
def render(spec: Spec, overrides: Overrides = None, variable: Variables = None) -> None:
    """Print the definition that would be stored, as JSON; nothing is touched."""
    from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import definition

    print_json(definition(spec, *(overrides or ()), variables=_pairs(variable, _VARIABLE)).to_json())


@group.command()
def upsert(spec: Spec, overrides: Overrides = None, variable: Variables = None) -> None:
    """Store code and job files in S3 and create or update the pipeline."""
    from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import upsert as store

    echo(store(spec, *(overrides or ()), variables=_pairs(variable, _VARIABLE)))


@group.command()
def start(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline.")],
    values: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]", help="Values of its variables.")] = None,
    region: Annotated[str | None, typer.Option(help="AWS region.")] = None,
) -> None:
    """Start an execution and print its ARN."""
    from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import start as begin

    echo(begin(name, _pairs(values, "NAME=VALUE"), region=region))


@group.command()
def status(execution: Execution, as_json: AsJson = False) -> None:
    """The state of an execution and of its steps."""
    from dataclasses import asdict

    from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import status as state_of

    state, steps = state_of(execution)
    if as_json:
        print_json({"state": state, "steps": [asdict(step) for step in steps]})
        return
    echo(state)
    for step in steps:
        source = f" (result of {step.cached_from})" if step.cached_from else ""
        echo(f"  {step.name}: {step.state}{source}{f': {step.reason}' if step.reason else ''}")


@group.command()
def logs(
    execution: Execution,
    step: Annotated[str | None, typer.Argument(metavar="[STEP]", help="Only this step.")] = None,
) -> None:
    """What the training jobs of an execution printed."""
    from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import logs as read

    for line in read(execution, step):
        echo(line)


@group.command()
def stop(execution: Execution) -> None:
    """Ask an execution to stop."""
    from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import stop as end

    end(execution)
