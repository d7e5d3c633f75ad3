"""The codes of issues: each names one thing, in words with hyphens between them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "sm_llm"
CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")


def codes() -> dict[str, set[tuple[str, str]]]:
    """Code -> the modules and functions that construct issues with it."""
    found = defaultdict(set)
    for module in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for code in constructed(function):
                    found[code].add((module.relative_to(PACKAGE).as_posix(), function.name))
    return found


def constructed(function: ast.FunctionDef) -> list[str]:
    """Codes that the calls of a function give: of the type, of ``warning``, and of helpers of single modules."""
    calls = [it for it in ast.walk(function) if isinstance(it, ast.Call) and it.args]
    names = [(getattr(it.func, "id", ""), getattr(it.func, "attr", "")) for it in calls]
    firsts = [
        it.args[0]
        for it, (name, method) in zip(calls, names, strict=True)
        if name in ("Issue", "warning", "_error") or method == "_issue"
    ]
    return [it.value for it in firsts if isinstance(it, ast.Constant) and isinstance(it.value, str)]


def test_every_code_has_the_form_of_one_and_is_constructed_in_one_function() -> None:
    found = codes()
    assert len(found) > 300
    assert [code for code in found if not CODE.fullmatch(code)] == []
    assert {code: where for code, where in found.items() if len(where) > 1} == {}


def test_every_issue_is_given_a_code() -> None:
    nameless = []
    for module in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Issue", "warning"):
                first = call.args[0] if call.args else None
                is_passed_on = isinstance(first, ast.Name) and first.id == "code"
                if not (is_passed_on or (isinstance(first, ast.Constant) and CODE.fullmatch(str(first.value)))):
                    nameless.append(f"{module.name}:{call.lineno}")
    assert nameless == []
