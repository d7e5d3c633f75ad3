"""A store that is down just when the result is published is waited for; an error that does not pass is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from worker_jobs import job_file, train_task

from sm_llm.contract.job_file import JOB_ENVIRONMENT
from sm_llm.errors import StorageError
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication.publish import find_final
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.publishing import publish_final as module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.05)
    job = job_file(train_task(), tmp_path / "job-1", 1)
    job.write(tmp_path / "job.json")
    environ = {JOB_ENVIRONMENT: str(tmp_path / "job.json"), "SAGEMAKER_BASE_DIR": str(tmp_path / "node")}
    made = WorkerContext.read({**environ, "RANK": "0", "WORLD_SIZE": "1"})
    yield made
    made.close()


def result(context: WorkerContext) -> Path:
    folder = module.result_folder(context)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"learned" * 100)
    return folder


def test_CK01_a_result_waits_for_a_store_that_is_down(
    context: Any, bucket: str, fault_proxy: Any, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = S3Store(bucket, "runs/job-1", S3Options(endpoint_url=fault_proxy.endpoint))
    notices: list[str] = []
    monkeypatch.setattr(context, "notice", lambda text, level="": notices.append(text))
    fault_proxy.set(rule("PUT", "expired", count=3))
    uri = module.publish_final(context, store, result(context), lambda value: [value], {})
    assert notices
    assert all("tried again" in text for text in notices)
    final = find_final(store, run_id=context.job.run_id)
    assert final is not None
    assert str(uri).endswith(final.save.data_prefix.rstrip("/"))


def test_a_folder_is_tried_once(context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").write_text("a file where the run's folder should be")
    tries: list[Any] = []
    once = module._publish_once
    monkeypatch.setattr(module, "_publish_once", lambda *args: (tries.append(args), once(*args))[1])
    with pytest.raises(StorageError):
        module.publish_final(context, FolderStore(tmp_path / "other"), result(context), lambda value: [value], {})
    assert len(tries) == 1
