"""What is refused before anything starts ends with exit code 2, whichever error is raised."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.test_typed_faults import cli_output


@pytest.mark.parametrize("verb", [("resume",), ("resume", "--step", "7"), ("finish",), ("branch", "--step", "7")])
def test_E21_a_refused_verb_has_the_code_of_a_refusal(
    verb: tuple[str, ...], fakes: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fakes.use("put(1)\nput(None)")
    run = fakes.launch()
    fakes.end(run)
    code, text = cli_output(monkeypatch, capsys, verb[0], run.uri, *verb[1:])
    assert (code, len(run.attempts)) == (2, 1), text


def test_A2_a_fit_beside_an_unfinished_run_has_the_code_of_a_refusal(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fakes.use("put(1)\nraise SystemExit(1)")
    run = fakes.launch()
    fakes.end(run)
    storage = run.record.spec["storage"]
    code, text = cli_output(
        monkeypatch, capsys, "fit", "smoke", f"name={run.record.name}", f"storage={storage}", "--no-wait"
    )
    assert code == 2, text
    assert f"sm-llm resume {run.uri}" in text
