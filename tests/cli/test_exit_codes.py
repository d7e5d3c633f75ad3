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
    for asked, place in (
        ((f"file://{tmp_path}/there/none",), f"{tmp_path}/there"),
        (("none", "--storage", str(tmp_path / "other")), f"{tmp_path}/other"),
        (("none",), f"{tmp_path}/runs"),
        (("local://nowhere/1",), f"{tmp_path}/runs"),
        (("job.yaml",), f"{tmp_path}/here"),
    ):
        code, text = cli_output(monkeypatch, capsys, verb, *asked)
        assert (code, place in text) == (USAGE_EXIT_CODE, True), text
        assert "Traceback" not in text


def test_a_storage_that_is_not_there_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    code, text = cli_output(monkeypatch, capsys, "ls", str(tmp_path / "none"))
    assert (code, f"{tmp_path}/none: there is no such folder" in text) == (USAGE_EXIT_CODE, True)


def test_every_verb_that_takes_a_run_was_asked() -> None:
    assert len(OF_A_RUN) >= 14
