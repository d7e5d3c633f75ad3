"""Slurm's compressed lists of nodes."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

import pytest

from sm_llm.worker.slurm import nodelist
from sm_llm.worker.slurm.nodelist import expand, keeping_positions

if TYPE_CHECKING:
    from collections.abc import Iterator


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
def test_DL13_DL14_lists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["", "a[", "a]", "a[1-", "a[x]", "a[3-1]", "a[]", "a[0-999999999]"])
def test_what_is_not_a_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        expand(text)


@pytest.mark.parametrize(
    ("names", "before", "order"),
    [
        (["n1", "n2", "n3"], [], ["n1", "n2", "n3"]),
        (["n2", "n3", "n4"], ["n1", "n2", "n3"], ["n4", "n2", "n3"]),  # n1 was lost
        (["n1", "n2"], ["n3", "n2"], ["n1", "n2"]),
        (["n1", "n2"], ["n2", "n1", "n3"], ["n2", "n1"]),  # fewer nodes
        (["n1", "n2", "n3"], ["n3"], ["n3", "n1", "n2"]),  # more nodes
        (["n1", "n2"], ["n9", "n8", "n1"], ["n1", "n2"]),  # its place is gone
    ],
)
def test_nodes_that_stay_keep_their_places(names: list[str], before: list[str], order: list[str]) -> None:
    assert keeping_positions(names, before) == order


@pytest.mark.parametrize("text", ["a[1-99999]b[1-2]", "a[1-99999],b[1-2]", "a[1-99999,1-2]", "a" + "[1-2]" * 60])
def test_a_list_of_too_many_nodes_is_refused_before_its_names_are_made(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(*pieces: list[str]) -> Iterator[tuple[str, ...]]:
        made.append(prod(map(len, pieces)))
        assert sum(made) <= 100_000
        return product(*pieces)

    monkeypatch.setattr(nodelist, "product", counted)
    with pytest.raises(ValueError, match="100,000"):
        expand(text)
