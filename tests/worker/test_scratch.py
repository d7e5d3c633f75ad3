"""The disk for large temporary files: as configured, else the largest, never a folder that the platform uploads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sm_llm.errors import RunFailed
from sm_llm.runs.run_paths import CONTAINER_BASE, ContainerPaths
from sm_llm.worker.scratch import DISK_ENVIRONMENT, scratch_folder


def test_a_simulated_node_keeps_its_files_below_its_base(tmp_path: Path) -> None:
    container = ContainerPaths(tmp_path)
    assert scratch_folder(container, "run", 0, {}) == container.scratch


def test_the_disk_that_is_reported_is_used_and_the_same_for_every_attempt(tmp_path: Path) -> None:
    reported = {DISK_ENVIRONMENT: str(tmp_path)}
    folders = {scratch_folder(ContainerPaths(Path(f"/base-{attempt}")), "run", 1, reported) for attempt in (1, 2)}
    assert folders == {tmp_path / "sm-llm" / "run" / "node-1"}


@pytest.mark.parametrize("location", ["model/x", "checkpoints", "nothing"])
def test_CK36_a_disk_where_the_platform_looks_or_that_is_none_is_refused(tmp_path: Path, location: str) -> None:
    reported = tmp_path / location
    if location != "nothing":
        reported.mkdir(parents=True)
    with pytest.raises(RunFailed, match=DISK_ENVIRONMENT):
        scratch_folder(ContainerPaths(tmp_path), "run", 0, {DISK_ENVIRONMENT: str(reported)})


def test_in_a_container_the_largest_disk_is_taken(tmp_path: Path) -> None:
    container = ContainerPaths(Path(CONTAINER_BASE))
    memory = Path("/dev/shm")
    larger = max((tmp_path, memory), key=lambda it: shutil.disk_usage(it).total if it.is_dir() else 0)
    found = scratch_folder(container, "run", 0, {}, (str(tmp_path), str(memory), "/no/such/disk"))
    if not Path(CONTAINER_BASE).exists():
        assert found == larger / "sm-llm" / "run" / "node-0"
    assert scratch_folder(container, "run", 0, {}, ()) == container.scratch
