"""The locks of plain images, installed for real: complete, and agreeing with what the images hold."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, distributions
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm_llm.launcher.images import IMAGES, Image

LOCKS = Path(str(files("sm_llm"))) / "locks"
SUPPORTED = {it.line: it for it in reversed(IMAGES) if it.python in ("3.11", "3.12")}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
BROUGHT = {"numpy", "setuptools", "packaging"}
"""What every image has beside torch; which release is not written anywhere."""


def install(lock: Path, python: str, folder: Path) -> list[Distribution]:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, *(f"--platform={it}" for it in PLATFORMS)]
    subprocess.run([*command, "--target", str(folder), "-r", str(lock)], check=True)
    return list(distributions(path=[str(folder)]))


def unmet(found: list[Distribution], image: Image) -> list[str]:
    """Requirements that neither the lock's packages nor the image's torch satisfy."""
    versions = {canonicalize_name(it.metadata["Name"]): it.version for it in found} | {"torch": image.torch}
    place = {"python_version": image.python, "python_full_version": f"{image.python}.0", "extra": ""}
    wanted = [(it.metadata["Name"], Requirement(text)) for it in found for text in it.requires or []]
    return [
        f"{owner}: {requirement}"
        for owner, requirement in wanted
        if requirement.marker is None or requirement.marker.evaluate(place)
        if (name := canonicalize_name(requirement.name)) not in BROUGHT
        if not requirement.specifier.contains(versions.get(name, "0"), prereleases=True)
    ]


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("image", SUPPORTED.values(), ids=lambda it: f"{it.line}-{it.python}")
def test_a_lock_installs_beside_its_image(image: Image, tmp_path: Path) -> None:
    found = install(LOCKS / f"{image.line}.txt", image.python, tmp_path)
    assert "torch" not in {canonicalize_name(it.metadata["Name"]) for it in found}
    assert unmet(found, image) == []
