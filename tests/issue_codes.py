"""Every place of the package that constructs an issue, read from its source: code, severity, path, message, remedy."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parent.parent / "sm_llm"
CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
_PARAMETERS = ("code", "path", "message", "value", "remedy", "origin")
_OPEN = "…"
"""What stands for a value that only a run knows."""


@dataclass(frozen=True)
class Constructed:
    """One call that makes an issue. Texts are empty where they are made elsewhere."""

    code: str
    severity: str
    path: str
    message: str
    remedy: str
    module: str
    function: str
    line: int


def codes() -> list[Constructed]:
    """All of them in the order of the code."""
    return sorted(constructed(), key=lambda it: it.code)


@cache
def constructed() -> tuple[Constructed, ...]:
    """All of them, module by module."""
    return tuple(it for module in sorted(PACKAGE.rglob("*.py")) for it in _of_module(module))


def _of_module(module: Path) -> Iterator[Constructed]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    constants = _assigned(tree.body)
    for function in _functions(tree):
        inner = {id(it) for other in _functions(function) if other is not function for it in ast.walk(other)}
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and id(call) not in inner and _makes_issue(call):
                yield _of_call(call, function, constants, module.relative_to(PACKAGE).as_posix())


def _functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [it for it in ast.walk(tree) if isinstance(it, ast.FunctionDef)]


def _makes_issue(call: ast.Call) -> bool:
    """A call of the type, of ``warning``, or of a helper of a single module, which is given the code first.

    The helper itself hands on its ``code``.
    """
    name, method = getattr(call.func, "id", ""), getattr(call.func, "attr", "")
    first = call.args[0] if call.args else None
    if name in ("Issue", "warning"):
        return not (isinstance(first, ast.Name) and first.id == "code")
    return (name == "_error" or method == "_issue") and isinstance(first, ast.Constant) and isinstance(first.value, str)


def _of_call(call: ast.Call, function: ast.FunctionDef, constants: dict[str, ast.expr], module: str) -> Constructed:
    given = dict(zip(_PARAMETERS, call.args, strict=False)) | {it.arg or "": it.value for it in call.keywords}
    before = [it for it in ast.walk(function) if getattr(it, "lineno", call.lineno) < call.lineno]
    names = constants | _assigned(sorted((it for it in before if isinstance(it, ast.stmt)), key=lambda it: it.lineno))
    code, path, message, remedy = (_text(given.get(it), names) for it in ("code", "path", "message", "remedy"))
    severity = "warning" if getattr(call.func, "id", "") == "warning" else "error"
    if getattr(call.func, "attr", "") == "_issue":  # of the reader of YAML, whose paths are those of the file
        path, message = _OPEN, _text(call.args[3], names) if len(call.args) > 3 else ""
    return Constructed(code, severity, path, message, remedy, module, function.name, call.lineno)


def _assigned(statements: list[ast.stmt]) -> dict[str, ast.expr]:
    """Name -> the value that it was given last."""
    found: dict[str, ast.expr] = {}
    for it in statements:
        if not isinstance(it, ast.Assign):
            continue
        for target in it.targets:
            if isinstance(target, ast.Name):
                found[target.id] = it.value
            elif isinstance(target, ast.Tuple) and isinstance(it.value, ast.Tuple):
                pairs = zip(target.elts, it.value.elts, strict=False)
                found |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
    return found


def _text(node: ast.expr | None, names: dict[str, ast.expr], depth: int = 0) -> str:
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(it, names, depth) if isinstance(it, ast.Constant) else _part(it, names) for it in node.values
        )
    if isinstance(node, ast.Name) and node.id in names and depth < 3:
        return _text(names[node.id], names, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, names, depth) + _text(node.right, names, depth)
    return _OPEN


def _part(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """A field of a formatted text: a constant of the module as it is, anything else is open."""
    value = node.value if isinstance(node, ast.FormattedValue) else node
    known = names.get(value.id) if isinstance(value, ast.Name) else None
    return str(known.value) if isinstance(known, ast.Constant) and str(value.id).isupper() else _OPEN  # type: ignore[attr-defined]
