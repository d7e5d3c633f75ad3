"""Nothing in the shape of a token, and no known secret, stays in a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

import pytest

from sm_llm.errors import Fault, SpecError
from sm_llm.redaction import HIDDEN, Hidden, is_token_shaped, redact

# Put together at run time: no text in the shape of a token stands in this file.
SHAPES = [
    "hf_" + "aB3" * 12,
    "AKIA" + "ABCDEFGH" * 2,
    "ghp_" + "x1" * 18,
    "github_pat_" + "x1_" * 12,
    "glpat-" + "y2-" * 8,
    "sk-" + "proj-" + "z3" * 20,
    "xoxb-" + "123-" * 5,
    "eyJ" + "hbGciOiJI" + ".eyJ" + "zdWIiOiIx" + ".c2lnbmF0dXJl",
    "-----BEGIN RSA " + "PRIVATE KEY-----\nabc\n-----END RSA " + "PRIVATE KEY-----",
    "https://me:pass" + "word@host/path",
]
HARMLESS = [
    "hf_hub", "hf://org/name@" + "0a" * 20, "task-1", "s3://bucket/asia", "sk-learn", "user@host", "1e-4",
    "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hub", "https://host:8080/x@y", "hf_transfer",
]  # fmt: skip


@pytest.mark.parametrize("text", SHAPES)
def test_a_token_is_known_by_its_shape(text: str) -> None:
    assert is_token_shaped(f"before {text} after")
    assert redact(f"before={text}").startswith("before=")
    assert text not in redact(f"before {text} after")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_a_little_like_one_stays(text: str) -> None:
    assert not is_token_shaped(text)
    assert redact(text) == text


def test_a_fault_shows_no_token_not_even_half_of_one() -> None:
    token = SHAPES[0]
    text = str(SpecError([Fault("a.b", "is odd", "x" * 100 + " " + token), Fault(token, f"see {token}")]))
    assert "hf_" not in text
    assert HIDDEN in text


class Kind(StrEnum):
    ONE = "one secret value"


@dataclass(frozen=True)
class Record:
    text: str
    more: tuple[dict[str, list[str]], ...]
    kind: Kind = Kind.ONE
    number: float = 123456.0


def test_known_values_are_hidden_inside_records() -> None:
    hidden = Hidden(("secret", 'quo"ted\\value', "123456", "tiny"))
    record = hidden.inside(Record("a secret and tiny", ({"k": ["the secret"]},)))
    assert record == Record(f"a {HIDDEN} and tiny", ({"k": [f"the {HIDDEN}"]},))
    assert record.kind is Kind.ONE
    assert HIDDEN in hidden(json.dumps({"x": 'quo"ted\\value'}))
    assert HIDDEN in hidden(repr('quo"ted\\value'))
