"""The contract double, and what the strategy looks up, against the signatures of neuronx-distributed itself.

The golden file is made from its source by ``tests/oracles/nxd_api.py``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/nxd_api.json").read_text())
DOUBLE = ROOT / "tests/fixtures/nxd_double"
LIBRARY = ROOT / "sm_llm/worker/strategies/nxd/library.py"
ELSEWHERE = {"torch_xla.distributed.xla_backend.__name__", "torch_neuronx.utils.get_platform_target"}
"""A module whose import is the point, and a function of a package whose source is not public."""


@pytest.fixture(scope="module", autouse=True)
def _double() -> Iterator[None]:
    """The double's packages, gone again afterwards: other tests must find no SDK here."""
    sys.path.insert(0, str(DOUBLE))
    yield
    sys.path.remove(str(DOUBLE))
    for name in [
        it for it in sys.modules if it.partition(".")[0] in ("neuronx_distributed", "torch_xla", "torch_neuronx")
    ]:
        del sys.modules[name]


def signatures(release: str) -> dict[str, str]:
    return {**GOLDEN["releases"][release]["symbols"], **GOLDEN["torch_xla"]["symbols"]}


def parameters(text: str) -> list[tuple[str, str, str]]:
    """(name, kind, default) of a signature as it is written."""
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    found = [(it.arg, "positional", _shown(default)) for it, default in zip(arguments.args, defaults, strict=True)]
    found += [(arguments.vararg.arg, "args", "")] if arguments.vararg else []
    found += [
        (it.arg, "positional", _shown(d)) for it, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found + ([(arguments.kwarg.arg, "kwargs", "")] if arguments.kwarg else [])


def _shown(default: ast.expr | None) -> str:
    return "" if default is None else ast.unparse(default)


def own_parameters(value: Any) -> list[tuple[str, str, str]]:
    kinds = {inspect.Parameter.VAR_POSITIONAL: "args", inspect.Parameter.VAR_KEYWORD: "kwargs"}
    names = {"init.normal_": "normal_"}
    found = []
    for it in inspect.signature(value).parameters.values():
        if it.name == "self":
            continue
        default = "" if it.default is inspect.Parameter.empty else getattr(it.default, "__name__", repr(it.default))
        default = next((text for text, name in names.items() if default == name), default)
        found.append((it.name, kinds.get(it.kind, "positional"), default))
    return found


def find(dotted: str) -> Any:
    """What the double has under a dotted name; None if it lacks it."""
    parts = dotted.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            value = vars(value).get(part) if inspect.isclass(value) else getattr(value, part, None)
        return value
    return None


def test_the_double_takes_what_the_library_takes() -> None:
    compared = 0
    for name, text in signatures("2.28.0").items():
        value = find(name)
        if value is None or isinstance(value, property) or not callable(value):
            continue
        if name.endswith("NeuronZero1Optimizer"):  # *args, **kwargs of its base class
            continue
        assert own_parameters(value) == parameters(text), name
        compared += 1
    assert compared > 60


def test_a_keyword_that_the_library_does_not_know_is_refused() -> None:
    nxd = import_module("neuronx_distributed")
    with pytest.raises(TypeError, match="pretrained_weight_dir"):
        nxd.neuronx_distributed_config(pretrained_weight_dir="x")
    violation = import_module("neuronx_distributed.contract").Violation
    with pytest.raises(violation, match=r"unknown keys of optimizer_config: \['zero1'\]"):
        nxd.neuronx_distributed_config(optimizer_config={"zero1": True})


def looked_up() -> Iterator[str]:
    """Every ``symbol(module, name)`` of the adapter with names that are written out."""
    tree = ast.parse(LIBRARY.read_text())
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = _text(node.value, constants) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "symbol":
            parts = [_text(it, constants) for it in node.args]
            if None not in parts:  # else made of an argument
                yield ".".join(map(str, parts))


def _text(node: ast.expr, constants: dict[str, str]) -> str | None:
    """A string that is written out, constants of the module put in; None for any other."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    parts = [_text(it, constants) for it in node.values] if isinstance(node, ast.JoinedStr) else [None]
    return None if None in parts else "".join(map(str, parts))


@pytest.mark.parametrize("release", GOLDEN["releases"])
def test_what_the_strategy_looks_up_is_in_every_release(release: str) -> None:
    known = signatures(release)
    names = set(looked_up())
    assert len(names) >= 12
    made = {f"parallel_state.get_{it}_parallel_rank" for it in ("tensor_model", "data", "pipeline_model")}
    made |= {"ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding", "GQAQKVColumnParallelLinear"}
    for name in (names - ELSEWHERE) | made:
        assert [it for it in known if it == name or it.endswith(f".{name.rpartition('.')[2]}")], name


def test_the_training_api_is_the_same_in_the_releases_whose_source_is_public() -> None:
    first, second = GOLDEN["releases"].values()
    assert first["symbols"] == second["symbols"]
    assert (first["neuronx_distributed"], second["neuronx_distributed"]) == ("0.17.0", "0.18.0")


def test_one_module_names_the_library() -> None:
    paths = (ROOT / "sm_llm").rglob("*.py")
    pattern = re.compile(
        r"^\s*(import|from) (neuronx_distributed|torch_xla|torch_neuronx)|symbol\(\"torch_|= \"neuronx_d", re.M
    )
    assert [it.name for it in paths if pattern.search(it.read_text())] == ["library.py"]
