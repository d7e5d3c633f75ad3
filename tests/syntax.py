"""The source of the package as syntax trees, and what its modules import: for the tests of its structure."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sm_llm"
LOADERS = ("import_module", "__import__")


@cache
def by_path() -> dict[str, ast.Module]:
    """Path below the package -> syntax tree, of every file."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {it.relative_to(PACKAGE).as_posix(): ast.parse(it.read_text(encoding="utf-8")) for it in files}


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree. A package is ``PACKAGE.__init__``, and is left out where it holds no code."""
    named = {f"sm_llm.{path.removesuffix('.py').replace('/', '.')}": tree for path, tree in by_path().items()}
    return {name: tree for name, tree in named.items() if not name.endswith(".__init__") or has_code(tree)}


def has_code(tree: ast.Module) -> bool:
    """Whether a module is more than its docstring."""
    return any(not (isinstance(it, ast.Expr) and isinstance(it.value, ast.Constant)) for it in tree.body)


def absolute(node: ast.ImportFrom, module: str) -> str:
    """What ``from ... import`` in ``module`` imports from, whatever number of dots it has."""
    above = module.split(".")[: -node.level] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def imported(tree: ast.AST, module: str = "") -> Iterator[str]:
    """Dotted names that are imported anywhere: at the top, in functions, under TYPE_CHECKING, or by a constant name.

    Of ``from a import b`` both ``a`` and ``a.b``, since b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (it.name for it in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, module)
            yield source
            yield from (f"{source}.{it.name}" for it in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LOADERS:
            yield from (it.value for it in node.args[:1] if isinstance(it, ast.Constant) and isinstance(it.value, str))


def imports(of: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports anywhere; those of ``__init__`` also where a name is taken from its package.

    Whoever imports a module of another package runs that package's ``__init__``, too. The public package is left out
    of this: everything lies in it, and its ``__init__`` loads nothing by itself (``test_house`` shows it).
    """
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in of.items():
        for target in imported(tree, name):
            reached = [target, f"{target}.__init__", *_packages_entered(name, target)]
            found[name] |= {it for it in reached if it in of and it != name}
    return found


def _packages_entered(module: str, target: str) -> list[str]:
    """The packages around ``target`` that are not around ``module``, each by its ``__init__``."""
    parts = target.split(".")
    above = [".".join(parts[:depth]) for depth in range(2, len(parts))]
    return [f"{it}.__init__" for it in above if not module.startswith(f"{it}.")]
