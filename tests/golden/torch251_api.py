"""What the smp path uses of torch and transformers, and what those of the SMP image offer: makes the golden file.

``python tests/golden/torch251_api.py`` in an environment with torch==2.5.1 and transformers==4.44.2 writes
``torch251_api.json`` beside it. The scan needs neither library; the test of the default suite compares the two.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_suffix(".json")
ROOTS = ("main", "tasks.train", "tasks.fetch", "tasks.prepare", "tasks.script", "strategies.smp.strategy")
"""Modules of the worker that run in the SMP image, with everything that they import."""
ELSEWHERE = ("sm_llm.worker.strategies.fsdp", "sm_llm.worker.training.compiled_graphs")
"""Begin the names of modules that are imported in other images only: another strategy, what compiled layers need."""
LIBRARIES = ("torch", "transformers")


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package that runs there, parsed."""
    found: dict[str, ast.Module] = {}
    waiting = [f"sm_llm.worker.{name}" for name in ROOTS]
    if gone := [name for name in waiting if not ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file()]:
        raise ValueError(f"ROOTS must be modules of the worker, and {', '.join(gone)} are not")
    while waiting:
        name = waiting.pop()
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if name in found or name.startswith(ELSEWHERE) or not path.is_file():
            continue
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(found[name]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sm_llm"):
                waiting += [str(node.module), *(f"{node.module}.{it.name}" for it in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [it.name for it in node.names if it.name.startswith("sm_llm")]
    return found


@cache
def scan() -> dict[str, set[str]]:
    """Symbol -> keywords it is called with, over all modules: ``torch.nn.functional.pad`` -> {}, …"""
    found: dict[str, set[str]] = {}
    for tree in modules().values():
        names = _imported(tree)
        for symbol in names.values():
            found.setdefault(symbol, set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and (symbol := _resolved(node, names)):
                found.setdefault(symbol, set())
            if isinstance(node, ast.Call) and (symbol := _resolved(node.func, names)):
                found.setdefault(symbol, set()).update(it.arg for it in node.keywords if it.arg)
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it stands for in one of the libraries."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for it in node.names:
                if it.name.partition(".")[0] in LIBRARIES:
                    names[it.asname or it.name.partition(".")[0]] = it.name if it.asname else it.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            names.update({it.asname or it.name: f"{node.module}.{it.name}" for it in node.names})
    return names


def _resolved(node: ast.expr, names: dict[str, str]) -> str | None:
    """``torch.distributed.all_reduce`` of ``dist.all_reduce``; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *parts])


def describe(symbol: str) -> dict[str, Any] | None:
    """Its keywords here (None: it has no signature), or None if it is not here."""
    try:
        value = _find(symbol)
    except (ImportError, AttributeError):
        return None
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return {"keywords": None}
    if any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters):
        return {"keywords": None}
    return {"keywords": sorted(it.name for it in parameters if it.kind is not inspect.Parameter.POSITIONAL_ONLY)}


def _find(symbol: str) -> Any:
    parts = symbol.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ImportError(symbol)


def main() -> int:
    versions = {name: import_module(name).__version__.partition("+")[0] for name in LIBRARIES}
    if versions != {"torch": "2.5.1", "transformers": "4.44.2"}:
        print(f"this is {versions}, not the software of the SMP image")
        return 1
    facts = {symbol: describe(symbol) for symbol in sorted(scan())}
    flat = import_module("torch.distributed.fsdp._flat_param")
    fields = {
        "FlatParameter": sorted(flat.FlatParameter.__annotations__),
        "_ShardParamInfo": sorted(flat._ShardParamInfo._fields),
    }
    missing = [symbol for symbol, fact in facts.items() if fact is None]
    GOLDEN.write_text(
        json.dumps({"versions": versions, "fields": fields, "symbols": facts}, indent=1) + "\n", encoding="utf-8"
    )
    print(f"{len(facts)} symbols, missing: {missing}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
