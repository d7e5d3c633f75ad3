"""What a person reads when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from sm_llm.errors import Issue, PlanError, SmLlmError, SpecError, warning
from sm_llm.redaction import HIDDEN


def test_a_fault_states_what_where_seen_and_what_to_do() -> None:
    fault = Issue("seed-negative", "task.seed", "must be at least 0", -1, "Use 0", "job.yaml:3")
    assert str(fault) == "task.seed (job.yaml:3): must be at least 0 (got -1). Use 0"
    assert str(Issue("name-missing", "name", "missing")) == "name: missing"
    assert str(Issue("tokenizer-empty", "task.tokenizer", "is empty", None)) == "task.tokenizer: is empty (got None)"


def test_a_long_value_is_shortened() -> None:
    assert len(str(Issue("a-b", "a", "b", "x" * 10_000))) < 150


def test_an_error_lists_all_its_faults() -> None:
    first, second = Issue("a-x", "a", "x"), Issue("b-y", "b", "y")
    assert str(SpecError([first])) == "a: x"
    assert str(PlanError([first, second])) == "2 issues:\n  - a: x\n  - b: y"
    assert SpecError("in words").issues == ()
    assert issubclass(SpecError, SmLlmError)


def test_an_issue_is_a_JSON_value_without_credentials() -> None:
    token = "hf_" + "a" * 34
    given = {"path": Path("x"), "rate": float("nan"), "list": (1, token)}
    shown = Issue("value-odd", "a.b", f"is odd: {token}", given, "Use 1", "job.yaml:3").to_json()
    assert json.loads(json.dumps(shown, allow_nan=False)) == {
        "code": "value-odd",
        "severity": "error",
        "path": "a.b",
        "message": f"is odd: {HIDDEN}",
        "value": {"path": repr(Path("x")), "rate": "nan", "list": [1, HIDDEN]},
        "remedy": "Use 1",
        "origin": "job.yaml:3",
    }
    assert "value" not in warning("value-odd", "a.b", "is odd").to_json()
