"""A program's own requirements.txt: installed once per node beside the program, never over what the image owns.

pip resolves against what the image has, with the image's own packages pinned; what is missing then goes into a folder
of this job alone. That is the same under every toolkit, with or without a setup.py next to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.bootstrap import download_wheels
from sm_llm.contract.image_packages import REQUIREMENTS, WHEELHOUSE, is_owned
from sm_llm.errors import RunFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PIP = (sys.executable, "-P", "-m", "pip", "install", "--disable-pip-version-check", "--no-input")
_CONFLICT = "The conflict is caused by:"


def install(
    program: Path,
    folder: Path,
    line: str | None,
    environ: Mapping[str, str] = os.environ,
    run: Callable[..., Any] = subprocess.run,
) -> list[str]:
    """Install what ``program``'s requirements ask for and this image lacks into ``folder``.

    The packages of the image stack ``line`` stay as they are. Returns what was installed, as ``name==version``. Raises
    ``RunFailed`` with the file and pip's own last words.
    """
    file = program / REQUIREMENTS
    if not file.is_file():
        return []
    with tempfile.TemporaryDirectory() as scratch:
        wanted = _Wanted(file, Path(scratch), environ, run)
        found = wanted.resolve(_pins(line))
        if found:
            wanted.install(found, folder)
    return [f"{it['metadata']['name']}=={it['metadata']['version']}" for it in found]


def _pins(line: str | None) -> list[str]:
    """The image's own packages in the versions that it has."""
    # A broken installation can have a distribution without a name.
    found = {it.metadata["Name"]: it.version for it in metadata.distributions() if it.metadata["Name"]}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if is_owned(name, line)]


class _Wanted:
    """One requirements file and the pip that reads it."""

    def __init__(self, file: Path, scratch: Path, environ: Mapping[str, str], run: Callable[..., Any]) -> None:
        self._file = file
        self._scratch = scratch
        self._environ = environ
        self._run = run
        self._source: list[str] = []
        if wheelhouse := environ.get(WHEELHOUSE):
            download_wheels(wheelhouse, scratch)
            self._source = ["--no-index", "--find-links", str(scratch)]

    def resolve(self, pins: list[str]) -> list[dict[str, Any]]:
        """What is to be installed, as pip reports it."""
        constraints, report = self._scratch / "image.txt", self._scratch / "report.json"
        constraints.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        wanted = ["--requirement", str(self._file), "--constraint", str(constraints)]
        # The image's own packages are constraints: what would replace one of them fails here, before anything is
        # installed.
        self._pip(["--dry-run", "--report", str(report), *wanted])
        return list(json.loads(report.read_text(encoding="utf-8"))["install"])

    def install(self, found: list[dict[str, Any]], folder: Path) -> None:
        """Exactly what was resolved, and nothing that it depends on."""
        lock = self._scratch / "lock.txt"
        lock.write_text("".join(f"{_exact(it)}\n" for it in found), encoding="utf-8")
        # With ``--target`` pip ignores what is installed: resolving anew would bring every dependency a second time.
        self._pip(["--no-deps", "--target", str(folder), "--requirement", str(lock)])

    def _pip(self, arguments: list[str]) -> None:
        done = self._run(
            [*_PIP, *self._source, *arguments],
            env=dict(self._environ), cwd=self._file.parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RunFailed(
                f"{self._file}: cannot be installed: {_last_output(done.stdout, done.stderr) or 'pip failed'}"
            )


def _last_output(out: str, errors: str) -> str:
    """pip's reason: what conflicts with what, which it prints apart from its errors, else its first errors."""
    _, _, conflict = out.partition(_CONFLICT)
    lines = conflict.strip().partition("\n\n")[0].splitlines() if conflict else errors.splitlines()
    wanted = [line.strip().removeprefix("ERROR: ") for line in lines if conflict or line.startswith("ERROR:")]
    hint = ["constraints are the image's own packages"] if conflict else []
    return "; ".join((wanted or errors.strip().splitlines()[-1:]) + hint)


def _exact(found: Mapping[str, Any]) -> str:
    name, version = found["metadata"]["name"], found["metadata"]["version"]
    # An index's own address may hold a password, which the report leaves out.
    return f"{name} @ {found['download_info']['url']}" if found["is_direct"] else f"{name}=={version}"
