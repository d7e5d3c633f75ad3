"""The measured time of each test file: ``durations.json`` balances the processes, ``README.md`` shows the table.

python -m tests.durations                               runs both suites, then writes both files
python -m tests.durations default.xml integration.xml   writes them from ``pytest --junitxml`` of both suites
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FOLDER = Path(__file__).parent
SUITES = {"default": ["pytest"], "integration": ["pytest", "-m", "integration"]}
BEGIN, END = "<!-- durations: written by python -m tests.durations -->", "<!-- durations end -->"
SHORT = 1.0
"""Files below so many seconds share a line of the table."""


@dataclass(frozen=True)
class Measured:
    """The tests of one file in one suite; seconds hold set-up and tear-down, shared fixtures where they were set up."""

    tests: int
    seconds: float
    longest: float
    longest_test: str


def suite_of(item: pytest.Item) -> str:
    """The suite that runs a test."""
    return "integration" if item.get_closest_marker("integration") else "default"


@functools.cache
def read() -> dict[str, dict[str, Measured]]:
    """What is known of each suite, by file."""
    text = (FOLDER / "durations.json").read_text()
    return {suite: {name: Measured(*row) for name, row in files.items()} for suite, files in json.loads(text).items()}


def measure(report: Path) -> dict[str, Measured]:
    """Read a report of ``--junitxml``."""
    cases: dict[str, list[tuple[float, str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "").replace(".", "/") + ".py"
        if not (FOLDER.parent / name).is_file():
            sys.exit(f"{report} names the test file {name}, which does not exist here; measure again")
        cases.setdefault(name, []).append((float(case.get("time", 0)), case.get("name", "")))
    return {
        name: Measured(len(found), round(sum(time for time, _ in found), 1), round(max(found)[0], 1), max(found)[1])
        for name, found in sorted(cases.items())
    }


def table(suites: dict[str, dict[str, Measured]]) -> str:
    """All files of both suites, longest first."""
    lines = [
        "| file | tests | seconds | integration tests | seconds | longest test, seconds |",
        "|---|--:|--:|--:|--:|---|",
    ]
    default, integration = suites["default"], suites["integration"]
    none = Measured(0, 0, 0, "")
    rows = [(name, default.get(name, none), integration.get(name, none)) for name in {*default, *integration}]
    rows.sort(key=lambda row: (-row[1].seconds - row[2].seconds, row[0]))
    short = [row for row in rows if row[1].seconds + row[2].seconds < SHORT]
    for name, first, second in rows[: len(rows) - len(short)]:
        longest = max(first, second, key=lambda measured: measured.longest)
        test = longest.longest_test.partition("[")[0]
        lines.append(
            f"| {name.removeprefix('tests/')} | {_cells(first)} | {_cells(second)} | `{test}` {longest.longest:.0f} |"
        )
    for title, chosen in ((f"{len(short)} files under {SHORT:.0f} s", short), ("all", rows)):
        sums = [Measured(sum(r[n].tests for r in chosen), sum(r[n].seconds for r in chosen), 0, "") for n in (1, 2)]
        lines.append(f"| {title} | {_cells(sums[0])} | {_cells(sums[1])} | |")
    return "\n".join(lines)


def _cells(measured: Measured) -> str:
    return f"{measured.tests} | {measured.seconds:.1f}" if measured.tests else " | "


def write(suites: dict[str, dict[str, Measured]]) -> None:
    """Replace ``durations.json`` and the table of ``README.md``."""
    parts = []
    for suite, files in suites.items():
        rows = (
            f"  {json.dumps(name)}: {json.dumps([m.tests, m.seconds, m.longest, m.longest_test])}"
            for name, m in files.items()
        )
        parts.append(f" {json.dumps(suite)}: {{\n" + ",\n".join(rows) + "\n }")
    (FOLDER / "durations.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
    readme = FOLDER / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{table(suites)}\n{END}{rest.partition(END)[2]}")


def main(reports: list[str]) -> None:
    """Measure, unless reports are given, and write."""
    if len(reports) not in (0, len(SUITES)):
        sys.exit(
            f"python -m tests.durations takes no report or {len(SUITES)} (of {', '.join(SUITES)}), got {len(reports)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(report) for report in reports]
        if not paths:
            for suite, command in SUITES.items():
                paths.append(Path(folder, f"{suite}.xml"))
                subprocess.run([sys.executable, "-m", *command, f"--junitxml={paths[-1]}"], cwd=FOLDER.parent)
        write({suite: measure(path) for suite, path in zip(SUITES, paths, strict=True)})


if __name__ == "__main__":
    main(sys.argv[1:])
