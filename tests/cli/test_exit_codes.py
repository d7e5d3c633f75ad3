"""Exit codes: one table for --help, the docs and every verb."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

from sm_llm import cli
from sm_llm.cli.app import VERBS
from sm_llm.runs.run_states import EXIT_CODES, EXIT_MEANINGS, USAGE_EXIT_CODE
from tests.cli.test_typed_faults import cli_output

if TYPE_CHECKING:
    Capture = pytest.CaptureFixture[str]

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
COMMAND = typer.main.get_command(cli.app)
GROUP = COMMAND.commands["pipeline"]  # type: ignore[attr-defined]
ALL = [*((name,) for name in COMMAND.commands if name != "pipeline"), *(("pipeline", name) for name in GROUP.commands)]  # type: ignore[attr-defined]
OF_A_RUN = [
    name
    for name in VERBS
    if "run" in {parameter.name for parameter in COMMAND.commands[name].params}  # type: ignore[attr-defined]
]


def test_help_docs_and_states_know_the_same_codes(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", DOCS.read_text(), re.MULTILINE)]
    _, text = cli_output(monkeypatch, capsys, "--help")
    section = text.partition("Exit codes")[2].partition("Shell completion")[0]
    shown = [int(code) for code in re.findall(r"^ +(\d+) ", section, re.MULTILINE)]
    assert documented == shown == sorted(EXIT_MEANINGS)
    assert set(documented) == {*EXIT_CODES.values(), USAGE_EXIT_CODE}


@pytest.mark.parametrize("verb", ALL, ids=" ".join)
def test_wrong_usage_of_any_verb_has_its_code(
    verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    code, text = cli_output(monkeypatch, capsys, *verb, "--no-such-option")
    assert (code, "No such option" in text) == (USAGE_EXIT_CODE, True)
    assert cli_output(monkeypatch, capsys, *verb, "--help")[0] == 0


@pytest.mark.parametrize("verb", OF_A_RUN)
def test_a_run_that_is_not_there_is_wrong_usage_and_the_places_are_listed(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: job\nstorage: here\ntask: {kind: prepare, sources: [a], seq_length: 8}\n")
    for asked, location in (
        ((f"file://{tmp_path}/there/none",), f"{tmp_path}/there"),
        (("none", "--storage", str(tmp_path / "other")), f"{tmp_path}/other"),
        (("none",), f"{tmp_path}/runs"),
        (("local://nowhere/1",), f"{tmp_path}/runs"),
        (("job.yaml",), f"{tmp_path}/here"),
    ):
        code, text = cli_output(monkeypatch, capsys, verb, *asked)
        assert (code, location in text) == (USAGE_EXIT_CODE, True), text
        assert "Traceback" not in text


def test_a_storage_that_is_not_there_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    code, text = cli_output(monkeypatch, capsys, "ls", str(tmp_path / "none"))
    assert (code, f"{tmp_path}/none: there is no such folder" in text) == (USAGE_EXIT_CODE, True)


def test_every_verb_that_takes_a_run_was_asked() -> None:
    assert len(OF_A_RUN) >= 14


NOWHERE = "gs://nowhere/x"
WRONG: dict[str, list[list[str]]] = {
    **{verb: [["no-such-recipe"]] for verb in ("fit", "plan", "show", "pipeline render", "pipeline upsert")},
    **{verb: [["none"]] for verb in OF_A_RUN},
    **{f"pipeline {verb}": [["no-arn"]] for verb in ("status", "logs", "stop")},
    **{f"cache {verb}": [[NOWHERE]] for verb in ("ls", "clear", "unlock")},
    "fit": [["no-such-recipe"], ["smoke", "--dry-run", "--new"], ["smoke", "--dry-run", "--no-wait"]],
    "plan": [["smoke", "task.max_steps=5", "task.max_steps=6"], ["smoke", "task.max_step=5"]],
    "init": [["no-such-recipe"], ["smoke", "there.yaml"], ["smoke", "nowhere/job.yaml"]],
    "prepare": [["/nowhere", "--seq-length", "8"], ["there.yaml", "task.sources=[a]", "--seq-length", "8"]],
    "recipes": [["more"]],
    "ls": [["/nowhere/runs"], [NOWHERE], ["a", "--storage", "b"]],
    "nodes": [["--backend", "none"], ["compute.instance_count=2"]],
    "sync": [["/nowhere", "copy"], [".", NOWHERE], [".", "copy", "--engine", "x"], [".", "copy", "--bandwidth", "x"]],
    "fetch": [["gpt2", "copy"], ["hf://a/b/../c", "copy"], ["hf://a/b", NOWHERE]],
    "convert": [["/nowhere", "copy", "--to", "hf"], [".", "copy", "--to", "x"]],
    "doctor": [[], ["--storage", NOWHERE], ["--resume-proof", "no-such-recipe"], ["--backend", "none"],
               ["--storage", ".", "--steps", "3"], ["--resume-proof", "smoke", "--region", "us-east-1"]],
    "env create": [["--backend", "none"], ["--profile", "none", "backend.shared_folder=/fsx/x"]],
    "image build": [["none"]],
    "image import": [["a:1", "--backend", "none"]],
    "image login": [["a:1"]],
    "image push": [["a:1"]],
    "image wheelhouse": [["none", "s3://bucket/x"]],
    "pipeline start": [["name", "value"]],
}  # fmt: skip
"""Verb -> arguments that it refuses before it starts anything."""


@pytest.mark.parametrize("verb", WRONG)
def test_12e_7_what_a_verb_refuses_has_the_code_of_wrong_usage(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("a: 1")
    for arguments in WRONG[verb]:
        code, text = cli_output(monkeypatch, capsys, *verb.split(), *arguments)
        assert code == USAGE_EXIT_CODE, (arguments, text)
        assert "Traceback" not in text
    assert [it.name for it in tmp_path.iterdir()] == ["there.yaml"], "nothing was written"


def test_12e_7_every_verb_was_walked() -> None:
    leaves = [
        f"{name} {inner}".strip()
        for name, command in COMMAND.commands.items()  # type: ignore[attr-defined]
        for inner in getattr(command, "commands", [""])
    ]
    assert sorted(leaves) == sorted(WRONG)
