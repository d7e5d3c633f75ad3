"""The copy of a program that a node runs: it never holds itself, nor what other runs have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_script import Job

from sm_llm.contract.program_tree import IGNORE_FILE
from sm_llm.errors import RunFailed
from sm_llm.launcher.job_inputs import manifest
from sm_llm.launcher.planning.source_tree import source_tree
from sm_llm.worker.script.program_files import copy_program

if TYPE_CHECKING:
    from pathlib import Path


def program(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text("print('here')\n")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "part.py").touch()
    return folder


def run_folder(folder: Path) -> Path:
    (folder / "events").mkdir(parents=True)
    (folder / "run.json").write_text('{"run_id": "x"}')
    (folder / "events" / "attempt-1-rank0.jsonl").write_text('{"text": "an event"}\n')
    return folder


def copied(target: Path) -> list[str]:
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())


@pytest.mark.parametrize("location", ["out", "pkg/out", "."])
def test_A1_a_copy_inside_its_own_source_ends_and_leaves_runs_out(tmp_path: Path, location: str) -> None:
    source = program(tmp_path / "src")
    run_folder(source / location / "older")
    target = run_folder(source / location / "newer") / "local" / "script" / "program"
    reported = copy_program(source, target)
    assert copied(target) == ["pkg/part.py", "train.py"]
    assert reported == [f"task.source: 2 run folders left out (in {location})"]


def test_A1_a_copy_never_descends_into_its_own_place(tmp_path: Path) -> None:
    source = program(tmp_path / "src")
    target = source / "pkg" / "scratch" / "script" / "program"
    copy_program(source, target)
    assert copied(target) == ["pkg/part.py", "train.py"]


def test_A1_links_that_lead_back_are_left_out_by_name(tmp_path: Path) -> None:
    source = program(tmp_path / "src")
    (source / "other").mkdir()
    (source / "pkg" / "up").symlink_to("..")
    (source / "pkg" / "across").symlink_to(source / "other")
    (source / "other" / "back").symlink_to(source / "pkg")
    reported = copy_program(source, tmp_path / "script" / "program")
    assert any("the link pkg/up leads to a folder that holds it" in text for text in reported)
    assert any("the link pkg/across/back leads to" in text for text in reported)
    assert (tmp_path / "script" / "program" / "pkg" / "part.py").is_file()


def test_a_copy_holds_what_a_bundle_would(tmp_path: Path) -> None:
    source = program(tmp_path / "src")
    for name in ("data/large.bin", "data/small/table.csv", "notes.md", ".hg/store", "pkg/x.egg-info/PKG-INFO"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("text")
    (source / IGNORE_FILE).write_text("data/*\n!data/small\n/*.md\n")
    notices = copy_program(source, tmp_path / "program")
    assert copied(tmp_path / "program") == ["data/small/table.csv", "pkg/part.py", "train.py"]
    assert copied(tmp_path / "program") == sorted(source_tree(source).files)
    assert notices == ["task.source: left out by .smllmignore: data/large.bin, notes.md"]
    recorded = manifest(source, is_program=True)
    assert recorded.files == 3
    (source / "notes.md").write_text("other text")
    assert manifest(source, is_program=True) == recorded


def test_a_bundle_that_was_unpacked_needs_no_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = program(tmp_path / "src")
    (source / IGNORE_FILE).write_text("data/*\n")
    assert sorted(source_tree(source).files) == ["pkg/part.py", "train.py"], "so no image needs pathspec"


@pytest.mark.parametrize("text", [b"\xff", b"!\n"])
def test_an_ignore_file_that_cannot_be_used_fails_the_job_in_one_line(tmp_path: Path, text: bytes) -> None:
    source = program(tmp_path / "src")
    (source / IGNORE_FILE).write_bytes(text)
    with pytest.raises(RunFailed, match=r"\.smllmignore: cannot be read"):
        copy_program(source, tmp_path / "program")


def test_A1_a_job_with_its_scratch_in_its_source_ends(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.folder = job.source / "out" / "run"
    assert job.run() == 0
