"""The checks of a node before training starts on it: each fault by itself, and none on a node that is fit."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm_llm.worker.node_setup import preflight
from sm_llm.worker.node_setup.preflight import Expected, node_issues


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """``dev`` and ``proc`` of a node with two GPUs and a shared file system at /fsx data."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /fsx\\040data rw - lustre fsx rw\n"
    )
    return tmp_path


def expected(folder: Path, **more: object) -> Expected:
    fields = {
        "private": folder / "own",
        "writable": [folder],
        "scratch": folder,
        "devices": "nvidia",
        "device_count": 2,
        **more,
    }
    return Expected(**fields)  # type: ignore[arg-type]


def test_a_fit_node(machine: Path, tmp_path: Path) -> None:
    assert node_issues(expected(tmp_path), root=machine) == []


def test_accelerators_that_are_not_visible(machine: Path, tmp_path: Path) -> None:
    (machine / "dev/nvidia1").unlink()
    assert node_issues(expected(tmp_path), root=machine) == ["1 nvidia devices are visible, and 2 are expected"]


GPU = "GPU {0}: NVIDIA H200 (UUID: GPU-{0})\n  MIG 1g.18gb     Device  0: (UUID: MIG-{0})\n"
LOST = "Unable to determine the device handle for GPU0000:A8:00.0: GPU is lost.  Reboot the system to recover this GPU"


@pytest.mark.parametrize(
    ("program", "issues"),
    [
        (f"printf '{GPU.format(0)}{GPU.format(1)}'", []),
        (f"printf '{GPU.format(0)}{LOST}'; exit 15", [f"nvidia-smi lists 1 GPUs, and 2 are expected: {LOST}"]),
        ("exec sleep 600", ["nvidia-smi does not list the GPUs: "]),
    ],
)
def test_a_GPU_that_has_fallen_off_the_bus(
    program: str, issues: list[str], machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "usr/bin").mkdir(parents=True)
    (machine / "usr/bin/nvidia-smi").write_text(f"#!/bin/sh\n{program.replace(chr(10), chr(92) + 'n')}\n")
    (machine / "usr/bin/nvidia-smi").chmod(0o700)
    if "sleep" in program:
        monkeypatch.setattr(preflight, "_LIST_SECONDS", 0.5)
    found = node_issues(expected(tmp_path), root=machine)
    # Of a program that does not end, the words are Python's.
    assert [it.partition("Command")[0] for it in found] == issues


def test_a_clock_that_is_off(machine: Path, tmp_path: Path) -> None:
    [issue] = node_issues(expected(tmp_path), root=machine, clock=lambda: time.time() - 1000)
    assert re.match(r"the clock is (1000|999) s behind that of", issue)


def test_a_full_disk(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    [issue] = node_issues(expected(tmp_path), root=machine)
    assert issue == f"{tmp_path} has 0.50 GiB left, and at least 1 GiB are needed"


def test_a_folder_that_cannot_be_written(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [issue] = node_issues(expected(tmp_path, writable=[tmp_path / "file" / "below"]), root=machine)
    assert "cannot be written" in issue


def test_SL24_a_folder_that_ends_with_the_container(machine: Path, tmp_path: Path) -> None:
    assert node_issues(expected(tmp_path, mounted=[Path("/fsx data/jobs")]), root=machine) == []
    [issue] = node_issues(expected(tmp_path, mounted=[Path("/fsx/jobs")]), root=machine)
    assert issue == "/fsx/jobs is not on a mount: what is written there is lost with the container"


def test_everything_at_once(machine: Path, tmp_path: Path) -> None:
    bad = expected(tmp_path, device_count=8, mounted=[machine / "elsewhere"])
    assert len(node_issues(bad, root=machine)) == 2
    assert preflight.CLOCK_SECONDS < 900, "S3 refuses requests that are 15 minutes off"


def test_s16_a_folder_that_somebody_else_made_is_refused(machine: Path, tmp_path: Path) -> None:
    """Its owner could put folders of their own in the place of the program's and the checkpoints'."""
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o777)
    assert node_issues(expected(tmp_path, writable=[tmp_path, own / "run"]), root=machine) == []
    assert own.stat().st_mode & 0o777 == 0o700
    if os.geteuid():
        pytest.skip("only root gives folders to other users")
    shutil.rmtree(own)
    own.mkdir()
    os.chown(own, 54_321, 54_321)
    (found,) = node_issues(expected(tmp_path, writable=[tmp_path, own / "run"]), root=machine)
    assert "belongs to another user (number 54321). Name another backend.scratch_folder" in found
    assert not (own / "run").exists()
