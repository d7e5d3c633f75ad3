"""What the verbs of pipelines make of their arguments."""

from __future__ import annotations

import pytest

from sm_llm.cli.pipeline import _pairs
from sm_llm.errors import SpecError


def test_values_hold_what_follows_the_first_equals_sign() -> None:
    assert _pairs(["A=1", "B=x=y", "C="], "NAME=VALUE") == {"A": "1", "B": "x=y", "C": ""}


@pytest.mark.parametrize(
    ("texts", "words"), [(["A"], "is not written NAME=VALUE"), (["=1"], "is not written"), (["A=1", "A=2"], "twice")]
)
def test_what_cannot_be_meant_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        _pairs(texts, "NAME=VALUE")
