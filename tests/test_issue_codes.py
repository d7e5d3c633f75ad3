"""The codes of issues: each names one thing, in words with hyphens between them."""

from __future__ import annotations

from collections import defaultdict

from tests.issue_codes import CODE, constructed


def test_every_issue_is_given_a_code_of_the_right_form() -> None:
    wrong = [f"{it.module}:{it.line} {it.code}" for it in constructed() if not CODE.fullmatch(it.code)]
    assert wrong == []
    assert len(constructed()) > 500


def test_every_code_is_constructed_in_one_function() -> None:
    found = defaultdict(set)
    for it in constructed():
        found[it.code].add((it.module, it.function))
    assert {code: where for code, where in found.items() if len(where) > 1} == {}
