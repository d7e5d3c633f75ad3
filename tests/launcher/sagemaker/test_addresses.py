"""Addresses and names of a job on SageMaker that cannot be what they are taken for are refused by their field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.launcher.sagemaker.conftest import SCRIPT, TINY, plan_of, render

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.errors import Issue

    Faults = Callable[..., list[Issue]]

IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch"


@pytest.mark.parametrize("image", ["not an image", "", "pytorch/pytorch:latest", "public.ecr.aws/x/y:1", f"{IMAGE}:"])
def test_an_image_that_is_not_in_ecr_is_refused(image: str, faults: Faults) -> None:
    (fault,) = faults(TINY, backend={"image_uri": image})
    assert (fault.path, fault.value) == ("backend.image_uri", image)
    assert "dkr.ecr.REGION" in fault.remedy


@pytest.mark.parametrize("image", [IMAGE, f"{IMAGE}:2.13", f"{IMAGE}@sha256:{'0' * 64}"])
def test_an_image_of_ecr_is_taken(image: str, faults: Faults) -> None:
    assert faults(TINY, backend={"image_uri": image}) == []


def test_a_version_beside_an_image_is_warned_of() -> None:
    warnings = plan_of(TINY, backend={"image_uri": IMAGE, "image_version": "2.12"}).warnings
    assert any("2.12 has no effect" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("bucket", "remedy"), [("s3://my-bucket", "Write my-bucket"), ("My_Bucket", "alone"), ("a/b", "alone")]
)
def test_a_bucket_is_given_by_its_name(bucket: str, remedy: str, faults: Faults) -> None:
    (fault,) = faults(TINY, backend={"bucket": bucket})
    assert fault.path == "backend.bucket"
    assert remedy in fault.remedy


@pytest.mark.parametrize("wheels", ["./wheels", "s3//bucket/wheels", "s3://No_Bucket/x"])
def test_a_wheelhouse_lies_in_s3(wheels: str, faults: Faults) -> None:
    (fault,) = faults(TINY, backend={"wheelhouse": wheels})
    assert (fault.path, fault.value) == ("backend.wheelhouse", wheels)


def test_an_input_cannot_take_the_name_of_the_channel_of_the_job(faults: Faults) -> None:
    (fault,) = faults(TINY, inputs={"job": "s3://bucket/x"})
    assert fault.path == "inputs.job"


def test_a_source_that_is_not_there_or_is_a_file_is_refused(tmp_path: Path, faults: Faults) -> None:
    program = tmp_path / "train.py"
    program.touch()
    (missing,) = faults(SCRIPT, f"task.source={tmp_path}/nowhere")
    (file,) = faults(SCRIPT, f"task.source={program}")
    assert missing.path == file.path == "task.source"
    assert str(tmp_path) in file.remedy
    assert faults(SCRIPT, f"task.source={tmp_path}") == []


@pytest.mark.parametrize(
    ("location", "sent"),
    [
        ("s3://bucket/Llama-3.1-8B", "s3://bucket/Llama-3.1-8B/"),
        ("s3://bucket/v1.5", "s3://bucket/v1.5/"),
        ("s3://bucket/rows.jsonl", "s3://bucket/rows.jsonl"),
        ("s3://bucket/rows", "s3://bucket/rows/"),
    ],
)
def test_a_folder_with_a_dot_brings_no_neighbour_of_a_longer_name(location: str, sent: str) -> None:
    request: dict[str, Any] = render(SCRIPT, inputs={"model": location}).request
    assert request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == sent


def test_a_limit_is_reported_by_the_name_that_the_user_gave_and_with_a_remedy(faults: Faults) -> None:
    found = {it.path: it for it in faults(TINY, inputs={"my data": "s3://bucket/x"}, backend={"role": "Trainer"})}
    assert set(found) == {"inputs.my data", "backend.role"}
    assert "arn:aws:iam::" in found["backend.role"].remedy


def test_a_storage_that_is_none_is_reported_once(faults: Faults) -> None:
    assert [it.path for it in faults(TINY, storage="./runs")] == ["storage"]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("storage=s3://bucket/[a]/runs", "storage"),
        (f"storage=s3://bucket/{'x' * 300}", "storage"),
        ("backend.base_job_name=what!", "backend.base_job_name"),
    ],
)
def test_what_our_own_tags_cannot_hold_is_reported_of_the_field_it_comes_from(
    override: str, path: str, faults: Faults
) -> None:
    assert [it.path for it in faults(TINY, override)] == [path]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("ml.p5.48xlage", "Did you mean ml.p5.48xlarge?"),
        ("p5.48xlage", "Write ml.p5.48xlarge"),
        ("ML.P5.48XLARGE", "Write ml.p5.48xlarge"),
        ("ml.nothing", "give compute.processes_per_instance"),
    ],
)
def test_a_misspelt_type_is_reported_alone_and_by_the_type_that_is_near(kind: str, remedy: str, faults: Faults) -> None:
    """Degrees and times cannot be reckoned without it: their faults would only mislead."""
    smp = {"strategy": "smp", "hybrid_shard_degree": 8, "tensor_parallel_degree": 2}
    (fault,) = faults(TINY, task={"parallelism": smp}, compute={"instance_type": kind, "instance_count": 2})
    assert fault.path == "compute.instance_type"
    assert remedy in fault.remedy


def test_the_types_of_all_groups_are_read(faults: Faults) -> None:
    groups = [{"name": "a", "instance_type": "ml.p5.48xlarg", "instance_count": 2}]
    (fault,) = faults(TINY, backend={"instance_groups": groups})
    assert fault.path == "backend.instance_groups.0.instance_type"
    timed = {"instance_groups": groups, "max_run_seconds": 3600}  # nobody knows how fast an unknown type is
    warnings = plan_of(TINY, "compute.processes_per_instance=8", backend=timed).warnings
    assert any("ml.p5.48xlarg is not in our table" in warning for warning in warnings)
