"""The fetch task and sources on the hub: the real worker and library, a double of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worker_jobs import events, job_environment, job_file, result_folder, train_task

from sm_llm.errors import StorageError
from sm_llm.storage.hub import hub_fetch
from sm_llm.storage.publication.publish import find_final
from sm_llm.storage.uri import open_store
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.inputs.stage_inputs import stage_inputs
from sm_llm.worker.main import main

Hub = Any
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": b"weights" * 3000,
    "pytorch_model.bin": b"pickled" * 3000,
    "original/params.json": b"{}",
    "README.md": b"# A model",
}


def fetch_job(run: Path, attempt: int = 1, **task: Any) -> dict[str, str]:
    return job_environment(job_file({"kind": "fetch", "source": "hf://org/name@main", **task}, run, 1, attempt))


def published(run: Path) -> dict[str, bytes]:
    folder = result_folder(run)
    return {it.relative_to(folder).as_posix(): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def test_fetch_publishes_one_weight_format_at_a_pinned_commit(hub: Hub, tmp_path: Path) -> None:
    commit = next(iter(hub.add("org/name", FILES).commits))
    environ = fetch_job(tmp_path / "run")
    assert main("fetch", environ) == 0
    assert sorted(published(tmp_path / "run")) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    final = find_final(open_store(tmp_path / "run"), run_id="run")
    assert final is not None
    assert (final.meta["source"], final.meta["commit"]) == ("hf://org/name@main", commit)
    assert final.meta["checksums"]["model.safetensors"].startswith("sha256:")
    assert commit in events(tmp_path / "run", "notice")[0]["message"]
    assert events(tmp_path / "run", "progress")[-1]["done"] == final.size
    hub.requests.clear()
    assert main("fetch", environ) == 0
    assert not hub.requests
    assert "published already" in events(tmp_path / "run", "nothing_done")[-1]["reason"]


def test_the_next_attempt_continues_with_the_commit_and_the_files_of_the_first(
    hub: Hub, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(hub_fetch, "WORKERS", 1)
    repository = hub.add("org/name", FILES)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("sm_llm.worker.tasks.fetch.publication.write_part", lambda *_: 1 / 0)
        assert main("fetch", fetch_job(run)) == 1
    repository.commit({"config.json": b"other"})
    hub.requests.clear()
    assert main("fetch", fetch_job(run, attempt=2)) == 0
    assert not hub.requests, "everything was stored before"
    assert published(run)["config.json"] == b"{}"


def test_a_refused_fetch_states_what_to_do_where_people_look(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", FILES, token="other", refusal=(403, "GatedRepo"))
    assert main("fetch", fetch_job(tmp_path / "run")) == 1
    (failed,) = events(tmp_path / "run", "failed")
    assert f"Accept the licence at {hub.url}/org/name" in failed["message"]
    assert "secrets.HF_TOKEN=env:HF_TOKEN" in failed["message"]


def staged(run: Path, **changes: Any) -> Any:
    context = WorkerContext.read(job_environment(job_file(train_task(**changes), run, 1)))
    try:
        return stage_inputs(context).task
    finally:
        context.close()


def names(folder: str) -> list[str]:
    return sorted(it.relative_to(folder).as_posix() for it in Path(folder).rglob("*") if it.is_file())


def test_a_job_fetches_only_what_its_fields_read(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", FILES)
    run = tmp_path / "config"
    task = staged(run, model={"preset": None, "path": "hf://org/name", "config": {}}, tokenizer="hf://org/name@main")
    assert [it for it in names(task.model.path) if ".fetch" not in it] == ["config.json"]
    assert [it for it in names(task.tokenizer) if ".fetch" not in it] == ["config.json", "tokenizer.json"]
    task = staged(tmp_path / "all", start={"pretrained": "hf://org/name"}, tokenizer="hf://org/name")
    assert task.start.pretrained == task.tokenizer
    assert "model.safetensors" in names(task.tokenizer)
    assert "pytorch_model.bin" not in names(task.tokenizer)
    pins = [json.loads(it.read_text()) for it in (run / "sources").rglob("source.json")]
    assert {pin["uri"]: len(pin["commit"]) for pin in pins} == {"hf://org/name": 40, "hf://org/name@main": 40}


def test_a_stream_gets_the_commit_of_its_run(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("datasets/org/texts", {"a.jsonl": b"{}"})
    commit = next(iter(repository.commits))
    data = {"format": "stream", "dataset": "hf://datasets/org/texts", "seq_length": 32}
    assert staged(tmp_path / "run", data=data).data.dataset == f"hf://datasets/org/texts@{commit}"
    repository.commit({"a.jsonl": b"{} {}"})
    (tmp_path / "run/local").rename(tmp_path / "elsewhere")
    assert staged(tmp_path / "run", data=data).data.dataset == f"hf://datasets/org/texts@{commit}"


def test_the_other_processes_of_a_node_hear_of_a_failure(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(StorageError, match="shows no such model"):
        staged(tmp_path / "run", tokenizer="hf://org/nothing")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(StorageError, match=r"failed in the node's first process: hf://org/nothing: the hub shows no"):
        staged(tmp_path / "run", tokenizer="hf://org/nothing")
