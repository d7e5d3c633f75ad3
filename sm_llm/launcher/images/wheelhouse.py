"""Fills an S3 prefix with the wheels that a stack of stock images lacks, for jobs that reach no package index."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sm_llm.errors import Issue, PlanError, SubmitError
from sm_llm.launcher.images.images import ImageStack, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STACKS: tuple[ImageStack, ...] = get_args(ImageStack)
# What the images' C libraries run; those of the SMP image and of Amazon Linux 2023 have glibc 2.31 and newer.
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")


def wheelhouse(
    stack: str, target: str, requirements: Sequence[str] = (), run: Callable[..., Any] = subprocess.run
) -> list[str]:
    """Download the lock of ``stack`` as wheels with pip, and copy them to ``target``, for ``backend.wheelhouse``.

    ``requirements`` are more files of exact pins, for a program's own packages; what they depend on must be among them.
    Returns the names of the wheels. Raises ``PlanError`` for an unknown stack, ``SubmitError`` with pip's last line.
    """
    from sm_llm.storage.syncing.sync import sync
    from sm_llm.storage.uri import open_store

    if stack not in STACKS:
        raise PlanError(
            [
                Issue(
                    "image-stack-unknown",
                    "stack",
                    "there is no such image stack",
                    stack,
                    f"Stacks: {', '.join(STACKS)}",
                )
            ]
        )
    open_store(target)  # a place that cannot be reached is refused before the download
    with tempfile.TemporaryDirectory() as folder:
        for argv in download_commands(stack, folder, requirements):
            done = run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                raise SubmitError(f"pip cannot download the wheels of image stack {stack}: {last_line}")
        names = sorted(path.name for path in Path(folder).glob("*.whl"))
        sync(folder, target)
    return names


def download_commands(stack: str, folder: str, requirements: Sequence[str] = ()) -> list[list[str]]:
    """pip's commands, one for every Python among the stack's images: wheels for it, and nothing that they need."""
    lock = str(files("sm_llm") / "locks" / f"{stack}.txt")
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    listed = [word for name in (lock, *requirements) for word in ("--requirement", name)]
    # -P: no file of the working folder is taken for a module. --no-deps: the lock lists everything that is needed.
    first = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # pip accepts another platform or Python than its own only for wheels.
    first += ["--only-binary", ":all:", "--implementation", "cp", *platforms, "--dest", folder, *listed]
    pythons = sorted({row.python for row in rows(stack)})  # type: ignore[arg-type]
    return [[*first, "--python-version", python] for python in pythons]
