"""The CreateTrainingJob request as a value, against golden files, and what goes into S3 beside it."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.launcher.backends.sagemaker.request.limits import limit_issues
from tests.launcher.sagemaker.conftest import ROLE, SCRIPT, TINY, render

GOLDEN = Path(__file__).parents[2] / "golden" / "sagemaker"
GIVEN = (f"backend.role={ROLE}", "storage=s3://bucket/runs")


def script_job(folder: Path) -> dict[str, Any]:
    """A script with the image and parameters of smp, inputs of every kind, and everything an account can ask for."""
    (folder / "train.py").write_text("print('trained')\n")
    return {
        "name": "own-script",
        "task": {
            "kind": "script",
            "entry": "train.py",
            "source": str(folder),
            "args": ["--data", "inputs.train/rows", "--cache", "inputs.cache"],
            "parallelism": {"strategy": "smp", "hybrid_shard_degree": 8, "tensor_parallel_degree": 2},
        },
        "inputs": {
            "train": "s3://bucket/rows",
            "weights": {"uri": "s3://bucket/weights/model.safetensors", "mode": "File"},
            "cache": {"file_system_id": "fs-0123456789abcdef0", "directory_path": "/abcdefgh/cache"},
        },
        "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 2},
        "backend": {
            "name": "sagemaker",
            "role": ROLE,
            "region": "eu-west-1",
            "vpc": {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]},
            "encrypt_inter_container_traffic": True,
            "output_kms_key_id": "alias/out",
            "spot": True,
            "max_run_seconds": 7200,
            "max_retry_attempts": 3,
            "remote_debug": True,
            "base_job_name": "own_script v2",
            "tags": {"team": "nlp"},
        },
        "environment": {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "tcp"},
        "storage": "s3://bucket/runs",
    }


def as_golden(request: dict[str, Any]) -> str:
    """The request with the bundle's digest, which follows every change of our own code, taken out."""
    text = json.dumps(request, indent=2, sort_keys=True) + "\n"
    return re.sub(r"bundles/[0-9a-f]{64}/", "bundles/<digest>/", text)


def golden_request(name: str, tmp_path: Path) -> dict[str, Any]:
    source: Any = script_job(tmp_path) if name == "own-script" else name
    return render(source, *(() if name == "own-script" else GIVEN)).request


NAMES = ("llama-2-7b-fsdp", "llama-2-70b-smp", "llama-3-8b-nxd", "own-script")


@pytest.mark.parametrize("name", NAMES)
def test_the_request_is_the_golden_one(name: str, tmp_path: Path) -> None:
    assert as_golden(golden_request(name, tmp_path)) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_request_keeps_every_limit_of_the_service(name: str, tmp_path: Path) -> None:
    assert list(limit_issues(golden_request(name, tmp_path))) == []


def test_equal_jobs_give_equal_bytes() -> None:
    first, second = render(TINY), render(TINY)
    assert first.request == second.request
    assert dict(first.uploads) == dict(second.uploads)


def test_job_json_lies_beside_the_bundle_and_is_what_the_worker_reads(tmp_path: Path) -> None:
    submission = render(TINY, attempt=3)
    (bundle, job), channel = submission.uploads, submission.request["InputDataConfig"][-1]
    assert channel["ChannelName"] == "job"
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == job.removesuffix("job.json")
    assert job == "s3://bucket/runs/tiny-20261128-040000-ab12/job/attempt-3/job.json"
    assert json.loads(submission.request["HyperParameters"]["sagemaker_submit_directory"]) == bundle
    (tmp_path / "job.json").write_bytes(submission.uploads[job])
    assert JobFile.read(tmp_path / "job.json") == submission.job


def test_inputs_are_channels_and_the_worker_reads_their_folders(tmp_path: Path) -> None:
    job = render(script_job(tmp_path)).job
    assert job.spec.task.args == ["--data", "/opt/ml/input/data/train/rows", "--cache", "/opt/ml/input/data/cache"]
    assert job.spec.task.source == "/opt/ml/code/source"
    assert job.channels["cache"] == "fsx://fs-0123456789abcdef0/abcdefgh/cache"


def test_places_that_are_no_inputs_are_left_to_the_worker() -> None:
    rows = {"format": "rows", "train": "s3://bucket/rows/train", "seq_length": 64}
    submission = render({**TINY, "task": {**TINY["task"], "data": rows}})
    assert [it["ChannelName"] for it in submission.request["InputDataConfig"]] == ["job"]
    assert submission.job.spec.task.data.train == "s3://bucket/rows/train"


def test_CK37_what_sagemaker_uploads_itself_is_never_an_archive() -> None:
    assert render(TINY).request["OutputDataConfig"]["CompressionType"] == "NONE"


def test_debugger_and_profiler_are_off() -> None:
    request = render(TINY).request
    assert request["ProfilerConfig"] == {"DisableProfiler": True}
    assert "DebugHookConfig" not in request


def test_OB04_metric_definitions_are_the_same_on_every_path(tmp_path: Path) -> None:
    definitions = [golden_request(name, tmp_path)["AlgorithmSpecification"]["MetricDefinitions"] for name in NAMES]
    assert all(it == definitions[0] for it in definitions)
    off = render(TINY, "backend.metric_definitions=false").request
    assert "MetricDefinitions" not in off["AlgorithmSpecification"]


def test_DL34_a_name_is_made_fit_and_kept_as_a_tag(tmp_path: Path) -> None:
    request = render(script_job(tmp_path)).request
    assert request["TrainingJobName"].startswith("own-script-v2-2026")
    assert {"Key": "sm_llm:name", "Value": "own_script v2"} in request["Tags"]


def test_the_bundle_holds_package_entrypoints_and_program(tmp_path: Path) -> None:
    submission = render(script_job(tmp_path))
    archive = next(body for uri, body in submission.uploads.items() if uri.endswith(".tar.gz"))
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        names = set(opened.getnames())
    assert {"train.py", "script.py", "sm_llm/__init__.py", "sm_llm/recipes/smoke.yaml", "source/train.py"} <= names
    assert not names & {"setup.py", "setup.cfg", "requirements.txt"}


def test_LM02_a_dry_run_shows_sizes_of_what_is_uploaded() -> None:
    shown = render(SCRIPT).to_json()
    assert sorted(uri.rpartition("/")[2] for uri in shown["uploads"]) == ["job.json", "sourcedir.tar.gz"]
    assert all(isinstance(size, int) and size > 0 for size in shown["uploads"].values())
    json.dumps(shown)
