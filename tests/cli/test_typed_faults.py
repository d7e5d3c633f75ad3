"""What a person types wrongly is reported at the place where it was typed, with what to type instead."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm import cli
from sm_llm.errors import SpecError
from sm_llm.launcher.planner import plan
from sm_llm.runs.run_states import USAGE_EXIT_CODE
from sm_llm.spec.parallelism.fsdp import FsdpSpec

if TYPE_CHECKING:
    from pathlib import Path


def cli_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and everything that ``sm-llm`` prints, in this process."""
    monkeypatch.setattr(sys, "argv", ["sm-llm", *argv])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    return int(leaving.value.code or 0), "".join(capsys.readouterr())


def fault(source: str, override: Any) -> str:
    with pytest.raises(SpecError) as raised:
        plan(source, override)
    assert len(raised.value.issues) == 1, str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("path", "argv"),
    [
        ("task.seq_length", ("texts", "--seq-length", "0")),
        ("task.validation_fraction", ("texts", "--seq-length", "8", "--validation-fraction", "1.5")),
        ("task.tokenizer", ("texts", "--seq-length", "8", "--tokenizer", "/nope")),
        ("task.sources", ("/nope", "--seq-length", "8")),
        ("name", ("texts", "--seq-length", "8", "--name", "a b")),
    ],
)
def test_E17_options_of_prepare_come_from_the_command_line(
    path: str, argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("some text")
    code, text = cli_output(monkeypatch, capsys, "prepare", *argv)
    assert code == 2
    assert re.search(rf"{re.escape(path)}(\.0)? \(command line\): ", text), text


@pytest.mark.parametrize(
    ("source", "override", "words"),
    [
        ("smoke", '{"task.max_steps": 3}', "Write task.max_steps=3"),
        ("smoke", '{"task.max_steps": 3, "name": "a"}', "Write task.max_steps=3 name=a"),
        ("smoke", "{task.max_steps}", "For example task.max_steps=100"),
        ("smoke", {"steps.train.task.max_steps": 3}, "a single job, which has no steps. Write task.max_steps"),
        ("smoke", "steps.train.task.max_steps=3", "a single job, which has no steps. Write task.max_steps"),
        ("smoke", "data.rows=400", "data.rows (override): unknown key. Did you mean task.data.rows?"),
        ("smoke", {"data": {"rows": 400}}, "data (Python argument): unknown key. Did you mean task.data?"),
        ("tiny-local", "data.rows=400", "data.rows (override): unknown key"),
        ("smoke", "task.start.pretraned=/nope", "Did you mean pretrained?"),
        ("smoke", "task.start.chekpoint=/nope", "Did you mean checkpoint?"),
        ("tiny-local", "task.start.pretraned=/nope", "Did you mean task.start.pretrained?"),
    ],
)
def test_E17_a_wrong_path_names_the_one_that_can_be_typed(source: str, override: Any, words: str) -> None:
    assert words in fault(source, override)


def test_E17_the_block_that_an_override_creates_comes_from_there() -> None:
    assert "task.loging.everysteps" not in fault("smoke", "task.loging.every_steps=3")
    assert "task.loging (override)" in fault("smoke", "task.loging.every_steps=3")


def test_E21_ls_takes_the_storage_as_the_other_verbs_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert cli_output(monkeypatch, capsys, "ls", "--storage", str(tmp_path)) == (0, f"no run yet in {tmp_path}\n")
    code, text = cli_output(monkeypatch, capsys, "ls", str(tmp_path), "--storage", str(tmp_path))
    assert code == 2
    assert "give the storage once" in text


def test_an_error_is_JSON_where_a_verb_was_given_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("plan", "fit"):
        monkeypatch.setattr(sys, "argv", ["sm-llm", verb, "tiny-local", "task.max_steps=0", "task.sed=1", "--json"])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        printed = capsys.readouterr()
        error = json.loads(printed.out)["error"]
        assert (leaving.value.code, error["type"]) == (USAGE_EXIT_CODE, "SpecError")
        assert printed.err == f"error: {error['message']}\n"
        (unknown, small) = error["issues"]
        assert unknown == {
            "code": "override-key-in-no-step",
            "severity": "error",
            "path": "task.sed",
            "message": "unknown key: no step has it",
            "remedy": "Did you mean steps.prepare.task.seed or steps.train.task.seed?",
            "origin": "command line",
        }
        assert (small["code"], small["path"], small["value"]) == ("value-out-of-range", "steps.train.task.max_steps", 0)
    monkeypatch.setattr(sys, "argv", ["sm-llm", "plan", "tiny-local", "task.sed=1"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == ""


def test_a_plan_that_cannot_run_is_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it lacks is in the plan itself."""
    monkeypatch.setattr(FsdpSpec, "can", replace(FsdpSpec.can, train=False))
    monkeypatch.setattr(sys, "argv", ["sm-llm", "plan", "smoke", "--json"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    (planned,) = json.loads(capsys.readouterr().out)
    assert (leaving.value.code, planned["unsupported"][0]["code"]) == (USAGE_EXIT_CODE, "strategy-without-worker")


def test_12e_9_a_value_where_a_list_is_wanted_and_a_misspelt_recipe_are_answered_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecError, match=r"Write \[texts\]"):
        plan({"name": "p", "task": {"kind": "prepare", "sources": "texts", "seq_length": 8}})
    code, text = cli_output(monkeypatch, capsys, "init", "tyny-local")
    assert (code, "Did you mean tiny-local?" in text) == (USAGE_EXIT_CODE, True)
