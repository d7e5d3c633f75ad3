"""The names of worker code in the tables of the specification: modules move, these are texts."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from sm_llm.spec.backends.table import BACKENDS
from sm_llm.spec.parallelism.table import STRATEGIES
from sm_llm.spec.tasks import TASK_KINDS

ROWS = [
    *(entry.backend for entry in BACKENDS.values()),
    *(entry.worker for entry in STRATEGIES.values()),
    *(entry.device for entry in STRATEGIES.values()),
    *(kind.worker for kind in TASK_KINDS.values()),
]


@pytest.mark.parametrize("name", sorted(set(ROWS)))
def test_every_row_names_a_function_or_class_that_exists(name: str) -> None:
    module, _, attribute = name.partition(":")
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    assert attribute in {it.name for it in tree.body if isinstance(it, ast.FunctionDef | ast.ClassDef)}
