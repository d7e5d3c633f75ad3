"""The folders and files that a worker expects, on a node where no platform has made them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

STEPPED = ("train", "script")
"""Task kinds that look for a stop file between two steps; others end at once when they are asked."""


def user_folder(scratch: str) -> Path:
    """This user's folder on a node's disk, which others may share: nobody else may have made it, or may enter it."""
    return Path(scratch) / f"sm-llm-{os.geteuid()}"


def run_folder(job: Mapping[str, Any], base: Path) -> Path:
    """Where the workers of a node keep the files of the run; ``job`` is job.json, ``base`` holds their folders."""
    address = str(job["run_uri"])
    return base / "scratch" / "run" if "://" in address else Path(address)


def make_container_folders(base: Path) -> None:
    """Create the folders and files of the container contract; what an earlier start reported is removed."""
    for folder in ("input/config", "input/data", "model", "output/data", "code", "scratch"):
        (base / folder).mkdir(0o700, parents=True, exist_ok=True)
    for report in ("failure", "stopped"):
        # The base is the same after a restart: an old report would be taken for this start's.
        (base / "output" / report).unlink(missing_ok=True)
    (base / "input/config/hyperparameters.json").write_text("{}", encoding="utf-8")
