"""Names of AWS's own images hold version, Python and hardware: a job that cannot run in one is refused by the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.sagemaker.request.request_addresses import aws_image
from sm_llm.launcher.images.images import IMAGES, choose
from sm_llm.spec.job import JobSpec
from tests.launcher.sagemaker.conftest import SCRIPT, TINY, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.errors import Issue

    Faults = Callable[..., list[Issue]]

DLC = "763104351884.dkr.ecr.us-west-2.amazonaws.com"
GOOD = f"{DLC}/pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker"
CPU = f"{DLC}/pytorch-training:2.10.0-cpu-py313-ubuntu22.04-sagemaker"
NEURON = f"{DLC}/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.28.0-ubuntu24.04"
M5 = {"instance_type": "ml.m5.4xlarge"}


@pytest.mark.parametrize("row", IMAGES, ids=lambda it: it.name)
def test_C12_the_names_of_our_own_table_are_read(row: Any) -> None:
    image = aws_image(f"{DLC}/{row.name}")
    assert image is not None
    assert image.has_torch
    assert image.version == tuple(int(it) for it in row.torch.split(".")[:2])
    assert image.hardware == {"gpu": "gpu", "smp": "gpu", "neuron": "neuron", "cpu": "cpu"}[row.stack]
    assert image.python in (None, tuple(int(it) for it in row.python.split(".")))


@pytest.mark.parametrize(
    ("job", "image", "words"),
    [
        (TINY, f"{DLC}/pytorch-training:2.3.0-gpu-py311-cu121-ubuntu20.04-sagemaker", "needs 2.10 or newer"),
        (TINY, f"{DLC}/huggingface-pytorch-training:1.13.1-transformers4.26.0-gpu-py39", "needs 2.10 or newer"),
        (TINY, f"{DLC}/tensorflow-training:2.19.0-gpu-py312-cu125", "holds no PyTorch"),
        (TINY, f"{DLC}/pytorch-inference:2.10.0-gpu-py313", "for inference"),
        (TINY, CPU, "the GPUs of ml.p5.48xlarge would be paid for"),
        (SCRIPT, CPU, "the GPUs of ml.p5.48xlarge would be paid for"),
        (SCRIPT, f"{DLC}/pytorch-training:1.13.1-gpu-py39-cu117", "holds Python 3.9"),
        (TINY, NEURON, "is for Trainium"),
        ({**TINY, "backend": {**TINY["backend"], "image": "built"}}, GOOD, "image: built installs nothing"),
    ],
)
def test_C12_an_image_of_aws_in_which_the_job_cannot_run_is_refused(
    job: dict[str, Any], image: str, words: str, faults: Faults
) -> None:
    found = faults(job, f"backend.image_uri={image}")
    assert {fault.path for fault in found} == {"backend.image_uri"}
    assert any(words in str(fault) for fault in found)


def test_C12_a_gpu_image_on_trainium_is_refused(faults: Faults) -> None:
    nxd = ("task.parallelism.strategy=nxd", "task.parallelism.flash_attention=false")
    trn = ("task.model.preset=llama-3-8b", *nxd, "compute.instance_type=ml.trn1.32xlarge")
    (fault,) = faults(TINY, *trn, "backend.max_run_seconds=86400", f"backend.image_uri={GOOD}")
    assert "no Neuron SDK" in fault.message
    assert faults(TINY, *trn, "backend.max_run_seconds=86400", f"backend.image_uri={NEURON}") == []


def test_C12_a_gpu_image_on_a_cpu_machine_is_warned_of() -> None:
    made = plan_of({**SCRIPT, "compute": M5}, f"backend.image_uri={GOOD}")
    assert any("ml.m5.4xlarge has none" in warning for warning in made.warnings)


@pytest.mark.parametrize(
    ("job", "image"),
    [
        (TINY, GOOD),
        (TINY, "123456789012.dkr.ecr.us-west-2.amazonaws.com/own:1.0-cpu-py38"),
        ({**SCRIPT, "compute": M5}, CPU),
        (SCRIPT, f"{DLC}/pytorch-training:2.6.0-gpu-py312-cu126-ubuntu22.04-sagemaker"),
    ],
)
def test_C12_other_images_are_not_refused(job: dict[str, Any], image: str, faults: Faults) -> None:
    assert faults(job, f"backend.image_uri={image}") == []


def test_C12_a_model_is_not_registered_with_an_image_for_training(faults: Faults) -> None:
    task = {"kind": "register", "model": "s3://bucket/run/result", "group": "models", "image_uri": GOOD}
    (fault,) = faults({**TINY, "task": task, "compute": M5})
    assert (fault.path, "serves no model" in fault.message) == ("task.image_uri", True)


def test_C12_no_row_of_the_table_has_a_python_that_the_worker_lacks() -> None:
    job = JobSpec.model_validate({**SCRIPT, "task": {**SCRIPT["task"], "parallelism": {"strategy": "smp"}}})
    assert "no such image" in str(choose(job, "2.2.0"))
    assert "no such image" not in str(choose(job, "2.3.1"))
