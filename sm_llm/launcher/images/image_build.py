"""Builds our images from ``docker/`` and brings them to ECR: the commands as values, and running them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError, SubmitError
from sm_llm.launcher.aws_account import AwsAccount, aws_errors
from sm_llm.launcher.images.images import dns_suffix, rows, uri
from sm_llm.package import PACKAGE_PARENT
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STACK_OF_KIND = {"fsdp": "gpu", "smp": "smp", "neuron": "neuron", "byo": None}
"""Folder of ``docker/`` -> image stack of its base."""
_REGISTRY = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+?)(?=/|$)"
)
_PULL = ("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability")


@dataclass(frozen=True)
class Built:
    """An image by its address, and what identifies its bytes once it is in a registry."""

    uri: str
    digest: str | None = None


def base_of(kind: str, region: str) -> str | None:
    """The base image of a kind in a region; None for ``byo``, which takes any. Raises ``PlanError``."""
    if kind not in STACK_OF_KIND:
        raise PlanError(
            [Issue("image-kind-unknown", "kind", "there is no such image", kind, f"Kinds: {', '.join(STACK_OF_KIND)}")]
        )
    stack = STACK_OF_KIND[kind]
    address = None if stack is None else uri(rows(stack)[0], region)  # type: ignore[arg-type]
    if isinstance(address, Issue):
        raise PlanError([address])
    return address


def build_command(kind: str, tag: str, region: str, base: str | None = None) -> list[str]:
    """The docker command that builds an image, in the repository's root."""
    chosen = base or base_of(kind, region)
    argument = [] if chosen is None else ["--build-arg", f"BASE={chosen}"]
    return ["docker", "build", "--file", f"docker/{kind}/Dockerfile", *argument, "--tag", tag, "."]


def build(
    kind: str, tag: str, region: str, *, base: str | None = None, root: Path | None = None, run: Any = None
) -> list[str]:
    """Build an image; returns the command. Raises ``SubmitError`` without docker or the checkout, or if it fails."""
    folder = root or _checkout()
    argv = build_command(kind, tag, region, base)
    _run(argv, folder, run)
    return argv


def login(image_uri: str, *, connect: Callable[[str], Any] = AwsAccount, run: Any = None) -> list[str]:
    """Let docker pull from and push to the registry of an image, also of another account's; returns the command.

    The password goes in by standard input: it is in no list of processes, log or shell history.
    """
    match = registry_of(image_uri)
    with aws_errors(f"cannot log in to {match[0]}"):
        answer = connect(match["region"]).client("ecr").get_authorization_token(registryIds=[match["account"]])
    import base64

    # The token is base64 of AWS:PASSWORD.
    password = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode().partition(":")[2]
    argv = ["docker", "login", "--username", "AWS", "--password-stdin", match[0]]
    _run(argv, Path.cwd(), run, password)
    return argv


def push(image_uri: str, *, connect: Callable[[str], Any] = AwsAccount, run: Any = None) -> Built:
    """Make the repository if it is not there, push, and return the image's digest. Raises ``SubmitError``."""
    match = registry_of(image_uri)
    name, _, tag = image_uri.removeprefix(f"{match[0]}/").partition(":")
    client = connect(match["region"]).client("ecr")
    with aws_errors(f"cannot read repository {name}"):
        try:
            client.describe_repositories(repositoryNames=[name])
        except client.exceptions.RepositoryNotFoundException:
            client.create_repository(repositoryName=name)
    _run(["docker", "push", image_uri], Path.cwd(), run)
    with aws_errors(f"cannot read image {image_uri}"):
        # The digest identifies the bytes; a tag can be moved to another image.
        found = client.describe_images(repositoryName=name, imageIds=[{"imageTag": tag or "latest"}])
    return Built(image_uri, found["imageDetails"][0]["imageDigest"])


def covered_by_sagemaker_policy(image_uri: str) -> bool:
    """Whether AmazonSageMakerFullAccess, which execution roles of jobs usually have, lets them pull an image.

    It does by the repository's name. Roles of a cluster's nodes have other policies.
    """
    match = registry_of(image_uri)
    return "sagemaker" in _repository(image_uri, match).lower()


def pull_policy(image_uri: str) -> dict[str, Any]:
    """What a role needs to pull an image. Raises ``PlanError`` for one that is not in ECR."""
    match = registry_of(image_uri)
    name = _repository(image_uri, match)
    partition = "aws-cn" if dns_suffix(match["region"]).endswith(".cn") else "aws"
    resource = f"arn:{partition}:ecr:{match['region']}:{match['account']}:repository/{name}"
    statements = [
        {"Effect": "Allow", "Action": list(_PULL), "Resource": resource},
        {"Effect": "Allow", "Action": "ecr:GetAuthorizationToken", "Resource": "*"},
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def _repository(image_uri: str, registry: re.Match[str]) -> str:
    return image_uri.removeprefix(f"{registry[0]}/").partition(":")[0]


def registry_of(image_uri: str) -> re.Match[str]:
    """The registry in front of an image's name: ``account``, ``region`` and ``suffix``. Raises ``PlanError``."""
    match = _REGISTRY.match(image_uri)
    if match is None or match["suffix"] != dns_suffix(match["region"]):
        remedy = "Write ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
        raise PlanError([Issue("image-registry-not-ecr", "image", "is not an image in ECR", image_uri, remedy)])
    return match


def _checkout() -> Path:
    root = PACKAGE_PARENT
    if not (root / "docker").is_dir():
        raise SubmitError(f"{root}: has no folder docker. Images are built from a checkout of the repository")
    return root


def _run(argv: Sequence[str], folder: Path, run: Any, secret: str | None = None) -> None:
    if run is None and shutil.which(argv[0]) is None:
        raise SubmitError(f"{argv[0]} is not installed. The command: {quoted(*argv)}")
    done = (run or subprocess.run)(list(argv), cwd=folder, input=secret, text=True, check=False)
    if done.returncode:
        raise SubmitError(f"{quoted(*argv)} ended with exit code {done.returncode}")
