"""What is left of the host's memory: of the machine, and within the limits of control groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from sm_llm.worker.checkpoint.host_memory import available_memory

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = "MemTotal:       1000 kB\nMemAvailable:    800 kB\n"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_it_is_what_another_program_counts() -> None:
    """psutil reads the machine alone; a limit of this test's own group may leave less."""
    found = available_memory()
    assert 0 < found < 1.05 * psutil.virtual_memory().available


def test_the_machine_without_limits(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MACHINE, proc__self__cgroup="odd\n0::/job\n")
    write(tmp_path / "sys/fs/cgroup/job", **{"memory.max": "max\n", "memory.current": "5\n"})
    assert available_memory(tmp_path) == 800 * 1024


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/pod/job", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/pod/job",
            "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_the_tightest_limit_of_any_group_counts(
    line: str, folder: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    limit, used, cached = names
    write(tmp_path, proc__meminfo=MACHINE, proc__self__cgroup=f"1:cpu:/else\n{line}\n")
    top = tmp_path / folder
    write(top / "pod/job", **{limit: "9000\n", used: "1000\n"})
    write(top / "pod", **{limit: "5000\n", used: "4000\n", "memory.stat": f"anon 9\n{cached} 300\n"})
    assert available_memory(tmp_path) == 5000 - 4000 + 300
    write(top / "pod", **{used: "6000\n"})
    assert available_memory(tmp_path) == 0, "none, and never less"


def test_nothing_stated_is_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 0
