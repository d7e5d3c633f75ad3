"""The public face: what it offers, that all of it is there, and that it costs nothing before it is used."""

from __future__ import annotations

import ast
import builtins
import configparser
import inspect
import itertools
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

import sm_llm

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]

HEAVY = (
    "torch", "transformers", "sagemaker", "boto3", "kubernetes", "datasets", "numpy", "pyarrow", "matplotlib", "awscrt",
)  # fmt: skip


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after ``code``."""
    program = f"import sys\n{code}\nprint('\\n' + ' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_next_to_nothing() -> None:
    found = loaded_after("import sm_llm")
    assert not found & {*HEAVY, "pydantic", "yaml", "typer", "rich"}


def test_help_loads_no_heavy_library() -> None:
    code = "import sm_llm.cli\ntry:\n    sys.argv = ['sm-llm', '--help']; sm_llm.cli.main()\nexcept SystemExit: pass"
    assert not loaded_after(code) & {*HEAVY, "pydantic"}


def test_a_plan_loads_no_heavy_library() -> None:
    assert not loaded_after("import sm_llm; sm_llm.plan('tiny-local')") & {*HEAVY, "rich", "typer"}


def test_every_public_name_is_there_and_listed_once() -> None:
    assert sorted(set(sm_llm.__all__)) == sorted(sm_llm.__all__)
    for name in sm_llm.__all__:
        assert getattr(sm_llm, name).__name__.rpartition(".")[2] == name
    assert set(sm_llm.__all__) <= set(dir(sm_llm))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sm_llm.nothing


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(sm_llm.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(sm_llm.__all__)


def test_every_error_of_the_tree_is_public() -> None:
    from sm_llm import errors

    own = {name: value for name, value in vars(errors).items() if isinstance(value, type) and name[0] != "_"}
    assert {name for name, value in own.items() if value.__module__ == errors.__name__} <= set(sm_llm.__all__)


BEFORE = Path(__file__).parents[1] / "golden" / "public_names.json"
"""Public name -> its parameters, or its own attributes, before the packages were laid out anew."""


def public_names() -> dict[str, list[str]]:
    """The same of today. What pydantic and ``Exception`` bring along is theirs."""
    found = {}
    for module, names in (("sm_llm", sm_llm), ("sm_llm.pipelines", sm_llm.pipelines)):
        for name in names.__all__:
            value = getattr(names, name)
            if inspect.isfunction(value):
                found[f"{module}.{name}"] = [*inspect.signature(value).parameters]
            else:
                fields = (getattr(value, it, ()) for it in ("model_fields", "__dataclass_fields__"))
                own = {*dir(value), *itertools.chain(*fields)} if isinstance(value, type) else set()
                theirs = {*dir(BaseModel), *dir(Exception)}
                found[f"{module}.{name}"] = sorted(it for it in own - theirs if not it.startswith("_"))
    return found


def changed_names(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> set[str]:
    """Names that are new or gone, and as ``name.part`` parameters and attributes of those that stayed."""
    found = {it.rpartition(".")[2] for it in before.keys() ^ now.keys()}
    for name in before.keys() & now.keys():
        # Every error has the attributes of the first.
        if not (isinstance(kind := getattr(sm_llm, name.rpartition(".")[2], None), type) and kind in ERRORS):
            found |= {f"{name.rpartition('.')[2]}.{it}" for it in {*before[name]} ^ {*now[name]}}
    return found


ERRORS = {
    it for it in map(partial(getattr, sm_llm), sm_llm.__all__) if isinstance(it, type) and issubclass(it, Exception)
}
ERRORS -= {sm_llm.SmLlmError}


def test_the_changelog_names_every_public_name_that_has_changed() -> None:
    listed = set(re.findall(r"`([\w.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    changed = changed_names(json.loads(BEFORE.read_text()), public_names())
    assert {"Fault", "Issue", "QueryError", "ConversionRefused"} <= changed
    assert sorted(changed - listed) == [], "name it in CHANGELOG.md, under Public names"


def test_changed_names_are_found() -> None:
    before = {"sm_llm.a": ["x"], "sm_llm.b": [], "sm_llm.Run": ["m"]}
    now = {"sm_llm.a": ["y"], "sm_llm.pipelines.c": [], "sm_llm.Run": ["m", "n"]}
    assert changed_names(before, now) == {"a.x", "a.y", "b", "c", "Run.n"}


def test_errors_that_docstrings_name_are_public() -> None:
    """Of every public function and method: what "Raises" names can be caught by a name of ``sm_llm``."""
    functions = [getattr(sm_llm, name) for name in sm_llm.__all__ if inspect.isfunction(getattr(sm_llm, name))]
    functions += [getattr(sm_llm.pipelines, name) for name in sm_llm.pipelines.__all__]
    functions += [it for name, it in vars(sm_llm.Run).items() if not name.startswith("_")]
    texts = [text for it in functions if (text := inspect.getdoc(it))]
    named = {it for text in texts for it in re.findall(r"\b[A-Z]\w+\b", text.partition("Raise")[2])}
    errors = {it for it in named if it.endswith(("Error", "Refused", "Run", "Failed", "NotFound"))} - {"Run"}
    assert len(errors) > 5
    assert {it for it in errors - set(sm_llm.__all__) if not hasattr(builtins, it)} == set()


def test_the_version_is_the_distributions() -> None:
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[2] / "setup.cfg")
    assert settings["metadata"]["version"] == sm_llm.__version__


def test_load_spec_is_a_pure_value_of_its_source() -> None:
    spec = sm_llm.load_spec("tiny-local")
    assert sm_llm.load_spec(spec) == spec == sm_llm.load_spec(json.loads(spec.model_dump_json()))
