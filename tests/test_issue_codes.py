"""The codes of issues: each names one thing, in words with hyphens between them."""

from __future__ import annotations

from collections import defaultdict

from tests.issue_codes import CODE, constructed


def test_every_issue_is_given_a_code_of_the_right_form() -> None:
    """Helpers hand on the code that they are given; then it is open here."""
    wrong = [f"{it.module}:{it.line} {it.code}" for it in constructed() if not CODE.fullmatch(it.code)]
    assert wrong == [
        it for it in wrong if it.startswith(("errors.py:", "models/read.py:", "spec/loading/yaml_text.py:"))
    ]
    assert len(wrong) == 3
    assert len(constructed()) > 350


def test_every_code_is_constructed_in_one_function() -> None:
    found = defaultdict(set)
    for it in constructed():
        if CODE.fullmatch(it.code):
            found[it.code].add((it.module, it.function))
    assert {code: where for code, where in found.items() if len(where) > 1} == {}
