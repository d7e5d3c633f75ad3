"""The text under each field of a specification class, read from the source when somebody asks."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

from sm_llm.spec.base import SpecModel


def field_docs(kind: type[SpecModel]) -> dict[str, str]:
    """Field name -> its documentation, on one line; fields of base classes too."""
    docs: dict[str, str] = {}
    # From the base class on, so that the text of a subclass replaces the one above it.
    for base in reversed(kind.__mro__):
        if issubclass(base, SpecModel) and base is not SpecModel:
            docs |= _module_docs(base.__module__).get(base.__name__, {})
    return docs


def class_doc(kind: type[SpecModel]) -> str:
    """The documentation of a class, on one line."""
    return " ".join((kind.__doc__ or "").split())


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    # Python keeps no string under a field; only the source has it.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _class_docs(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[statement.target.id] = " ".join(after.value.value.split())
    return docs
