"""Issues of a task that registers a model: limits of SageMaker's CreateModelPackage, and where a model can lie."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sm_llm.errors import Issue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.tasks import RegisterTask

_GROUP = re.compile(
    r"[A-Za-z0-9](?:-*[A-Za-z0-9]){0,62}|arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:model-package-group/\S+"
)
_IMAGE = re.compile(r"\S{1,255}")
_MODEL = re.compile(r"steps\.[\w-]+\.output(?:/.*)?|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/.+")


def register_issues(task: RegisterTask) -> Iterator[Issue]:
    """Every issue of the task's fields."""
    if not _MODEL.fullmatch(task.model):
        remedy = "Write steps.NAME.output, or s3://bucket/RUN/result"
        yield Issue("register-model-not-in-s3", "task.model", "is not a place of a model in S3", task.model, remedy)
    if not _GROUP.fullmatch(task.group):
        valid = re.sub(r"[^A-Za-z0-9]+", "-", task.group).strip("-")[:63] or "models"
        yield Issue(
            "register-group-name-invalid",
            "task.group",
            "a group's name has 1 to 63 letters, digits and hyphens",
            task.group,
            f"Try {valid}",
        )
    if not _IMAGE.fullmatch(task.image_uri):
        yield Issue(
            "register-image-invalid",
            "task.image_uri",
            "an image's address has 1 to 255 characters and no spaces",
            task.image_uri,
        )
