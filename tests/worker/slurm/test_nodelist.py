"""Slurm's compressed lists of nodes."""

from __future__ import annotations

import pytest

from sm_llm.worker.slurm.nodelist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("linux[1,2]", ["linux1", "linux2"]),  # DL13
        ("a[01-03,7],b5", ["a01", "a02", "a03", "a7", "b5"]),  # DL13
        ("n[009-011]", ["n009", "n010", "n011"]),  # DL13
        ("x[1-2]y[3-4]", ["x1y3", "x1y4", "x2y3", "x2y4"]),  # DL13
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),  # DL14
        ("ip-10-0-1-2", ["ip-10-0-1-2"]),
        ("queue-st-p4d-[1-2],queue-dy-p4d-10", ["queue-st-p4d-1", "queue-st-p4d-2", "queue-dy-p4d-10"]),
    ],
)
def test_lists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["", "a[", "a]", "a[1-", "a[x]", "a[3-1]", "a[]", "a[0-999999999]"])
def test_what_is_not_a_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        expand(text)
