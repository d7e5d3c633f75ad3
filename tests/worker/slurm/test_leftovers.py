"""What runs leave on a node's disk, and when it goes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sm_llm.worker.slurm.leftovers import KEPT_SECONDS, leave, sweep, use

if TYPE_CHECKING:
    from pathlib import Path


def test_folders_of_other_runs_go_a_week_after_their_last_use(tmp_path: Path) -> None:
    for run in ("own", "old", "busy"):
        mark = use(tmp_path / run / "node-a")
        if run != "busy":
            leave(mark)
    (tmp_path / "old" / "node-b").mkdir()
    (tmp_path / "old" / "node-a" / "restored").mkdir()
    now = (tmp_path / "old" / "node-a" / "in-use").stat().st_mtime
    assert sweep(tmp_path, "own", "a", clock=lambda: now + KEPT_SECONDS - 60) == []
    assert sweep(tmp_path, "own", "a", clock=lambda: now + KEPT_SECONDS + 60) == ["old"]
    assert sorted(it.name for it in tmp_path.iterdir()) == ["busy", "old", "own"]
    assert [it.name for it in (tmp_path / "old").iterdir()] == ["node-b"], "the folder of another node"
    leave(mark)


def test_a_folder_without_a_mark_goes_by_its_own_age(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "node-a"
    folder.mkdir(parents=True)
    os.utime(folder, (1000, 1000))
    assert sweep(tmp_path, "own", "a", clock=lambda: 1000 + KEPT_SECONDS) == []
    assert sweep(tmp_path, "own", "a", clock=lambda: 1001 + KEPT_SECONDS) == ["run"]
    assert not (tmp_path / "run").exists()
