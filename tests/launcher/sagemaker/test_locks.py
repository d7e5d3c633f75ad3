"""The locks of plain images: pip finds every wheel, and they are complete and agree with what the images hold."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm_llm.launcher.images.images import IMAGES, Image

LOCKS = Path(str(files("sm_llm"))) / "locks"
SUPPORTED = {it.stack: it for it in reversed(IMAGES) if it.python in ("3.11", "3.12")}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
BROUGHT = {"numpy", "setuptools", "packaging"}
"""What every image has beside torch; which release is not written anywhere."""


def chosen(lock: Path, python: str, folder: Path) -> list[dict[str, Any]]:
    """The metadata of what pip would install on the image, by the index's own words; nothing is unpacked."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, *(f"--platform={it}" for it in PLATFORMS)]
    subprocess.run([*command, "--target", str(folder), "--report", str(report), "-r", str(lock)], check=True)
    return [it["metadata"] for it in json.loads(report.read_text())["install"]]


def unmet(found: list[dict[str, Any]], image: Image) -> list[str]:
    """Requirements that neither the lock's packages nor the image's torch satisfy."""
    versions = {canonicalize_name(it["name"]): it["version"] for it in found} | {"torch": image.torch}
    location = {"python_version": image.python, "python_full_version": f"{image.python}.0", "extra": ""}
    wanted = [(it["name"], Requirement(text)) for it in found for text in it.get("requires_dist", ())]
    return [
        f"{owner}: {requirement}"
        for owner, requirement in wanted
        if requirement.marker is None or requirement.marker.evaluate(location)
        if (name := canonicalize_name(requirement.name)) not in BROUGHT
        if not requirement.specifier.contains(versions.get(name, "0"), prereleases=True)
    ]


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("image", SUPPORTED.values(), ids=lambda it: f"{it.stack}-{it.python}")
def test_a_lock_installs_beside_its_image(image: Image, tmp_path: Path) -> None:
    lock = LOCKS / f"{image.stack}.txt"
    found = chosen(lock, image.python, tmp_path)
    names = {canonicalize_name(it["name"]) for it in found}
    assert len(names) == len([line for line in lock.read_text().splitlines() if "==" in line])
    assert "torch" not in names
    assert unmet(found, image) == []
