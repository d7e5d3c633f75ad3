"""What the service accepts and with which no job can work is refused by name, before anything is paid for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.planner import plan
from tests.launcher.sagemaker.conftest import TINY

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "arn:aws:kms:{}:111122223333:key/0"


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (("environment.CUDA_VISIBLE_DEVICES=0",), "environment.CUDA_VISIBLE_DEVICES", "hide GPUs"),
        (("environment.AWS_PROFILE=x",), "environment.AWS_PROFILE", "that the container does not have"),
        (("backend.tags={'sm_llm:run': x}",), "backend.tags.sm_llm:run", "begins with sm_llm:"),
        (("backend.vpc={subnets: [sg-1], security_group_ids: [sg-1]}",), "backend.vpc.subnets", "begin with subnet-"),
        (
            ("backend.vpc={subnets: [subnet-1], security_group_ids: [subnet-1]}",),
            "backend.vpc.security_group_ids", "begin with sg-",
        ),
        (
            ("backend.vpc={subnets: [subnet-1, subnet-1], security_group_ids: [sg-1]}",),
            "backend.vpc.subnets", "an id twice",
        ),
        (("storage_options.region=banana",), "storage_options.region", "not a region of AWS"),
        (("storage_options.region=cn-north-1",), "storage_options.region", "is of partition aws-cn"),
        ((f"storage_options.kms_key_id={KEY.format('eu-west-1')}",), "storage_options.kms_key_id", "is in eu-west-1"),
        (("storage_options.storage_class=GLACIER",), "storage_options.storage_class", "is an archive"),
        (("storage_options.storage_class=DEEP_ARCHIVE",), "storage_options.storage_class", "is an archive"),
        (("storage_options.storage_class=BANANA",), "storage_options.storage_class", "not a storage class of S3"),
    ],
    ids=lambda it: it[0] if isinstance(it, tuple) else "",
)  # fmt: skip
def test_D13_what_no_job_can_work_with_is_refused(
    overrides: tuple[str, ...], path: str, words: str, faults: Callable[..., list[Any]]
) -> None:
    found = faults(TINY, *overrides)
    assert [(it.path, words in it.message) for it in found] == [(path, True)], found


@pytest.mark.parametrize(
    "overrides",
    [
        ("storage_options.endpoint_url=https://s3.example.com", "storage_options.region=banana"),
        ("storage_options.endpoint_url=https://s3.example.com", "storage_options.storage_class=FAST"),
        ("storage_options.region=eu-west-1", f"storage_options.kms_key_id={KEY.format('eu-west-1')}"),
        ("storage_options.storage_class=INTELLIGENT_TIERING",),
        ("backend.tags={project: x}", "environment.NCCL_DEBUG=INFO"),
    ],
    ids=lambda it: it[0],
)
def test_D13_what_works_is_not_refused(overrides: tuple[str, ...], faults: Callable[..., list[Any]]) -> None:
    assert faults(TINY, *overrides) == []


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "LD_LIBRARY_PATH"])
def test_D13_a_variable_of_the_images_own_is_warned_of(name: str) -> None:
    (it,) = plan(TINY, f"environment.{name}=/x")
    assert any(text.startswith(f"environment.{name}: takes the place") for text in it.warnings)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_D13_a_store_that_only_this_machine_reaches_is_warned_of(host: str) -> None:
    (it,) = plan(TINY, f"storage_options.endpoint_url=http://{host}:9000")
    assert any(f"http://{host}:9000 is this machine alone" in text for text in it.warnings)
