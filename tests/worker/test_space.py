"""Disks without room: found before training where that can be seen, and reported as a full disk in a save."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from nodes import Nodes, holding
from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.contract.failure import Cause
from sm_llm.storage.publication.publish import find_newest
from sm_llm.storage.uri import open_store
from sm_llm.worker.inputs.space import Disk, disk_of, lacking
from sm_llm.worker.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)


def fill_up(disk: Path, room: int) -> Path:
    """Leave only ``room`` bytes."""
    filler = disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(b"x" * (shutil.disk_usage(disk).free - room))
    return filler


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    mount = shutil.which("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [str(mount), "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("may not mount a small tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.integration
def test_CK34_a_disk_full_in_a_save_fails_the_job_by_name_and_leaves_the_commit_before(
    small_disk: Path, forks: dict[str, str]
) -> None:
    run = small_disk / "run"
    task = {"checkpoint": {"every_steps": 5}, "validation": {"every_steps": 4000}}
    with Nodes(run, environ=forks, before=holding(6, run / "full"), **task) as job:
        job.until(lambda: job.events("checkpoint_published"))
        before = find_newest(open_store(run), run_id="run").commit
        filler = fill_up(small_disk, 700_000)
        (run / "full").touch()
        job.ended()
        failures = job.failures()
    assert before is not None
    assert {it.cause for it in failures} == {Cause.DISK_FULL}, job.log()
    assert "disk full in the save of step " in failures[0].headline
    filler.unlink()
    after = find_newest(open_store(run), run_id="run").commit
    assert after is not None
    assert after.save_id == before.save_id


@pytest.mark.integration
def test_CK34_a_disk_without_any_room_left_can_still_be_reported_of(small_disk: Path, forks: dict[str, str]) -> None:
    late = {"every_steps": 4000}
    with Nodes(small_disk / "run", environ=forks, checkpoint=late, validation=late) as job:
        job.until_step(5)
        fill_up(small_disk, 0)
        job.ended()
        failures = job.failures()
    assert {it.cause for it in failures} == {Cause.DISK_FULL}, job.log()


def test_CK34_a_disk_that_cannot_hold_one_checkpoint_is_reported_before_the_first_step(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 400_000))
    run = small_disk / "run"
    assert main("train", job_environment(job_file(train_task(), run, 1))) == 1
    assert "no space for a checkpoint" in capsys.readouterr().err
    assert not events(run, "step")


def test_a_disk_that_holds_scratch_and_storage_needs_room_for_both() -> None:
    a, b = Disk("h:1", "/a", 100), Disk("h:2", "/b", 100)
    assert lacking([(a, 50), (a, 50)], b, 100) is None
    assert lacking([(a, 50), (a, 51)], b, 100) is not None
    assert lacking([(b, 1)], b, 100) is not None
    assert lacking([(a, 0)], b, 101) is not None


def test_a_folder_that_is_not_there_yet_is_on_the_disk_above_it(tmp_path: Path) -> None:
    assert disk_of(tmp_path / "a" / "b").name == disk_of(tmp_path).name
