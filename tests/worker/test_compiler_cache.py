"""The folder of torch.compile: one that cannot be used is named, and no half-written library is loaded from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from torch._inductor import codecache, cpp_builder
from worker_jobs import job_environment, job_file, search_path, train_task

from sm_llm.errors import RunFailed
from sm_llm.spec.tasks import TrainTask
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.runtime.compiler_cache import BUILDING, FOLDER_ENVIRONMENT, open_folder, remove_unfinished
from sm_llm.worker.training.compiled_graphs import open_graphs

# What an attempt does before its first graph, and one small graph.
PROGRAM = """
import os, pathlib, torch
from sm_llm.worker.runtime.compiler_cache import remove_unfinished
print(remove_unfinished(pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])))
torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
"""


@pytest.mark.parametrize("name", ["/proc/x", "/proc", "{file}"])
def test_a_folder_that_cannot_be_used_is_refused_by_the_name_of_its_variable(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = name.format(file=tmp_path / "file")
    context = WorkerContext.read(job_environment(job_file(train_task(), tmp_path / "run", 1)))
    task = TrainTask.model_validate(train_task(precision={"compile": True}))
    text = (
        f"TORCHINDUCTOR_CACHE_DIR must name a folder that this process can write to, got '{folder}' "
        r"\((No such file or directory|Permission denied|File exists)\)\. "
        "Set it to another folder, or unset it to use the scratch folder"
    )
    with pytest.raises(RunFailed, match=f"^{text}$"):
        open_graphs(context, task, {}, CpuDevice(), {FOLDER_ENVIRONMENT: folder})


def test_a_scratch_folder_that_cannot_be_used_is_refused_with_another_remedy() -> None:
    with pytest.raises(RunFailed, match=r"got '/proc/x' \(.*\)\. Set it to a folder on another disk$"):
        open_folder(Path("/proc/x"), {})


def test_an_empty_variable_is_none(tmp_path: Path) -> None:
    environ = {FOLDER_ENVIRONMENT: ""}
    assert open_folder(tmp_path / "own", environ) == tmp_path / "own"
    assert environ == {FOLDER_ENVIRONMENT: str(tmp_path / "own")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose precompiled headers lie in ``headers`` beside it."""
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "headers"))
    for folder in ("cache/locks", "headers/locks"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path / "cache"


def built(folder: Path, name: str, *suffixes: str, is_finished: bool) -> list[Path]:
    """What torch has when a compiler has ended, or was killed."""
    folder.mkdir(exist_ok=True)
    if not is_finished:
        (folder / f"{name}_CxxBuild").mkdir()
    paths = [folder / f"{name}{suffix}" for suffix in suffixes]
    for path in paths:
        path.touch()
    return paths


def test_what_a_killed_compiler_has_left_is_removed_and_nothing_else(cache: Path) -> None:
    headers = cache.parent / "headers"
    kept = [
        *built(cache / "aa", "caa.main", ".cpp", ".so", is_finished=True),
        *built(cache / "bb", "cbb.main", ".cpp", is_finished=False),
        *built(headers, "caa.h", "", ".gch", is_finished=True),
        *built(headers, "cbb.h", "", is_finished=False),
    ]
    left = [
        *built(cache / "bb", "cbb", ".so", is_finished=False),
        *(cache / "bb" / f"cbb.main{it}" for it in (".so", ".o")),
    ]
    left += [headers / "cbb.h.gch"]
    for path in left:
        path.touch()
    assert remove_unfinished(cache) == ["cbb.h.gch", "cbb.main.o", "cbb.main.so", "cbb.so"]
    assert [it.exists() for it in kept] == [True] * len(kept)
    assert not any(it.exists() for it in left)
    assert not list(cache.parent.rglob(f"*{BUILDING}"))
    assert remove_unfinished(cache) == []


def test_what_another_process_compiles_now_stays(cache: Path) -> None:
    [library] = built(cache / "aa", "caa.main", ".so", is_finished=False)
    with FileLock(cache / "locks" / "caa.lock"):
        assert remove_unfinished(cache) == []
    assert library.exists()
    assert remove_unfinished(cache) == ["caa.main.so"]


def test_torch_has_the_names_that_are_looked_for() -> None:
    assert f"_{cpp_builder._BUILD_TEMP_DIR}" == BUILDING
    assert Path(codecache._HEADER_LOCK_DIR) == Path(codecache._HEADER_DIR, "locks")


@pytest.mark.integration  # the C++ compiler takes ten seconds, and a minute on a busy machine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pattern", ["cache/*/*.main.so", "tmp/**/*.gch"])
def test_a_later_attempt_compiles_what_was_left_half_written(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()

    def attempt() -> subprocess.CompletedProcess[str]:
        environ: dict[str, str] = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": search_path(),
            "TMPDIR": str(tmp_path / "tmp"),
            FOLDER_ENVIRONMENT: str(tmp_path / "cache"),
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
        }
        return subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True)

    first = attempt()
    assert first.stdout == "[]\n", first.stderr
    [compiled] = tmp_path.glob(pattern)
    with compiled.open("r+b") as file:
        file.truncate(4096)
    if pattern.endswith("gch"):
        for library in tmp_path.glob("cache/*/*.so"):
            library.unlink()
    assert attempt().returncode != 0, "torch takes it for whole"
    compiled.with_name(f"{compiled.stem}{BUILDING}").mkdir()
    second = attempt()
    assert (second.returncode, second.stdout) == (0, f"['{compiled.name}']\n"), second.stderr
