"""Nothing in the shape of a token, and no known secret, stays in a text."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sm_llm.errors import Fault, RunFailed, SpecError, StorageError
from sm_llm.redaction import HIDDEN, SHORTEST, Hidden, is_token_shaped, redact, redact_assignments

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
    "redis://:pass" + "word@host",
    "https://host/x?a=1&tok" + "en=abcdef",
    "https://host/x?X-Amz-Sig" + "nature=abcdef",
    "https://hooks.slack.com/ser" + "vices/T0/B0/abcdef",
    "https://discord.com/api/web" + "hooks/123/abcdef",
    "npm_" + "a1B2" * 9,
    "hvs." + "a1B2" * 9,
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


@pytest.mark.parametrize("error", [StorageError, RunFailed])
def test_s09b_no_error_shows_credentials_of_an_address(error: type[Exception]) -> None:
    assert "planted" not in str(error("cannot reach http://user:planted@127.0.0.1:9/x?token=planted"))


SECRETS = st.text(st.characters(exclude_categories=("Cs",)), min_size=SHORTEST, max_size=40)


def _shown(secret: str, way: str, before: str, after: str) -> str:
    """What a program prints of ``secret``: itself, or as other formats write it, inside other text."""
    if way == "base64":
        return base64.b64encode(f"{before}{secret}{after}".encode()).decode()
    written = {
        "plain": lambda: secret,
        "json": lambda: json.dumps(secret)[1:-1],
        "repr": lambda: repr(secret)[1:-1],
        "url": lambda: quote(secret, safe=""),
        "form": lambda: quote_plus(secret),
        "urlsafe": lambda: base64.urlsafe_b64encode(secret.encode()).decode(),
    }[way]()
    return f"{before} {written} {after}"


@example("000000", "base64", "\x81", "")  # two bytes before it: five characters lie in whole groups, seven are its own
@settings(deadline=None)
@given(SECRETS, st.sampled_from(["plain", "json", "repr", "url", "form", "base64", "urlsafe"]), st.text(), st.text())
def test_s08_a_known_secret_is_found_however_it_is_written(secret: str, way: str, before: str, after: str) -> None:
    text = _shown(secret, way, before, after)
    found = Hidden((secret,))(text)
    assert HIDDEN in found
    if way != "base64":  # of base64, characters that also encode neighbours of the secret stay
        assert _shown(secret, way, "", "").strip() not in found.replace(HIDDEN, "\0")


@settings(deadline=None)
@given(st.lists(SECRETS, min_size=2, max_size=5))
def test_s08_every_line_of_a_secret_of_several_lines_is_hidden(lines: list[str]) -> None:
    secret = "\n".join(lines)
    hidden = Hidden((secret,))
    for line in secret.splitlines():
        if len(line.strip()) >= SHORTEST:
            assert HIDDEN in hidden(f"line: {line.strip()}")


def test_s08_texts_inside_a_secret_that_is_json_are_hidden() -> None:
    hidden = Hidden((json.dumps({"user": "x", "nested": [{"password": "planted-value"}]}),))
    assert hidden("it is planted-value") == f"it is {HIDDEN}"


@settings(deadline=None)
@given(st.text())
def test_hiding_twice_changes_nothing_more(text: str) -> None:
    hidden = Hidden(("planted-value",))
    assert hidden(hidden(text)) == hidden(text)


def test_s07_values_given_to_secret_names_are_hidden_and_code_stays() -> None:
    text = (
        "+db_password: planted1\n+ 'api_key': 'planted2',\n+export GH_PAT=planted3\n"
        "+token = tokenizer.encode(text)\n+max_tokens=5\n+password=os.environ['X']\n"
    )
    found = redact_assignments(text)
    assert "planted" not in found
    assert found.endswith("+token = tokenizer.encode(text)\n+max_tokens=5\n+password=os.environ['X']\n")
