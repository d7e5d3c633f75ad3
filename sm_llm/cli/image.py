"""The verbs of images, in a group of their own."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import ClusterName, Overrides  # noqa: TC001 - typer reads the annotations
from sm_llm.terminal import echo, quoted

IMAGE_VERBS = {
    "build": "sm_llm.launcher.images.image_build:build",
    "import": "sm_llm.launcher.tools.clusters:import_image",
    "login": "sm_llm.launcher.images.image_build:login",
    "push": "sm_llm.launcher.images.image_build:push",
    "wheelhouse": "sm_llm.launcher.images.wheelhouse:wheelhouse",
}
"""Every verb of the group and the Python function that does its work."""

images = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Build our images and bring them to ECR.")
app.add_typer(images, name="image")

Image = Annotated[str, typer.Argument(metavar="IMAGE", help="ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command only.")]


@images.command()
def build(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="fsdp, smp, neuron or byo.")],
    tag: Annotated[str, typer.Option(help="Name of the image.")] = "sagemaker-sm-llm",
    region: Annotated[str, typer.Option(help="Region whose registry the base is pulled from.")] = "us-east-1",
    base: Annotated[str | None, typer.Option(help="Another base image.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Build an image with docker from the checkout."""
    from sm_llm.launcher.images.image_build import build as make
    from sm_llm.launcher.images.image_build import build_command

    argv = build_command(kind, tag, region, base) if dry_run else make(kind, tag, region, base=base)
    echo(quoted(*argv))


@images.command("import")
def import_image(
    image: Image,
    overrides: Overrides = None,
    backend: ClusterName = None,
) -> None:
    """Bring an image onto a cluster by a job on a node, unless it is current there; prints backend.container_image.

    \b
    Example:
      sm-llm image import 111122223333.dkr.ecr.us-east-1.amazonaws.com/train:1 backend.shared_folder=/fsx/sm_llm
    """
    from sm_llm.launcher.tools.clusters import import_image as bring

    found = bring(backend, image, *overrides or (), tell=lambda text: echo(text, err=True))
    echo(f"{'imported' if found.is_new else 'current already'}: {found.digest}", err=True)
    echo(found.path)


@images.command()
def login(image: Image) -> None:
    """Let docker pull from and push to the registry of an image, also of AWS's own images."""
    from sm_llm.launcher.images.image_build import login as let_in

    echo(quoted(*let_in(image)))


@images.command()
def push(image: Image) -> None:
    """Push an image, making its repository, and print its digest for backend.image_uri."""
    from sm_llm.launcher.images.image_build import covered_by_sagemaker_policy, pull_policy
    from sm_llm.launcher.images.image_build import push as bring

    done = bring(image)
    echo(f"{image.partition(':')[0]}@{done.digest}")
    if not covered_by_sagemaker_policy(image):
        # On standard error: standard output is the address for backend.image_uri alone.
        echo("The repository's name does not contain sagemaker, so the role of the jobs needs this policy:", err=True)
        echo(json.dumps(pull_policy(image), indent=2), err=True)


@images.command()
def wheelhouse(
    stack: Annotated[str, typer.Argument(metavar="STACK", help="gpu, smp, neuron or cpu.")],
    target: Annotated[str, typer.Argument(metavar="URI", help="S3 prefix for backend.wheelhouse.")],
    requirement: Annotated[
        list[str] | None, typer.Option("--requirement", "-r", help="More exact pins: a program's own packages.")
    ] = None,
) -> None:
    """Copy the wheels that a stack of AWS's images lacks to S3, for jobs without internet access."""
    from sm_llm.launcher.images.wheelhouse import wheelhouse as fill

    for name in fill(stack, target, requirement or ()):
        echo(name)
