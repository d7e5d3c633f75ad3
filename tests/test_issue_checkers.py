"""The lists of checkers: every checker is in one, and nothing decides by the text of an issue."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sm_llm"
PHASES = {
    "SHARED_CHECKERS": "spec/validation/check.py",
    "WORKFLOW_CHECKERS": "spec/validation/check.py",
    "JOB_CHECKERS": "spec/validation/check.py",
    "TRAINING_CHECKERS": "spec/validation/check.py",
    "SINGLE_JOB_CHECKERS": "spec/validation/check.py",
    "MODEL_CHECKERS": "launcher/planning/checks.py",
    "DATA_CHECKERS": "launcher/planning/checks.py",
}
"""List -> its module; each backend has lists of its own, BACKEND_CHECKERS and REQUEST_CHECKERS."""
OF_BACKENDS = ("BACKEND_CHECKERS", "REQUEST_CHECKERS")
WITH_ISSUES = {"SpecError", "PlanError", "ConversionError", "ConversionRefused", "InvalidSpec"}


def lists() -> Iterator[tuple[str, str, list[str]]]:
    """Module, name and members of every list."""
    for module in PACKAGE.rglob("*.py"):
        for statement in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.AnnAssign) and "Checker[" in ast.unparse(statement.annotation):
                assert isinstance(statement.target, ast.Name)
                assert isinstance(statement.value, ast.Tuple)
                members = [ast.unparse(it).rpartition(".")[2] for it in statement.value.elts]
                yield module.relative_to(PACKAGE).as_posix(), statement.target.id, members


def checkers() -> Iterator[tuple[str, str]]:
    """Module and name of every function that takes one subject and gives issues."""
    folders = {Path(module).parent.as_posix() for module, _, _ in lists()}
    for folder in sorted(folders):
        for module in (PACKAGE / folder).glob("*.py"):
            for it in ast.parse(module.read_text(encoding="utf-8")).body:
                is_checker = isinstance(it, ast.FunctionDef) and it.name.startswith("check_") and it.returns is not None
                if is_checker and ast.unparse(it.returns) == "Iterator[Issue]" and len(it.args.args) == 1:  # type: ignore[attr-defined, union-attr]
                    yield module.relative_to(PACKAGE).as_posix(), it.name  # type: ignore[attr-defined]


def test_every_checker_is_in_exactly_one_list() -> None:
    listed = Counter((Path(module).parent.as_posix(), member) for module, _, found in lists() for member in found)
    known = [(Path(module).parent.as_posix(), name) for module, name in checkers()]
    assert len(known) > 50
    assert [it for it in known if listed[it] != 1] == [], "not in a list, or in two"
    assert [it for it in listed if it not in known] == [], "listed, but not named check_..., or not a checker"


def test_every_list_is_one_phase_in_its_place() -> None:
    found = [(name, module) for module, name, _ in lists()]
    assert {it for it in found if it[0] not in OF_BACKENDS} == set(PHASES.items())
    assert {module.partition("backends/")[0] for name, module in found if name in OF_BACKENDS} == {"launcher/"}


def readings(tree: ast.AST) -> Iterator[int]:
    """Lines that compare, search or cut the text of an issue, or of an error that carries issues."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    errors = {node for handler in ast.walk(tree) for node in names_of_errors(handler)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Attribute) and node.attr == "message" and ast.unparse(node.value) != "self"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str" and node.args:
            is_text = node.args[0] in errors or ast.unparse(node.args[0]) == "issue"
        outer = parents.get(node)
        is_cut = isinstance(outer, ast.Attribute) and isinstance(parents.get(outer), ast.Call)
        is_matched = isinstance(outer, ast.Call) and ast.unparse(outer.func).startswith("re.")
        if is_text and (isinstance(outer, ast.Compare) or is_cut or is_matched):
            yield node.lineno  # type: ignore[attr-defined]


def names_of_errors(handler: ast.AST) -> Iterator[ast.Name]:
    """Where the body of an ``except`` names an error that carries issues."""
    if isinstance(handler, ast.ExceptHandler) and handler.type is not None:
        kinds = {it.id for it in ast.walk(handler.type) if isinstance(it, ast.Name)}
        if kinds & WITH_ISSUES:
            yield from (it for it in ast.walk(handler) if isinstance(it, ast.Name) and it.id == handler.name)


def test_nothing_reads_the_text_of_an_issue() -> None:
    found = []
    for module in PACKAGE.rglob("*.py"):
        text = module.read_text(encoding="utf-8")
        if "Issue" in text or ".issues" in text or any(name in text for name in WITH_ISSUES):
            found += [f"{module.relative_to(PACKAGE)}:{line}" for line in readings(ast.parse(text))]
    assert found == []


def test_readings_are_seen() -> None:
    for line in (
        "issue.message.startswith('hf://')", "'a' in it.message", "it.message == 'a'", "re.match('a', issue.message)",
        "str(issue).endswith('a')",
    ):  # fmt: skip
        assert list(readings(ast.parse(line))) == [1], line
    assert list(readings(ast.parse("try:\n    f()\nexcept SpecError as error:\n    g('a' in str(error))"))) == [4]
    assert list(readings(ast.parse("try:\n    f()\nexcept OSError as error:\n    g('a' in str(error))"))) == []
    assert list(readings(ast.parse("f(f'{issue.message} (step a)', self.message.lower())"))) == []
