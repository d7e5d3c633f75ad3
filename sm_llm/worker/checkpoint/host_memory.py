"""How much memory of the host is left to a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class _Files:
    """Where a version of control groups has its limits, and what it calls them."""

    top: str
    limit: str
    used: str
    cached: str


# By the controllers in /proc/self/cgroup: version 2 names none.
_VERSIONS = {
    "": _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that the processes of this node can still allocate; 0 where the system does not state it.

    That is what the machine has, or what the limits of the control groups of this process leave (of a container, a pod
    or a Slurm job), whichever is least. Pages of files that the kernel can drop count as free.
    """
    machine = _numbers(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    return max(0, min([machine, *_left(root)]))


def _left(root: Path) -> Iterator[int]:
    """What each limit leaves, from the group of this process to the outermost one."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, group = line.partition(":")[2].partition(":")
        if not group or (files := _VERSIONS.get(controllers)) is None:
            continue
        top = root / files.top
        own = top / group.lstrip("/")
        for folder in (own, *own.parents):
            limit, used = _text(folder / files.limit).strip(), _text(folder / files.used).strip()
            if limit.isdigit() and used.isdigit():  # "max" is none
                yield int(limit) - int(used) + _numbers(folder / "memory.stat").get(files.cached, 0)
            if folder == top:
                break


def _numbers(path: Path) -> dict[str, int]:
    """The lines ``NAME NUMBER …`` of a file."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
