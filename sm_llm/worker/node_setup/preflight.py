"""Checks a node before training starts on it; they take seconds, and a failed job names the node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.owned import private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CLOCK_SECONDS = 300.0
"""S3 refuses requests whose time is 15 minutes off; a file system shows a difference earlier."""
FREE_BYTES = 1 << 30
# Without persistence mode the driver starts every GPU anew.
_LIST_SECONDS = 120
_GPU = re.compile(r"GPU [0-9]+: ")


@dataclass(frozen=True)
class Expected:
    """What a job needs of each of its nodes."""

    private: Path
    """This user's folder on the node's disk, which is made where it is not there."""
    writable: Sequence[Path]
    """Folders in which the job writes; the first lies on the shared file system."""
    scratch: Path
    mounted: Sequence[Path] = ()
    """Folders that must not lie on the file system of the container, which ends with it."""
    devices: str = ""
    """Prefix of the accelerators' device files, ``nvidia`` or ``neuron``."""
    device_count: int = 0


def node_issues(expected: Expected, *, clock: Callable[[], float] = time.time, root: Path = Path("/")) -> list[str]:
    """Everything that is wrong with this node, in words. ``root`` is where ``dev`` and ``proc`` are."""
    # First: below a folder of somebody else's nothing of ours may be made.
    foreign = _private_issues(expected.private)
    own = [it for it in expected.writable if not foreign or expected.private not in it.parents]
    issues = [*foreign, *(text for folder in own if (text := _write_issue(folder)))]
    if not issues:
        # It needs a new file there, which the folder has just been shown to take.
        issues += _clock_issues(expected.writable[0], clock)
    issues += _disk_issues(expected.scratch)
    issues += _mount_issues(expected.mounted, root)
    issues += _device_issues(expected, root)
    return issues


def _private_issues(folder: Path) -> list[str]:
    try:
        private_folder(folder)
    except OSError as error:
        return [f"{folder} cannot be used: {error}. Name another backend.scratch_folder"]
    return []


def _write_issue(folder: Path) -> str:
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"
    return ""


def _clock_issues(folder: Path, clock: Callable[[], float]) -> Iterator[str]:
    """The shared file system stamps a new file with its own server's time, or with that of this node."""
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        off = clock() - os.fstat(probe.fileno()).st_mtime
    if abs(off) > CLOCK_SECONDS:
        yield f"the clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} that of {folder}"


def _disk_issues(scratch: Path) -> Iterator[str]:
    try:
        free = shutil.disk_usage(scratch).free
    except OSError as error:
        yield f"{scratch} cannot be read: {error.strerror or error}"
        return
    if free < FREE_BYTES:
        yield f"{scratch} has {free / 2**30:.2f} GiB left, and at least {FREE_BYTES / 2**30:.0f} GiB are needed"


def _mount_issues(folders: Sequence[Path], root: Path) -> Iterator[str]:
    if not folders:
        return
    text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    # Field 5 is the mount point, in which blanks are written as octal escapes (proc_pid_mountinfo(5)).
    points = {_unescaped(line.split(" ")[4]) for line in text.splitlines() if line}
    for folder in folders:
        if not any(str(it) in points for it in (folder, *folder.parents) if str(it) != "/"):
            yield f"{folder} is not on a mount: what is written there is lost with the container"


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _device_issues(expected: Expected, root: Path) -> Iterator[str]:
    if not expected.device_count:
        return
    names = [path.name for path in (root / "dev").glob(f"{expected.devices}*")]
    # ``nvidiactl`` and ``nvidia-uvm`` are no GPUs.
    found = [name for name in names if name.removeprefix(expected.devices).isdigit()]
    if len(found) != expected.device_count:
        yield f"{len(found)} {expected.devices} devices are visible, and {expected.device_count} are expected"
    elif expected.devices == "nvidia":
        yield from _gpu_issues(expected.device_count, root / "usr/bin/nvidia-smi")


def _gpu_issues(count: int, program: Path) -> Iterator[str]:
    """A GPU that has fallen off the bus keeps its device file; the driver does not list it."""
    if not program.is_file():
        return
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, errors="replace", timeout=_LIST_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"nvidia-smi does not list the GPUs: {error}"
        return
    lines = f"{done.stdout}\n{done.stderr}".splitlines()
    # Parts of a GPU (MIG) are listed below it, indented.
    listed = [line for line in lines if _GPU.match(line)]
    if len(listed) != count:
        words = next((line for line in lines if line.strip() and line[0] != " " and line not in listed), "")
        yield f"nvidia-smi lists {len(listed)} GPUs, and {count} are expected{f': {words}' if words else ''}"
