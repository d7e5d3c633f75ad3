"""Kernels that cannot be loaded are reported in one line, before anything of many nodes starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from worker_jobs import job_environment, job_file, train_task

from sm_llm.errors import RunFailed
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.supervision.kernel_probe import probe_kernels, reason_not_to_load

if TYPE_CHECKING:
    from pathlib import Path

LINKER = "libcudart.so.12: cannot open shared object file: No such file or directory"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that fails as one linked to another CUDA does."""
    (tmp_path / "made_kernel.py").write_text(f"print('loading')\nraise ImportError({LINKER!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "made_kernel"


def context(tmp_path: Path, **task: object) -> WorkerContext:
    job = job_file(train_task(**task), tmp_path / "run", 2)
    environ = {**job_environment(job), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    return WorkerContext.read(environ)


def test_SR07_a_kernel_of_another_cuda_is_one_line_before_the_start(
    kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe_kernels(context(tmp_path), (kernel,))()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {kernel} is in this image but cannot be loaded: ImportError: {LINKER}")


def test_SR07_where_training_needs_it_the_job_ends_with_the_reason(kernel: str, tmp_path: Path) -> None:
    settle = probe_kernels(context(tmp_path, parallelism={"strategy": "smp"}), (kernel,))
    with pytest.raises(RunFailed, match=f"{kernel} is in this image but cannot be loaded: ImportError: libcudart"):
        settle()


def test_what_is_not_installed_or_can_be_loaded_is_not_a_matter(tmp_path: Path) -> None:
    assert reason_not_to_load("not_there_at_all") is None
    assert reason_not_to_load("json") is None


def test_one_process_of_a_node_looks(kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    polled = context(tmp_path)
    polled.process = ProcessInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)
    probe_kernels(polled, (kernel,))()
    assert capsys.readouterr().out == ""


def test_a_restart_does_not_load_again_what_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kernel is a process that imports torch, in the way of every restart."""
    started = context(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.syspath_prepend(tmp_path / "own")
    (tmp_path / "own").mkdir()
    module = tmp_path / "own" / "good_kernel.py"
    module.write_text(f"open({str(tmp_path / 'loads')!r}, 'a').write('x')\n")
    for loads in (1, 1):
        probe_kernels(started, ("good_kernel",))()
        assert (tmp_path / "loads").read_text() == "x" * loads
    module.write_text("raise ImportError('of another CUDA')\n")
    for _ in range(2):
        probe_kernels(started, ("good_kernel",))()
        assert "good_kernel is in this image but cannot be loaded" in capsys.readouterr().out, (
            "what fails is tried again"
        )
