"""Partition, region, account, disk and network of a job: what does not belong together is refused or warned of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.bucket_names import bucket_problem
from sm_llm.errors import Issue, StorageError
from sm_llm.launcher.images import images
from sm_llm.launcher.images.images import packages_of
from sm_llm.launcher.planning.requirement_file import requirement_issues
from sm_llm.storage.uri import parse
from tests.launcher.sagemaker.conftest import SCRIPT, TINY, plan_of

if TYPE_CHECKING:
    from pathlib import Path

Faults = Callable[..., list[Issue]]
ACCOUNT = "123456789012"
OTHER = "111122223333"
DLC = "763104351884.dkr.ecr"
TAG = "pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker"


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        (f"backend.role=arn:aws-cn:iam::{ACCOUNT}:role/sm", "backend.role", "partition aws-cn"),
        (f"backend.role=arn:aws-us-gov:iam::{ACCOUNT}:role/sm", "backend.role", "partition aws-us-gov"),
        ("backend.region=cn-north-1", "backend.role", "cn-north-1, which is of aws-cn"),
        ("backend.region=us-gov-west-1", "backend.role", "aws-us-gov"),
        (f"backend.role=arn:aws:s3::{ACCOUNT}:role/sm", "backend.role", "not an ARN of iam"),
        (
            f"backend.output_kms_key_id=arn:aws:kms:eu-west-1:{ACCOUNT}:key/abc",
            "backend.output_kms_key_id",
            "is in eu-west-1",
        ),
        (
            f"backend.output_kms_key_id=arn:aws-cn:kms:us-west-2:{ACCOUNT}:key/abc",
            "backend.output_kms_key_id",
            "partition aws-cn",
        ),
        (
            f"backend.output_kms_key_id=arn:aws:iam::{ACCOUNT}:role/x",
            "backend.output_kms_key_id",
            "not an ARN of kms",
        ),
        (
            f"backend.training_plan_arn=arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-plan/p",
            "backend.training_plan_arn",
            "is in us-east-1",
        ),
        (
            f"backend.training_plan_arn=arn:aws:sagemaker:us-west-2:{OTHER}:training-plan/p",
            "backend.training_plan_arn",
            f"account {OTHER}",
        ),
        (
            f"storage_options.kms_key_id=arn:aws-cn:kms:cn-north-1:{ACCOUNT}:key/abc",
            "storage_options.kms_key_id",
            "partition aws-cn",
        ),
        (
            f"secrets.TOKEN=secretsmanager:arn:aws-cn:secretsmanager:cn-north-1:{ACCOUNT}:secret:x",
            "secrets.TOKEN",
            "partition aws-cn",
        ),
        (f"backend.image_uri={DLC}.us-east-1.amazonaws.com/{TAG}", "backend.image_uri", "image is in us-east-1"),
        (f"backend.image_uri={DLC}.us-west-2.amazonaws.com.cn/{TAG}", "backend.image_uri", "end with amazonaws.com"),
        (
            f"backend.image_uri=626614931356.dkr.ecr.us-west-2.amazonaws.com/{TAG}",
            "backend.image_uri",
            "they are of account 763104351884",
        ),
        ("storage=s3://192.168.1.1/runs", "storage", "IP address"),
        ("backend.bucket=my..bucket", "backend.bucket", "not a valid bucket name"),
    ],
    ids=lambda it: str(it)[:60],
)
def test_f10_D13_what_belongs_to_another_partition_region_or_account_is_refused(
    override: str, path: str, words: str, faults: Faults
) -> None:
    found = {fault.path: str(fault) for fault in faults(TINY, override)}
    assert words in found[path]


def test_D13_a_role_from_the_sdks_defaults_is_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    defaults = {
        "SchemaVersion": "1.0",
        "SageMaker": {"TrainingJob": {"RoleArn": f"arn:aws-cn:iam::{ACCOUNT}:role/sm"}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(defaults))
    monkeypatch.setenv("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", str(tmp_path / "config.yaml"))
    backend = {name: value for name, value in TINY["backend"].items() if name != "role"}
    (fault,) = [it for it in faults({**TINY, "backend": backend}) if it.path == "backend.role"]
    assert "config.yaml" in fault.origin


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"backend.output_kms_key_id=arn:aws:kms:us-west-2:{OTHER}:key/abc", "its policy must allow that"),
        (f"backend.image_uri={OTHER}.dkr.ecr.us-west-2.amazonaws.com/x:1", "let that account pull"),
        ("storage_options.region=eu-west-1", "traffic is billed"),
    ],
)
def test_D13_what_another_account_or_region_may_allow_is_warned_of(override: str, words: str) -> None:
    assert any(words in warning for warning in plan_of(TINY, override).warnings)


@pytest.mark.parametrize(
    "override",
    [
        f"backend.image_uri={DLC}.us-west-2.amazonaws.com/{TAG}",
        f"backend.image_uri={ACCOUNT}.dkr.ecr-fips.us-west-2.amazonaws.com/x:1",
        f"backend.output_kms_key_id=arn:aws:kms:us-west-2:{ACCOUNT}:key/abc",
        "backend.output_kms_key_id=alias/mine",
        f"secrets.TOKEN=secretsmanager:arn:aws:secretsmanager:eu-west-1:{ACCOUNT}:secret:x",
    ],
)
def test_D13_what_belongs_to_the_job_is_neither(override: str, faults: Faults) -> None:
    assert faults(TINY, override) == []
    assert set(plan_of(TINY, override).warnings) <= set(plan_of(TINY).warnings)


@pytest.mark.parametrize(
    "name",
    ["192.168.1.1", "ab", "a" * 64, "My-Bucket", "my_bucket", "-x1", "x1-", "a..b", "xn--a", "sthree-a",
     "amzn-s3-demo-a", "a.mrap", "a--table-s3", ".ab"],
)  # fmt: skip
def test_D13_names_that_no_bucket_can_have(name: str) -> None:
    assert bucket_problem(name)
    with pytest.raises(StorageError, match="names no valid bucket"):
        parse(f"s3://{name}/runs")


@pytest.mark.parametrize("name", ["abc", "a.b-c1", "a" * 63, "1.2.3.4a", "ap-x-s3alias"])
def test_D13_names_that_buckets_have(name: str) -> None:
    assert parse(f"s3://{name}/runs").bucket == name


@pytest.mark.parametrize(
    "line",
    [
        "torch @ https://example.com/torch-2.5.0-cp312-cp312-linux_x86_64.whl",
        "torch@https://example.com/t.whl",
        "https://example.com/torch-2.5.0-cp312-cp312-linux_x86_64.whl",
        "./wheels/flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl",
        "git+https://github.com/pytorch/pytorch.git#egg=torch",
        "git+https://github.com/NVIDIA/TransformerEngine.git#egg=transformer_engine",
        "nvidia-nccl-cu12 @ https://example.com/n.whl",
        "-r more.txt",
    ],
)
def test_D13_an_address_of_what_the_image_owns_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"einops\n{line}\n")
    (tmp_path / "more.txt").write_text("-r requirements.txt\ntorch==2.5.0\n")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl").write_bytes(b"")
    image = next(it for it in images.IMAGES if it.stack == "gpu")
    faults = list(requirement_issues(tmp_path / "requirements.txt", image))
    assert len(faults) == 1
    assert "belongs to the image" in faults[0].message


@pytest.mark.parametrize(
    "line",
    ["einops @ https://example.com/e.whl", "https://example.com/einops-0.8-py3-none-any.whl", "torch", "-r gone.txt"],
)
def test_D13_other_addresses_are_pips_business(line: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"{line}\n")
    faults = list(requirement_issues(tmp_path / "requirements.txt", None))
    assert [fault for fault in faults if "belongs" in fault.message] == []
    assert bool(faults) is (line == "-r gone.txt")


NETWORK = "backend.vpc={subnets: [subnet-0abc1234], security_group_ids: [sg-0abc1234]}"


def test_f10_a_private_network_without_a_wheelhouse_is_warned_of_with_a_number_and_two_ways_out(
    tmp_path: Path,
) -> None:
    (warning,) = [it for it in plan_of(TINY, NETWORK).warnings if it.startswith("backend.vpc")]
    assert f"{len(packages_of('gpu'))} packages" in warning
    assert "backend.wheelhouse" in warning
    assert "backend.image=built" in warning
    (tmp_path / "train.py").write_text("")
    (tmp_path / "requirements.txt").write_text("einops\n")
    task = {**SCRIPT["task"], "source": str(tmp_path)}
    (warning,) = [it for it in plan_of({**SCRIPT, "task": task}, NETWORK).warnings if it.startswith("backend.vpc")]
    assert "requirements.txt" in warning


def test_D13_a_wheelhouse_or_an_open_network_is_not_warned_of() -> None:
    assert not [it for it in plan_of(TINY, NETWORK, "backend.wheelhouse=s3://bucket/w").warnings if "vpc" in it]
    assert not [it for it in plan_of(TINY).warnings if "backend.vpc" in it]


BIG: dict[str, Any] = {
    **TINY,
    "task": {**TINY["task"], "model": {"preset": "llama-3-8b"}, "precision": {"compute": "fp32"}},
    "compute": {"instance_type": "ml.p3.16xlarge"},
    "backend": {**TINY["backend"], "max_run_seconds": 3600},
}


def test_D13_a_volume_is_compared_with_what_it_will_hold(faults: Faults) -> None:
    (fault,) = faults(BIG, "backend.volume_size_gb=20")
    assert fault.path == "backend.volume_size_gb"
    assert "does not hold one checkpoint" in fault.message
    needed = int(fault.remedy.rpartition(" ")[2])
    assert needed * 1e9 > 3 * 8e9 * 12  # three saves of fp32 weights and two moments
    for size, is_warned in ((needed, False), (needed // 2, True)):
        found = plan_of(BIG, f"backend.volume_size_gb={size}").warnings
        assert any("holds up to 3 checkpoints" in it for it in found) is is_warned


def test_D13_so_are_the_disks_of_a_type_that_has_its_own(faults: Faults) -> None:
    small = {**BIG, "compute": {"instance_type": "ml.g5.xlarge"}}
    assert any("holds up to 3 checkpoints" in it for it in plan_of(small).warnings)
    large = {**small, "task": {**BIG["task"], "model": {"preset": "llama-2-70b"}}}
    (fault,) = [it for it in faults(large) if "does not hold one checkpoint" in it.message]
    assert fault.path == "compute.instance_type"


def test_D13_the_default_image_of_every_line_has_a_published_address() -> None:
    for line in ("gpu", "smp", "neuron", "cpu"):
        assert "inferred" not in images.rows(line)[0].note


def test_D13_a_wait_longer_than_any_job_is_refused(faults: Faults) -> None:
    found = faults(TINY, "backend.spot=true", "backend.max_wait_seconds=9000000")
    assert [fault.path for fault in found] == ["backend.max_wait_seconds"]
