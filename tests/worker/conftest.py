"""One torchrun launch per world size; the tests read what it left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_jobs import MODEL, search_path

from sm_llm.worker.script.script_publisher import ScriptPublisher
from tests.fixtures.preloaded import ADDRESS, HOOK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.preloaded import ForkServer


@dataclass(frozen=True)
class World:
    """The runs of one world size."""

    size: int
    folder: Path
    results: dict[str, Any]

    def run(self, name: str) -> Path:
        return self.folder / name


def launch(
    root: Path,
    size: int,
    prepared: dict[str, Path],
    *,
    environ: dict[str, str] | None = None,
    script: str = "run_configurations.py",
    name: str = "",
    seconds: float = 900,
) -> World:
    """Run every configuration under torchrun. ``prepared`` are runs of another world size to be continued."""
    folder = root / (name or f"world-{size}")
    folder.mkdir()
    for location, source in prepared.items():
        shutil.copytree(source, folder / location / source.name)  # a run keeps its name: its commits hold it
    program = Path(__file__).with_name(script)
    command = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    argv = [*command, f"--log-dir={folder / 'torchrun'}", str(program), str(folder)]
    surroundings = {**os.environ, **(environ or own_start())}
    done = subprocess.run(argv, env=surroundings, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return World(size, folder, json.loads((folder / "results.json").read_text()))


def own_start() -> dict[str, str]:
    """Variables of programs that start as a user's do."""
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}


@pytest.fixture(autouse=True)
def _publishers_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of a failed program ends with its process, which here is that of the tests: it would continue to poll."""
    started: list[ScriptPublisher] = []
    start = ScriptPublisher.start
    monkeypatch.setattr(ScriptPublisher, "start", lambda self: (started.append(self), start(self))[1])
    yield
    for publisher in started:
        publisher._closing.set()
    for publisher in started:
        publisher._thread.join(60)
        assert not publisher._thread.is_alive()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> dict[str, str]:
    """Variables of programs that the fork server starts; those of the hub's library are every test's."""
    hub = {"HF_HOME": str(tmp_path_factory.getbasetemp() / "home" / "hf"), "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", hub["HF_HOME"])
        address = fork_server.address
    search = os.pathsep.join([HOOK, search_path()])
    return {**own_start(), **hub, "PYTHONPATH": search, ADDRESS: address}


@pytest.fixture(scope="session")
def worlds_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("worlds")
    write_padded_rows(root / "padded")
    return root


@pytest.fixture(scope="session")
def world2(worlds_root: Path, forks: dict[str, str]) -> World:
    return launch(worlds_root, 2, {}, environ=forks)


@pytest.fixture(scope="session")
def world1(worlds_root: Path, world2: World, forks: dict[str, str]) -> World:
    return launch(worlds_root, 1, {"from-2": world2.run("half")}, environ=forks)


@pytest.fixture(scope="session")
def world4(worlds_root: Path, world1: World, forks: dict[str, str]) -> World:
    return launch(worlds_root, 4, {"from-1": world1.run("half")}, environ=forks)


def write_padded_rows(folder: Path) -> None:
    """Rows of very different lengths, so that ranks count different numbers of labels."""
    draw = random.Random(1)
    folder.mkdir()
    with (folder / "rows.json").open("w") as stream:
        for _ in range(24):
            ids = [draw.randrange(int(MODEL["vocab_size"])) for _ in range(draw.choice([3, 9, 32]))]
            row = {"input_ids": ids + [0] * (32 - len(ids)), "attention_mask": [1] * len(ids) + [0] * (32 - len(ids))}
            stream.write(json.dumps(row) + "\n")
