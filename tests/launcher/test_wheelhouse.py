"""Wheels for jobs that reach no package index: downloaded by pip for the image's Python, and installed from there."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError, SubmitError
from sm_llm.launcher.images.images import IMAGES
from sm_llm.launcher.images.wheelhouse import STACKS, download_commands, wheelhouse
from tests.fixtures.wheels import wheel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.mark.parametrize("line", STACKS)
def test_wheels_are_those_of_every_python_of_the_images(line: str) -> None:
    pythons = {row.python for row in IMAGES if row.stack == line}
    commands = download_commands(line, "folder", ["mine.txt"])
    assert {argv[argv.index("--python-version") + 1] for argv in commands} == pythons
    for argv in commands:
        assert [argv[at + 1] for at, word in enumerate(argv) if word == "--requirement"][1] == "mine.txt"
        assert "--no-deps" in argv


def test_what_pip_downloads_lies_under_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, with one made wheel in place of the lock."""
    (tmp_path / "index").mkdir()
    wheel(tmp_path / "index")
    (tmp_path / "mine.txt").write_text("tinystock==1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))

    def without_the_lock(argv: Sequence[str], **options: Any) -> Any:
        at = argv.index("--requirement")
        return subprocess.run([*argv[:at], *argv[at + 2 :]], **options)

    found = wheelhouse("gpu", str(tmp_path / "wheels"), [str(tmp_path / "mine.txt")], run=without_the_lock)
    assert found == ["tinystock-1.0-py3-none-any.whl"]
    assert (tmp_path / "wheels" / found[0]).is_file()


def test_pips_own_reason_is_reported_and_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SubmitError, match="wheels of image stack smp: ERROR: No matching distribution"):
        wheelhouse("smp", str(tmp_path / "wheels"))
    assert not (tmp_path / "wheels").exists()
    with pytest.raises(PlanError, match="there is no such image stack"):
        wheelhouse("tpu", str(tmp_path / "wheels"))
