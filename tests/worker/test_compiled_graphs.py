"""What torch has compiled is kept in the run's storage, and found there by an attempt with an empty cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from worker_jobs import events, job_environment, job_file, search_path, train_task

from sm_llm.errors import StorageError
from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.folder import FolderStore
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.runtime.compiler_cache import FOLDER_ENVIRONMENT
from sm_llm.worker.training import compiled_graphs
from sm_llm.worker.training.compiled_graphs import CompiledGraphs, open_graphs

if TYPE_CHECKING:
    from pathlib import Path

# The code of an attempt: one small graph in place of a model's.
PROGRAM = """
import torch
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.training.compiled_graphs import CompiledGraphs

context = WorkerContext.read()
graphs = CompiledGraphs(context, "digest")
graphs.restore()
torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
graphs.report(lambda value: [value])
graphs.save()
graphs.save()
context.close()
"""


def attempt(run: Path, number: int) -> str:
    environ = job_environment(job_file(train_task(), run, 1, number))
    environ |= {"PYTHONPATH": search_path(), FOLDER_ENVIRONMENT: str(run.parent / f"cache-{number}")}
    environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else a program is compiled for each instruction set, to try it
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.integration  # the C++ compiler takes ten seconds, and a minute on a busy machine
@pytest.mark.timeout(600)
def test_a_later_attempt_on_another_machine_compiles_nothing_again(tmp_path: Path) -> None:
    printed = [attempt(tmp_path / "run", number) for number in (1, 2)]
    first, second = events(tmp_path / "run", "graphs_compiled")
    assert (first["held"], first["compiled"]) == (0, 1)
    assert (second["held"], second["compiled"], second["hit_rate"]) == (1, 0, 1.0)
    assert "compiled graphs: 0 of 1 graph from the cache\n" in printed[0]
    assert "compiled graphs: 1 of 1 graph from the cache (carried over by the run's storage)" in printed[1]
    assert "warning" not in printed[0] + printed[1]
    suffixes = sorted(it.suffix for it in (tmp_path / "run" / "compiled").rglob("rank-0*"))
    assert suffixes == [".bin", ".whole"]


@pytest.fixture
def context(tmp_path: Path) -> WorkerContext:
    return WorkerContext.read(job_environment(job_file(train_task(), tmp_path / "run", 1)))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch was given to unpickle."""
    given: list[bytes] = []

    def load(body: bytes) -> object:
        given.append(body)
        return None if body == b"unreadable" else SimpleNamespace()

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return given


def kept(context: WorkerContext, body: bytes) -> Path:
    """An attempt's graphs, and where they lie."""
    CompiledGraphs(context, "digest")._keep(body)
    [data] = [it for it in context.run.root.rglob("rank-0-*.bin") if it.read_bytes() == body]
    return data


def attempted(context: WorkerContext, monkeypatch: pytest.MonkeyPatch, body: bytes) -> list[str]:
    """An attempt that compiles ``body`` where it finds nothing; returns what is kept then."""
    graphs = CompiledGraphs(context, "digest")
    graphs.restore()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "save_cache_artifacts", lambda: (body, None))
        graphs.save()
        graphs.save()
    return sorted(it.name for it in context.run.root.rglob("rank-0-*"))


def names(body: bytes) -> list[str]:
    return [f"rank-0-{hashlib.sha256(body).hexdigest()}{it}" for it in (".bin", ".whole")]


def test_graphs_are_read_as_they_were_kept(context: WorkerContext, read: list[bytes]) -> None:
    kept(context, b"graphs")
    CompiledGraphs(context, "digest").restore()
    CompiledGraphs(context, "other").restore()
    assert read == [b"graphs"], "others have other keys"


@pytest.mark.parametrize("again", [b"graphs", b"other graphs"])
@pytest.mark.parametrize("change", ["content", "cut short", "size", "name", "missing", "unnoted", "owner", "mode"])
def test_graphs_that_are_not_those_that_were_kept_are_not_unpickled_but_replaced(
    change: str,
    again: bytes,
    context: WorkerContext,
    read: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, graphs = kept(context, b"graphs"), CompiledGraphs(context, "digest")
    with monkeypatch.context() as patch:
        if change == "content":
            data.write_bytes(b"graphz")
        elif change == "cut short":
            data.write_bytes(b"gra")
        elif change == "size":
            patch.setattr(compiled_graphs, "MOST_BYTES", 5)
        elif change == "name":
            data.with_suffix(".whole").rename(data.with_name("rank-0-other.whole"))
            data.rename(data.with_name("rank-0-other.bin"))
        elif change == "missing":
            data.unlink()
        elif change == "unnoted":
            data.with_suffix(".whole").unlink()
        elif change == "mode":
            data.chmod(0o660)
        else:
            patch.setattr(compiled_graphs.os, "geteuid", lambda: 4711)
            patch.setattr(compiled_graphs, "own_user", lambda _: 4711)
        graphs.restore()
    assert read == []
    is_warned = "compiled graphs of earlier attempts were not read, and are replaced" in capsys.readouterr().out
    assert is_warned == (change != "unnoted"), "what a killed process has not noted yet is no damage"
    assert list(context.scratch.glob("graphs-*")) == []
    graphs._keep(again)
    assert attempted(context, monkeypatch, b"never compiled") == names(again)
    assert read == [again]


def test_graphs_that_torch_does_not_read_are_replaced(
    context: WorkerContext, read: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(context, b"unreadable")
    assert attempted(context, monkeypatch, b"graphs") == names(b"graphs")
    assert "does not read compiled/digest/rank-0-" in capsys.readouterr().out
    assert attempted(context, monkeypatch, b"never compiled") == names(b"graphs")
    assert read == [b"unreadable", b"graphs"]


def test_of_graphs_that_two_attempts_have_kept_at_once_later_ones_leave_the_first(
    context: WorkerContext, read: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [CompiledGraphs(context, "digest") for _ in range(2)]
    kept(context, b"damaged").write_bytes(b"damage")
    for graphs in both:
        graphs.restore()
    both[0]._keep(b"one")
    both[1]._keep(b"two")
    capsys.readouterr()
    first = min((b"one", b"two"), key=lambda it: hashlib.sha256(it).hexdigest())
    for _ in range(2):
        assert attempted(context, monkeypatch, b"never compiled") == names(first)
    assert read == [first, first]
    assert capsys.readouterr().out == ""


def silent(*_: object) -> None:
    raise StorageError("the disk does not answer")


def test_graphs_that_the_storage_did_not_bring_are_not_replaced(
    context: WorkerContext, read: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(context, b"graphs")
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "get_file", silent)
        attempted(context, monkeypatch, b"graphs")
    assert "were not read: the disk does not answer" in capsys.readouterr().out
    assert attempted(context, monkeypatch, b"never compiled") == names(b"graphs")


def test_other_nodes_than_the_first_delete_nothing(
    context: WorkerContext, read: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = kept(context, b"graphs")
    data.write_bytes(b"graphz")
    monkeypatch.setattr(context, "process", replace(context.process, node=1))
    assert attempted(context, monkeypatch, b"other graphs") == names(b"graphs")


def test_graphs_above_the_limit_are_not_kept(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled_graphs, "MOST_BYTES", 5)
    CompiledGraphs(context, "digest")._keep(b"graphs")
    assert "were not kept" in capsys.readouterr().out
    assert not (context.run.root / "compiled").exists()


def test_the_cache_lies_in_the_scratch_folder_unless_the_user_names_one(context: WorkerContext, tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    task = TrainTask.model_validate(train_task(precision={"compile": True}))
    assert open_graphs(context, task, {}, CpuDevice(), environ) is not None
    assert environ == {FOLDER_ENVIRONMENT: str(context.scratch / "compiled")}
    named = {FOLDER_ENVIRONMENT: str(tmp_path / "named")}
    open_graphs(context, task, {}, CpuDevice(), named)
    assert named == {FOLDER_ENVIRONMENT: str(tmp_path / "named")}


@pytest.mark.parametrize(
    ("asked", "run", "is_carried"),
    [
        ("auto", "run", True), ("scratch", "run", False), ("storage", "run", True),
        ("auto", "s3://bucket/run", False), ("scratch", "s3://bucket/run", False), ("storage", "s3://bucket/run", True),
    ],
)  # fmt: skip
def test_s04_pickles_that_somebody_else_may_have_written_are_not_taken_unasked(
    asked: str, run: str, is_carried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an object in S3 nobody knows who has written it, and graphs run code when they are read."""
    opened: list[str] = []
    monkeypatch.setattr(CompiledGraphs, "restore", lambda self: opened.append("read"))
    task = TrainTask.model_validate(train_task(precision={"compile": True, "compiled_graphs": asked}))
    store = SimpleNamespace(uri=run)
    context: Any = SimpleNamespace(scratch=tmp_path, store=store, process=ProcessInfo())
    found = open_graphs(context, task, {}, CpuDevice(), {})
    assert ((found is not None), opened == ["read"]) == (is_carried, is_carried)


def test_a_torch_that_cannot_keep_graphs_is_named_where_they_were_asked_for(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torch.compiler, "load_cache_artifacts")
    for asked in ("auto", "storage"):
        task = TrainTask.model_validate(train_task(precision={"compile": True, "compiled_graphs": asked}))
        assert open_graphs(context, task, {}, CpuDevice(), {}) is None
    assert capsys.readouterr().out.count("precision.compiled_graphs: storage has no effect") == 1


def test_each_setting_that_graphs_follow_from_has_graphs_of_its_own() -> None:
    def digest(world_size: int = 1, **changes: object) -> str:
        task = TrainTask.model_validate(train_task(**changes))
        return compiled_graphs._digest(task, {"hidden_size": 64}, CpuDevice(), world_size)

    found = [
        digest(), digest(2), digest(micro_batch_size=4), digest(precision={"compute": "bf16"}),
        digest(parallelism={"strategy": "fsdp", "activation_checkpointing": "full"}),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert digest(max_steps=5, optim={"learning_rate": 1e-4}) == found[0], "no graph holds these"
