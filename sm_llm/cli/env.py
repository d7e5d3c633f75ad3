"""The verbs of environments on clusters, in a group of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import ClusterName, Overrides  # noqa: TC001 - typer reads the annotations
from sm_llm.terminal import echo

ENV_VERBS = {"create": "sm_llm.launcher.tools.clusters:create_environment"}
"""Every verb of the group and the Python function that does its work."""

environments = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Build Python environments on a cluster's shared file system."
)
app.add_typer(environments, name="env")


@environments.callback()
def _group() -> None:
    """Build Python environments on a cluster's shared file system."""


@environments.command()
def create(
    overrides: Overrides = None,
    profile: Annotated[str, typer.Option(help="fsdp or neuron.")] = "fsdp",
    backend: ClusterName = None,
    python: Annotated[str, typer.Option(help="The interpreter on the nodes, 3.11 or newer.")] = "python3",
    wheels: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Wheels that the nodes see, in place of the package index.")
    ] = None,
) -> None:
    """Build a pinned virtual environment by a job on a node, check it on the idle nodes, and print where it is.

    \b
    Example:
      sm-llm env create --profile fsdp backend.shared_folder=/fsx/sm_llm backend.partition=p5
    """
    from sm_llm.launcher.tools.clusters import create_environment

    tell = lambda text: echo(text, err=True)  # noqa: E731
    echo(create_environment(backend, profile, *overrides or (), python=python, wheels=wheels, tell=tell))
