"""The command line of a user's program: every argument as it was written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm_llm.contract.program import command, step_of, with_folders
from sm_llm.errors import SpecError
from sm_llm.spec.inputs import input_variable
from sm_llm.spec.loading.load import load
from sm_llm.spec.loading.yaml_text import from_yaml
from sm_llm.spec.tasks import ScriptTask
from sm_llm.worker.script.script_platform import variables


def task(**fields: Any) -> ScriptTask:
    return ScriptTask.model_validate({"entry": "x.py", "source": "src", **fields})


def argv(folder: Path, **fields: Any) -> list[str]:
    return command(task(**fields), folder)[2:]


def test_HP03_the_order_of_a_mapping_is_kept(tmp_path: Path) -> None:
    found = argv(tmp_path, args={"config": "c.yaml", "batch_size": 10, "a": 1})
    assert found == ["--config", "c.yaml", "--batch_size", "10", "--a", "1"]


def test_HP05_booleans_are_words_or_switches(tmp_path: Path) -> None:
    args = {"a": True, "b": False, "c": "false", "d": 0, "e": ""}
    assert argv(tmp_path, args=args) == ["--a", "True", "--b", "False", "--c", "false", "--d", "0", "--e", ""]
    flags = argv(tmp_path, args=args, args_style="flags")
    assert flags == ["--a", "--c", "false", "--d", "0", "--e", ""]


def test_HP07_lists_keep_their_items(tmp_path: Path) -> None:
    assert argv(tmp_path, args={"x": ["a", "b"], "y": [1, 2], "z": "x,y"}) == [
        "--x", "a", "b", "--y", "1", "2", "--z", "x,y"
    ]  # fmt: skip


@pytest.mark.parametrize("location", [0, 2, 4])
def test_HP11_bare_flags_anywhere(tmp_path: Path, location: int) -> None:
    args = ["--lr", "1e-4", "--out", "x"]
    args.insert(location, "--do_train")
    assert argv(tmp_path, args=args) == args


def test_HP13_an_argv_list_is_passed_on_untouched(tmp_path: Path) -> None:
    assert argv(tmp_path, args=["--x", "1", "--x", "2", "pos"]) == ["--x", "1", "--x", "2", "pos"]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))))
def test_HP13_any_text_is_an_argument(args: list[str]) -> None:
    assert command(task(args=args), None)[2:] == args  # type: ignore[arg-type]


def test_numbers_in_yaml_keep_their_spelling(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: j\ntask: {kind: script, entry: x.py, source: src, args: [--lr, 1e-4, --n, 010]}\n")
    spec = load(path).spec
    assert spec.task.args == ["--lr", "1e-4", "--n", "010"]  # type: ignore[union-attr]


def test_HP14_hydra_overrides(tmp_path: Path) -> None:
    args = {
        "trainer.max_steps": 2000, "+new": 1, "~old": None, "none": None, "on": True, "names": ["a b", "c"],
        "text": "x,y", "brackets": "[1]", "number": "1", "quote": "it's", "path": "/a/b-c.yaml",
        "folder": "C:\\d\\", "both": "a\\b'c", "before": "a\\'",
    }  # fmt: skip
    assert argv(tmp_path, args=args, args_style="key=value") == [
        "trainer.max_steps=2000", "+new=1", "~old", "none=null", "on=true", "names=['a b',c]",
        "text='x,y'", "brackets='[1]'", "number='1'", "quote='it\\'s'", "path=/a/b-c.yaml",
        "folder='C:\\d\\\\'", "both='a\\b\\'c'", "before='a\\\\\\''",
    ]  # fmt: skip
    raw = ["+new=[1,2]", "~old", "a=b,c"]
    assert argv(tmp_path, args=raw) == raw


def test_the_file_style_passes_a_file(tmp_path: Path) -> None:
    import yaml

    args = {
        "a": {"b": [1, "x,y", None]},
        "flag": False,
        "text": "line\nbreak",
        "no": "on",
        "rate": 1e-05,
        "day": "2024-01-01",
    }
    (path,) = argv(tmp_path, args=args, args_style="file")
    with open(path) as stream:
        assert yaml.safe_load(stream) == args


def test_SF06_one_letter_keys_mappings_and_none(tmp_path: Path) -> None:
    assert argv(tmp_path, args={"a": 1, "b": None}) == ["--a", "1"]
    # Nor do its variables have what is no argument; where null is a value, it stays one.
    for style, left in (("--key value", {"a": 1}), ("flags", {"a": 1}), ("key=value", {"a": 1, "b": None})):
        found = variables(task(args={"a": 1, "b": None}, args_style=style), [], {}, tmp_path, {})
        assert json.loads(found["SM_HPS"]) == left
        assert ("SM_HP_B" in found) is (len(left) == 2)
    with pytest.raises(SpecError, match=r"task\.args\.c .*holds null, which cannot be an argument"):
        load({"name": "j", "task": {"kind": "script", "entry": "x.py", "source": "s", "args": {"c": [1, None]}}})
    with pytest.raises(SpecError, match="cannot write nested values"):
        load({"name": "j", "task": {"kind": "script", "entry": "x.py", "source": "s", "args": {"m": {"k": "a,b=c"}}}})


def test_SR16_modules_are_started_with_m(tmp_path: Path) -> None:
    assert command(task(entry="-m pkg.train", args=["--x"]), tmp_path) == [sys.executable, "-m", "pkg.train", "--x"]


def test_HP04_shell_scripts_get_their_arguments(tmp_path: Path) -> None:
    assert command(task(entry="bin/train.sh", args={"alpha": "one"}), tmp_path) == [
        "bash", "bin/train.sh", "--alpha", "one"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "entry", ["train.sh;id", 'a".py', "../x.py", "/etc/x.sh", "-c.py", "a b.py", "x", "-m a;b", ""]
)
def test_HP18_a_name_with_more_than_a_name_in_it_is_refused(entry: str) -> None:
    with pytest.raises(SpecError, match=r"task\.entry"):
        load({"name": "j", "task": {"kind": "script", "entry": entry, "source": "s"}})


def test_SR17_no_entry_is_reported_before_anything_starts() -> None:
    with pytest.raises(SpecError, match=r"task\.entry.*missing"):
        load({"name": "j", "task": {"kind": "script", "source": "s"}})


def test_HP08_long_values_and_many_of_them_are_no_matter(tmp_path: Path) -> None:
    """Arguments travel in job.json, not as hyperparameters."""
    args = {f"key{number}": "x" * 2501 for number in range(101)}
    assert len(argv(tmp_path, args=args)) == 202


def test_places_in_arguments_are_filled_and_other_braces_left() -> None:
    folders = {"inputs.data": "/d", "inputs.my.data": "/m", "output": "/o"}
    words = ["{inputs.data}/x", '{"a": "{output}"}', "{inputs.other} {}", '{"b": 1}', "{inputs.my.data}"]
    filled = ["/d/x", '{"a": "/o"}', "{inputs.other} {}", '{"b": 1}', "/m"]
    assert with_folders(task(args=words), folders).args == filled
    nested = {"a": {"b": ["{output}", 1, None]}, "c": "{inputs.data}"}
    assert with_folders(task(args=nested), folders).args == {"a": {"b": ["/o", 1, None]}, "c": "/d"}


def test_S12_24_places_are_filled_in_the_file_of_arguments_too(tmp_path: Path) -> None:
    given = with_folders(task(args={"out": "{output}"}, args_style="file"), {"output": "/o"})
    (file,) = command(given, tmp_path)[2:]
    assert from_yaml(Path(file).read_text(), "arguments").value == {"out": "/o"}


def test_names() -> None:
    assert input_variable("my-data") == "SM_LLM_INPUT_MY_DATA"
    steps = {"checkpoint-500": 500, "step_7": 7, "12": 12, "global_step0010": 10, "best": None, "v2final": None}
    assert {name: step_of(name) for name in steps} == steps
