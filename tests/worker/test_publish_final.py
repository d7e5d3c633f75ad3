"""A store that is down just when the result is published is waited for; an error that does not pass is not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from worker_jobs import job_file, train_task

from sm_llm.contract.job_file import JOB_ENVIRONMENT
from sm_llm.errors import RunFailed, StorageError
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication.publish import collect_garbage, find_final
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


def publish_result(context: Any, store: Any, files: dict[str, str], **options: Any) -> str | None:
    folder = module.result_folder(context)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    uri: str | None = module.publish_final(context, store, folder, lambda value: [value], {}, **options)
    return uri


def test_another_result_of_the_same_run_does_not_stand_for_this_jobs(context: Any, bucket: str, s3_server: Any) -> None:
    """Two jobs of a pipeline at one run address at once: the second one to end kept nothing and had exit code 0."""
    store = S3Store(bucket, "runs/job-1", S3Options(endpoint_url=s3_server.endpoint))
    first = publish_result(context, store, {"model.bin": "first"})
    with pytest.raises(RunFailed, match="committed first by another save") as raised:
        publish_result(context, store, {"model.bin": "second"})
    final = find_final(store)
    assert final is not None
    assert first is not None
    assert first.endswith(final.save.data_prefix.rstrip("/")), "the first result is still the run's"
    kept = str(raised.value).rpartition("sm-llm sync ")[2].split()[0]
    key = f"{kept.removeprefix(f'{store.uri}/')}/model.bin"
    assert store.get(key) == b"second"
    # A day later, as another job of the run would do it.
    now = time.time() + 86_400
    assert collect_garbage(store, run_id=context.job.run_id, keep_last=1, clock=lambda: now).orphans == ()
    assert store.get(key) == b"second"


def test_an_equal_result_of_another_job_stands_for_this_jobs(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    monkeypatch.setattr(context, "notice", lambda text, level="": notices.append(text))
    store = FolderStore(tmp_path / "run")
    made = [
        publish_result(context, store, {"model.bin": "same", "how.json": seconds}, varying=("how.json",))
        for seconds in ("1.5", "1.7")
    ]
    assert made[0] == made[1]
    assert notices == ["another job of this run has published first, and its result is equal to this job's"]
    assert len(list((tmp_path / "run/final").iterdir())) == 1, "the second copy is deleted"


def test_an_earlier_try_of_the_same_job_is_its_own_result(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, notices = FolderStore(tmp_path / "run"), []
    monkeypatch.setattr(context, "notice", lambda text, level="": notices.append(text))
    monkeypatch.setattr(module, "_may_pass", lambda *_: True)
    once = module._publish_once

    def unanswered(*args: Any) -> Any:
        monkeypatch.setattr(module, "_publish_once", once)
        once(*args)
        raise StorageError("the answer was lost")

    monkeypatch.setattr(module, "_publish_once", unanswered)
    assert publish_result(context, store, {"model.bin": "mine"}) is not None
    assert [text for text in notices if "another job" in text] == []
    assert len(list((tmp_path / "run/final").iterdir())) == 1
