"""The register task: the real worker and boto3, a contract double of SageMaker, a run in a real S3 store."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.job_file import JOB_ENVIRONMENT, JobFile
from sm_llm.errors import StorageError
from sm_llm.runs.events.events import read_file
from sm_llm.spec.job import JobSpec
from sm_llm.storage.publication.publish import find_final, new_save, publish, seal
from sm_llm.storage.publication.result import POINTER, RESULT
from sm_llm.storage.uri import open_store
from sm_llm.worker.main import main
from sm_llm.worker.tasks import register
from tests.fixtures.sagemaker_double import Refusal

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.s3_server import S3Server
    from tests.fixtures.sagemaker_double import SageMakerDouble

pytestmark = pytest.mark.integration


@pytest.fixture
def storage(
    bucket: str, s3_server: S3Server, sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    for name in ("working", "sealed"):
        (tmp_path / name).mkdir()
    return f"s3://{bucket}/runs"


def trained(run_uri: str, folder: Path) -> str:
    """A run whose result was published beside what a lost try has left; returns the address of its files."""
    store = open_store(run_uri)
    run_id = run_uri.rpartition("/")[2]
    lost = new_save(run_id, None, world_size=1, node_count=1)
    store.put_if_absent(f"{lost.data_prefix}model.safetensors", b"half of a model")
    (folder / "working" / "config.json").write_text("{}")
    (folder / "working" / "model.safetensors").write_bytes(b"weights")
    save = new_save(run_id, None, world_size=1, node_count=1)
    sealed = seal(folder / "working", folder / "sealed" / run_id)
    publish(store, save, sealed, node=0, leader=True, gather=lambda value: [value])
    return f"{run_uri}/{save.data_prefix}"


def register_job(storage: str, model: str, tmp_path: Path) -> dict[str, str]:
    task = {"kind": "register", "model": model, "group": "models", "image_uri": "serve:1"}
    spec = JobSpec.model_validate({"name": "register", "task": task, "storage": storage}, strict=False)
    job = JobFile(run_id="register-1", attempt=1, run_uri=f"{storage}/register-1", spec=spec, spec_digest="digest")
    folder = tmp_path / "node"
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(job.model_dump_json())
    locations = {JOB_ENVIRONMENT: str(folder / "job.json"), "SAGEMAKER_BASE_DIR": str(folder / "base")}
    return {**os.environ, **locations}


def packages(double: SageMakerDouble) -> list[dict[str, Any]]:
    return [asked for name, asked in double.requests if name == "CreateModelPackage"]


def test_a_version_is_exactly_the_files_of_the_committed_save_and_is_made_once(
    storage: str, sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    location = trained(f"{storage}/train-1", tmp_path)
    environ = register_job(storage, f"{storage}/train-1/result", tmp_path)
    assert main("register", environ) == 0
    assert main("register", environ) == 0
    (sent,) = packages(sagemaker_double)
    (container,) = sent["InferenceSpecification"]["Containers"]
    source = {"S3Uri": location, "S3DataType": "S3Prefix", "CompressionType": "None"}
    assert container == {"Image": "serve:1", "ModelDataSource": {"S3DataSource": source}}
    names = {it.key for it in open_store(location.rstrip("/")).list("")}
    assert names == {"config.json", "model.safetensors"}
    final = find_final(open_store(f"{storage}/register-1"))
    assert final is not None
    assert final.meta["arn"].endswith(":model-package/models/1")


def test_an_attempt_after_one_that_registered_and_did_not_publish_makes_no_second_version(
    storage: str, sagemaker_double: SageMakerDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*given: Any) -> None:
        raise StorageError("the attempt ends here")

    trained(f"{storage}/train-1", tmp_path)
    environ = register_job(storage, f"{storage}/train-1/result", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(register, "publish_final", ends)
        assert main("register", environ) == 1
    assert find_final(open_store(f"{storage}/register-1")) is None
    assert main("register", environ) == 0
    assert sagemaker_double.groups == {"models": 1}
    tokens = [it["ClientToken"] for it in packages(sagemaker_double)]
    assert len(tokens) == 2
    final = find_final(open_store(f"{storage}/register-1"))
    assert final is not None
    assert final.meta["arn"].endswith(":model-package/models/1")


def test_an_attempt_killed_between_the_commit_and_its_report_leaves_both_to_the_next(
    storage: str, sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    trained(f"{storage}/train-1", tmp_path)
    environ = register_job(storage, f"{storage}/train-1/result", tmp_path)
    assert main("register", environ) == 0
    store, model = open_store(f"{storage}/register-1"), tmp_path / "node" / "base" / "model"
    pointer = (model / POINTER).read_bytes()
    # What a kill just after the commit leaves: another container has nothing, and the stable address does not exist.
    shutil.rmtree(tmp_path / "node" / "base")
    store.delete([f"{RESULT}/{POINTER}"])
    assert main("register", environ) == 0
    assert (model / POINTER).read_bytes() == pointer
    assert store.get(f"{RESULT}/{POINTER}") == pointer
    log = next((tmp_path / "node").rglob("attempt-1-rank0.jsonl"))
    assert [it["kind"] for _, it in read_file(log)][-2:] == ["final_published", "nothing_done"]


def test_a_group_that_is_there_gets_one_version_more(
    storage: str, sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    trained(f"{storage}/train-1", tmp_path)
    sagemaker_double.groups["models"] = 4
    assert main("register", register_job(storage, f"{storage}/train-1/result", tmp_path)) == 0
    assert sagemaker_double.groups == {"models": 5}


def test_a_run_without_a_result_and_a_refusal_fail_with_the_reason(
    storage: str, sagemaker_double: SageMakerDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(f"{storage}/train-1").put_if_absent("run.json", b"{}")
    environ = register_job(storage, f"{storage}/train-1/result", tmp_path)
    assert main("register", environ) == 1
    assert "the run has not published a result" in capsys.readouterr().err
    trained(f"{storage}/train-1", tmp_path)
    sagemaker_double.refusals["CreateModelPackage"] = Refusal("AccessDeniedException", "not allowed")
    assert main("register", environ) == 1
    assert "The job's role needs sagemaker:CreateModelPackage" in capsys.readouterr().err
    assert find_final(open_store(f"{storage}/register-1")) is None
