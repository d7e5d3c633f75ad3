"""Where a node's large temporary files go: the disk that is named, else the largest one of the machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import RunFailed
from sm_llm.owned import private_folder
from sm_llm.runs.run_paths import CONTAINER_BASE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.runs.run_paths import ContainerPaths

DISK_ENVIRONMENT = "SM_LLM_SCRATCH_DISK"
"""Variable that names a folder on the disk to use (``environment`` of a job may set it)."""

LOCAL_DISKS = ("/opt/dlami/nvme", "/opt/sagemaker", "/tmp")
"""Where AWS's machine images and containers mount an instance's own disks."""


def scratch_folder(
    container: ContainerPaths, run_id: str, node: int, environ: Mapping[str, str], disks: tuple[str, ...] = LOCAL_DISKS
) -> Path:
    """The folder, the same for every attempt of a run on a node, so that what is there need not be fetched again.

    A simulated node keeps its files below its own base. Raises ``RunFailed`` for a disk that cannot be used, or that
    lies where the platform archives or copies what it finds.
    """
    if reported := environ.get(DISK_ENVIRONMENT):
        _check(Path(reported), container)
        return _own(Path(reported), run_id, node)
    # The machine's large disks are shared by all nodes that it simulates.
    if str(container.base) != CONTAINER_BASE:
        return container.scratch
    usable = [path for path in map(Path, disks) if path.is_dir() and os.access(path, os.W_OK)]
    best = max(usable, key=_size, default=container.base)
    # Only if it is larger: on many instances all of these are one disk.
    return _own(best, run_id, node) if _size(best) > _size(container.base) else container.scratch


def _own(disk: Path, run_id: str, node: int) -> Path:
    try:
        return private_folder(disk / "sm-llm") / run_id / f"node-{node}"
    except OSError as error:
        raise RunFailed(f"{error}. Name a folder of your own with {DISK_ENVIRONMENT}") from error


def _size(path: Path) -> int:
    return shutil.disk_usage(path).total if path.exists() else 0


def _check(reported: Path, container: ContainerPaths) -> None:
    problem = ""
    if not reported.is_dir() or not os.access(reported, os.W_OK):
        problem = "is not a folder that can be written to"
    watched = (container.model, container.output_data, container.base / "checkpoints")
    # Through links: a link to such a folder is archived as well.
    if any(reported.resolve().is_relative_to(it.resolve()) for it in watched):
        problem = "lies where the platform archives or copies what it finds"
    if problem:
        raise RunFailed(f"{DISK_ENVIRONMENT}: {reported} {problem}. Name a folder on a large disk of this machine")
