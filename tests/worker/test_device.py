"""Memory of the CPU that one step frees and the next one needs."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys, torch
from sm_llm.worker.device import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1])

if sys.argv[1] == "kept":
    keep_freed_memory()
tensor = torch.ones(4 << 20)  # 16 MiB
held = resident()
del tensor
print(held - resident())
"""


def pages_given_back(how: str) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)


def test_a_step_takes_over_the_memory_of_the_step_before() -> None:
    assert pages_given_back("kept") < 100 < 4000 < pages_given_back("not kept")
