"""How long `import sm_llm`, `sm-llm --help` and `sm-llm plan` take over bare Python, in interleaved pairs.

    python benchmarks/startup.py [PAIRS]

Each pair starts one bare interpreter and one measured command, each in a fresh process; the difference of the
two wall times is reported as median with its range. Bars: 0.05 s, 0.20 s and 0.40 s. Modules are read from their
compiled files, as after `pip install` and from a second start on, whatever this shell says of writing them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CLI = str(Path(sys.executable).with_name("sm-llm"))
BARE = [sys.executable, "-c", "pass"]
MEASURED = {
    "import sm_llm": ([sys.executable, "-c", "import sm_llm"], 0.05),
    "sm-llm --help": ([CLI, "--help"], 0.20),
    "sm-llm plan tiny-local": ([CLI, "plan", "tiny-local"], 0.40),
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - began


def main(pairs: int) -> None:
    for command, _ in MEASURED.values():
        seconds(command)
    print(
        f"| command | over bare Python, median s | min - max | bar s |\n|---|---|---|---|  ({pairs} interleaved pairs)"
    )
    for name, (command, bar) in MEASURED.items():
        differences = [-seconds(BARE) + seconds(command) for _ in range(pairs)]
        median, low, high = statistics.median(differences), min(differences), max(differences)
        print(f"| `{name}` | {median:.3f} | {low:.3f} - {high:.3f} | {bar:.2f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
