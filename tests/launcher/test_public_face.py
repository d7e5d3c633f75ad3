"""The public face: what it offers, that all of it is there, and that it costs nothing before it is used."""

from __future__ import annotations

import ast
import configparser
import json
import subprocess
import sys
from pathlib import Path

import pytest

import sm_llm

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


def test_the_version_is_the_distributions() -> None:
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[2] / "setup.cfg")
    assert settings["metadata"]["version"] == sm_llm.__version__


def test_load_spec_is_a_pure_value_of_its_source() -> None:
    spec = sm_llm.load_spec("tiny-local")
    assert sm_llm.load_spec(spec) == spec == sm_llm.load_spec(json.loads(spec.model_dump_json()))
