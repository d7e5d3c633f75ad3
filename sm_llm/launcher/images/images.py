"""The container images that jobs run in: one dated table, and which row a job gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from sm_llm.errors import Issue, warning
from sm_llm.spec.job_machines import machines
from sm_llm.spec.machines.neuron_releases import MAINTENANCE, RELEASES
from sm_llm.spec.tasks import TASK_KINDS, parallelism_of, training_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.job import JobSpec


ImageStack = Literal["gpu", "smp", "neuron", "cpu"]
"""Images that hold the same software, and lack the same: one lock of packages belongs to each."""

TABLE_DATE = date(2026, 11, 28)
"""When the table was last compared with its sources."""


@dataclass(frozen=True)
class Image:
    """One image. ``version`` is what ``backend.image_version`` names."""

    stack: ImageStack
    version: str
    repository: str
    tag: str
    python: str
    torch: str
    patched_until: date | None = None
    """Last day of security patches; None where AWS names none."""
    digest: str | None = None
    """``sha256:…`` where it is known: tags move."""
    note: str = ""

    @property
    def name(self) -> str:
        """Repository and tag, or digest."""
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


_PRIVATE = "the private repository is inferred from the public one (public.ecr.aws/deep-learning-containers)"
_NO_POLICY = "AWS names no end of patches for SMP images"

IMAGES: tuple[Image, ...] = (
    Image(
        "gpu", "2.10.0", "pytorch-training", "2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker", "3.13", "2.10.0",
        date(2027, 1, 21),
    ),
    Image("gpu", "2.13", "pytorch", "2.13-cu133-amzn2023-sagemaker", "3.12", "2.13", date(2027, 7, 20), note=_PRIVATE),
    Image("gpu", "2.12", "pytorch", "2.12-cu130-amzn2023-sagemaker", "3.12", "2.12", date(2027, 7, 2), note=_PRIVATE),
    Image("gpu", "2.11", "pytorch", "2.11-cu130-amzn2023-sagemaker", "3.12", "2.11", date(2027, 4, 30), note=_PRIVATE),
    Image(
        "gpu", "2.9.0", "pytorch-training", "2.9.0-gpu-py312-cu130-ubuntu22.04-sagemaker", "3.12", "2.9.0",
        date(2026, 10, 15),
    ),
    Image(
        "gpu", "2.8.0", "pytorch-training", "2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker", "3.12", "2.8.0",
        date(2026, 8, 6),
    ),
    Image(
        "gpu", "2.9.0-transformers5.3.0", "huggingface-pytorch-training",
        "2.9.0-transformers5.3.0-gpu-py312-cu130-ubuntu22.04", "3.12", "2.9.0",
    ),
    Image(
        "gpu", "2.8.0-transformers4.56.2", "huggingface-pytorch-training",
        "2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04", "3.12", "2.8.0",
    ),
    Image("smp", "2.5.1", "smdistributed-modelparallel", "2.5.1-gpu-py311-cu124", "3.11", "2.5.1", note=_NO_POLICY),
    Image("smp", "2.4.1", "smdistributed-modelparallel", "2.4.1-gpu-py311-cu121", "3.11", "2.4.1", note=_NO_POLICY),
    Image("smp", "2.3.1", "smdistributed-modelparallel", "2.3.1-gpu-py311-cu121", "3.11", "2.3.1", note=_NO_POLICY),
    Image("smp", "2.2.0", "smdistributed-modelparallel", "2.2.0-gpu-py310-cu121", "3.10", "2.2.0", note=_NO_POLICY),
    Image("smp", "2.1.2", "smdistributed-modelparallel", "2.1.2-gpu-py310-cu121", "3.10", "2.1.2", note=_NO_POLICY),
    Image("smp", "2.0.1", "smdistributed-modelparallel", "2.0.1-gpu-py310-cu121", "3.10", "2.0.1", note=_NO_POLICY),
    *(
        Image("neuron", it.sdk, "pytorch-training-neuronx", it.image, it.python, it.torch, note=MAINTENANCE)
        for it in RELEASES
    ),
    Image("cpu", "2.8.0", "pytorch-training", "2.8.0-cpu-py312", "3.12", "2.8.0", date(2026, 8, 6)),
    Image(
        "cpu", "2.10.0", "pytorch-training", "2.10.0-cpu-py313-ubuntu22.04-sagemaker", "3.13", "2.10.0",
        date(2027, 1, 21), note="the tag is inferred from the GPU image's",
    ),
)  # fmt: skip
"""The first row of a stack is its default: one whose address in ECR is published.

Sources: AWS's list of available Deep Learning Containers and their support policy, SMP's release notes, those of
``spec.machines.neuron_releases``, and for the short CPU tag the table of the SageMaker Python SDK.
"""

MINIMUM_TORCH = {"gpu": (2, 10), "smp": (2, 5), "neuron": (2, 9), "cpu": (2, 10)}
"""Oldest PyTorch that our own training runs with, by stack; what does not train runs with any."""

MINIMUM_PYTHON = (3, 11)
"""Oldest Python that the worker runs with, whatever the task."""

_DLC_ACCOUNT = "763104351884"
SMP_ACCOUNT = "658645717510"
_COMMON_REGIONS = (
    "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "ca-central-1",
    "eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3", "sa-east-1", "us-east-1", "us-east-2",
    "us-west-1", "us-west-2",
)  # fmt: skip
DLC_ACCOUNTS = dict.fromkeys(_COMMON_REGIONS, _DLC_ACCOUNT) | {
    "af-south-1": "626614931356", "ap-east-1": "871362719292", "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360", "ap-south-2": "772153158452", "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322", "ap-southeast-5": "550225433462", "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437", "ca-west-1": "204538143572", "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807", "eu-central-2": "380420809688", "eu-south-1": "692866216735",
    "eu-south-2": "503227376785", "il-central-1": "780543022126", "me-central-1": "914824155844",
    "me-south-1": "217643126080", "mx-central-1": "637423239942", "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
}  # fmt: skip
"""Region -> account of the Deep Learning Containers, as the SageMaker Python SDK lists them."""
SMP_REGIONS = (*_COMMON_REGIONS, "ap-northeast-3")


_SUFFIXES = {
    "cn-": "amazonaws.com.cn", "us-iso-": "c2s.ic.gov", "us-isob-": "sc2s.sgov.gov", "us-isof-": "csp.hci.ic.gov",
    "eu-isoe-": "cloud.adc-e.uk", "eusc-": "amazonaws.eu",
}  # fmt: skip


def stack_of(job: JobSpec) -> ImageStack:
    """Which images a job can run in."""
    parallelism = parallelism_of(job.task)
    if parallelism is not None and parallelism.image_stack is not None:
        return parallelism.image_stack
    row = next(iter(machines(job)), None)  # groups of several kinds are refused
    # What runs in one process loads no torch, so the small CPU image will do where no GPU is paid for.
    if not TASK_KINDS[job.task.kind].starts_ranks and (row is None or not row.is_neuron):
        return "cpu" if row is None or not row.is_gpu else "gpu"
    if row is None:
        return "gpu"
    return "neuron" if row.is_neuron else "gpu" if row.is_gpu else "cpu"


def rows(stack: ImageStack) -> list[Image]:
    """The images of a stack, its default first."""
    return [row for row in IMAGES if row.stack == stack]


def choose(job: JobSpec, version: str | None) -> Image | Issue:
    """The image of a job; ``version`` asks for a certain row. An issue lists what there is."""
    stack = stack_of(job)
    # The worker does not run with an older Python, whatever the task.
    known = [it for it in rows(stack) if _numbers(it.python) >= MINIMUM_PYTHON]
    oldest = MINIMUM_TORCH[stack] if training_of(job.task) is not None else (0,)
    wanted = (it for it in known if it.version == version or (version is None and _numbers(it.torch) >= oldest))
    row = next(wanted, None)
    path = "backend.image_version"
    if row is None:
        close = get_close_matches(str(version), [it.version for it in known], n=3, cutoff=0.3)
        listed = ", ".join(close or [it.version for it in known])
        return Issue(
            "image-version-unknown",
            path,
            f"no such image among those for {stack} jobs",
            version,
            f"Known: {listed}; or set image_uri",
        )
    if _numbers(row.torch) < oldest:
        fitting = ", ".join(it.version for it in known if _numbers(it.torch) >= oldest)
        problem = f"holds PyTorch {row.torch}; {job.task.kind} needs {'.'.join(map(str, oldest))} or newer here"
        return Issue("image-torch-too-old", path, problem, version, f"Use {fitting}")
    trains = [it.sdk for it in RELEASES if it.trains]
    if stack == "neuron" and oldest != (0,) and row.version not in trains:
        problem = "is a Neuron SDK that the strategy nxd was not made for"
        return Issue("image-sdk-unknown", path, problem, version, f"Use {', '.join(trains)}")
    return row


def uri(image: Image, region: str) -> str | Issue:
    """The image's address in a region."""
    account = SMP_ACCOUNT if image.stack == "smp" and region in SMP_REGIONS else DLC_ACCOUNTS.get(region)
    if account is None or (image.stack == "smp" and account != SMP_ACCOUNT):
        regions = SMP_REGIONS if image.stack == "smp" else DLC_ACCOUNTS
        close = get_close_matches(region, list(regions), n=1)
        remedy = f"Did you mean {close[0]}? Known: " if close else "Use one of "
        remedy += f"{', '.join(sorted(regions))}; or set backend.image_uri"
        return Issue(
            "image-not-published-in-region",
            "backend.region",
            f"{image.repository} is not known to be published there",
            region,
            remedy,
        )
    return f"{account}.dkr.ecr.{region}.{dns_suffix(region)}/{image.name}"


def dns_suffix(region: str) -> str:
    """What host names of a region end with: ``amazonaws.com``, but for partitions of their own."""
    return next((suffix for prefix, suffix in _SUFFIXES.items() if region.startswith(prefix)), "amazonaws.com")


def patch_warnings(image: Image, today: date) -> Iterator[Issue]:
    """What to know of an image's support while it has less than half a year of patches."""
    days = math.inf if image.patched_until is None else (image.patched_until - today).days
    path = "backend.image_version"
    if days < 0:
        message = f"the image {image.name} has had no security patches since {image.patched_until}"
        yield warning("image-without-patches", path, message)
    elif days < 180:
        message = f"the image {image.name} gets patches until {image.patched_until}"
        yield warning("image-patches-end-soon", path, message)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def lock_text(stack: str) -> str:
    """The lock of an image stack, as pip reads it."""
    return (files("sm_llm") / "locks" / f"{stack}.txt").read_text(encoding="utf-8")


def packages_of(stack: str) -> list[str]:
    """The packages of a stack's lock, as ``name==version``."""
    lines = (text.partition("#")[0].strip() for text in lock_text(stack).splitlines())
    return [text for text in lines if text and not text.startswith("-")]
