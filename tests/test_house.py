"""The house rules that can be checked: layers, types, lint, sizes, lazy imports."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "sm_llm").rglob("*.py"))
HEAVY = ("torch", "transformers", "sagemaker", "boto3", "kubernetes", "datasets")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)


def functions() -> list[tuple[str, int]]:
    sizes = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{module.relative_to(ROOT)}:{node.name}"
                sizes.append((name, (node.end_lineno or node.lineno) - node.lineno + 1))
    return sizes


SLOW = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("ruff", "check", "."), id="ruff"),
        pytest.param(("ruff", "format", "--check", "."), id="format"),
        pytest.param(("mypy",), id="mypy", marks=SLOW),
        pytest.param(("lint-imports", "--no-cache"), id="import-linter"),
    ],
)
def test_quality_tool_is_content(command: tuple[str, ...]) -> None:
    tool = Path(sys.executable).parent / command[0]
    result = run(str(tool), *command[1:])
    assert result.returncode == 0, result.stdout + result.stderr


def test_modules_are_short() -> None:
    long = {str(m.relative_to(ROOT)): n for m in MODULES if (n := len(m.read_text().splitlines())) > 500}
    assert not long


def test_functions_are_short() -> None:
    sizes = functions()
    assert not [(name, size) for name, size in sizes if size > 60]
    assert statistics.median(size for _, size in sizes) < 12


def test_every_module_states_its_job() -> None:
    silent = [
        str(m.relative_to(ROOT))
        for m in MODULES
        if m.read_text().strip() and not ast.get_docstring(ast.parse(m.read_text()))
    ]
    assert not silent


@pytest.mark.parametrize("argv", [["-c", "import sm_llm"], ["-m", "sm_llm.cli", "--help"]], ids=["import", "help"])
def test_nothing_heavy_is_loaded(argv: list[str]) -> None:
    """In a fresh process: the modules Python reports as imported name none of the heavy libraries."""
    result = run(sys.executable, "-X", "importtime", *argv)
    assert result.returncode == 0, result.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "sm_llm" in imported
    assert not imported & set(HEAVY)


def test_version_is_written_once() -> None:
    version = next(line for line in (ROOT / "setup.cfg").read_text().splitlines() if line.startswith("version"))
    assert version.partition("=")[2].strip() in (ROOT / "CHANGELOG.md").read_text()
