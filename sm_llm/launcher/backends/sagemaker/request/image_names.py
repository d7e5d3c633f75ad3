"""What the name of one of AWS's own images holds: framework, version, Python and hardware, compared with the job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sm_llm.errors import Issue, warning
from sm_llm.launcher.backends.sagemaker.request.arns import ECR
from sm_llm.launcher.images.images import DLC_ACCOUNTS, MINIMUM_PYTHON, MINIMUM_TORCH, SMP_ACCOUNT, line_of
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.machines.gpus import machines
from sm_llm.spec.tasks import PrecompileTask, RegisterTask, ScriptTask, TrainTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.job import JobSpec

Hardware = Literal["gpu", "cpu", "neuron"]
_NAME = re.compile(r"[^/]+/(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?")
_VERSION = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)")
_PYTHON = re.compile(r"(?:^|-)py3(?P<minor>\d+)(?:-|$)")
_GPU = re.compile(r"(?:^|-)(?:gpu|cu\d+)(?:-|$)")
_CPU = re.compile(r"(?:^|-)cpu(?:-|$)")
_REMEDY = "Leave image_uri out: the table of images has one for every instance type"


@dataclass(frozen=True)
class AwsImage:
    """An image of the Deep Learning Containers or of SMP; what its name leaves out is None."""

    repository: str
    version: tuple[int, int] | None
    """Of the framework."""
    python: tuple[int, int] | None
    hardware: Hardware | None

    @property
    def has_torch(self) -> bool:
        return "pytorch" in self.repository or self.repository == "smdistributed-modelparallel"


def aws_image(uri: str) -> AwsImage | None:
    """What the address of an image holds; None where it is not one that AWS publishes for training or inference."""
    match, parts = ECR.fullmatch(uri), _NAME.match(uri)
    if match is None or parts is None or match["account"] not in (SMP_ACCOUNT, *DLC_ACCOUNTS.values()):
        return None
    repository, tag = parts["repository"], parts["tag"] or ""
    version, python = _VERSION.match(tag), _PYTHON.search(tag)
    hardware: Hardware | None = "gpu" if _GPU.search(tag) else "cpu" if _CPU.search(tag) else None
    return AwsImage(
        repository,
        (int(version["major"]), int(version["minor"])) if version else None,
        (3, int(python["minor"])) if python else None,
        "neuron" if "neuron" in uri else hardware,
    )


def image_issues(job: JobSpec) -> Iterator[Issue]:
    """Images of AWS in which a job cannot run, or not on its machines."""
    options = SageMakerOptions.of(job)
    if isinstance(job.task, RegisterTask):
        serving = aws_image(job.task.image_uri)
        if serving is not None and "training" in serving.repository:
            problem = "is an image for training, which serves no model"
            yield Issue(
                "inference-image-for-training-only",
                "task.image_uri",
                problem,
                job.task.image_uri,
                "Give an image for inference",
            )
    image = aws_image(options.image_uri or "")
    if image is None:
        return
    for problem, remedy in (*_content_problems(job, options, image), *_hardware_problems(job, image)):
        yield Issue("image-unfit-for-task", "backend.image_uri", problem, options.image_uri, remedy)


def image_warnings(job: JobSpec) -> Iterator[Issue]:
    """Images of AWS that work, but hold more than the machines can use."""
    options = SageMakerOptions.of(job)
    image, rows = aws_image(options.image_uri or ""), machines(job)
    if image is not None and image.version is None and "@" not in (options.image_uri or ""):
        message = (
            "the tag names no version, as those of AWS's images do, so what the image holds, and whether it exists, "
            "is not known"
        )
        yield warning("image-tag-without-version", "backend.image_uri", message, remedy=_REMEDY)
    if image is not None and image.hardware == "gpu" and rows and not any(row.accelerator for row in rows):
        message = (
            f"the image is for GPUs, {rows[0].name} has none: the job computes on the CPU and pulls gigabytes that it "
            "does not need"
        )
        yield warning("gpu-image-without-gpus", "backend.image_uri", message, remedy=_REMEDY)


def _content_problems(job: JobSpec, options: SageMakerOptions, image: AwsImage) -> Iterator[tuple[str, str]]:
    """(problem, remedy) of what is in the image."""
    trains = isinstance(job.task, TrainTask | PrecompileTask)
    oldest = MINIMUM_TORCH[line_of(job)]
    if "inference" in image.repository:
        yield "is an image for inference, without SageMaker's training toolkit", _REMEDY
    elif trains and not image.has_torch:
        yield f"holds no PyTorch, which {job.task.kind} needs", _REMEDY
    elif trains and image.version is not None and image.version < oldest:
        needed = ".".join(map(str, oldest))
        problem = f"holds PyTorch {'.'.join(map(str, image.version))}; {job.task.kind} needs {needed} or newer here"
        yield problem, _REMEDY
    elif image.python is not None and image.python < MINIMUM_PYTHON:
        own, needed = (".".join(map(str, it)) for it in (image.python, MINIMUM_PYTHON))
        yield f"holds Python {own}; the worker needs {needed} or newer", _REMEDY
    if options.image == "built":
        problem = "is AWS's own image, and image: built installs nothing of what it lacks"
        yield problem, "Set backend.image=stock, or give the address of an image made by sm-llm image build"


def _hardware_problems(job: JobSpec, image: AwsImage) -> Iterator[tuple[str, str]]:
    """(problem, remedy) of the image on the job's machines."""
    rows = machines(job)
    if not rows or image.hardware is None:
        return
    computes = isinstance(job.task, TrainTask | PrecompileTask | ScriptTask)
    if image.hardware == "neuron" and not rows[0].is_neuron:
        yield f"is for Trainium, and {rows[0].name} is not", _REMEDY
    elif image.hardware != "neuron" and rows[0].is_neuron and computes:
        yield f"has no Neuron SDK, without which {rows[0].name} does not compute", _REMEDY
    elif image.hardware == "cpu" and rows[0].is_gpu and computes:
        yield f"is for CPUs: the GPUs of {rows[0].name} would be paid for and not used", _REMEDY
