"""The runner of checks: order, duplicates, and issues that only follow from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.spec.validation.runner import blocked_by, run, without_duplicates

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = Issue("batch-odd", "task.batch", "is odd", 3)
DEGREE = Issue("degree-odd", "task.parallelism.degree", "is odd", 3)


def check_batch(_: object) -> Iterator[Issue]:
    yield BATCH
    yield Issue("batch-large", "task.batch", "is large")


def check_degree(_: object) -> Iterator[Issue]:
    yield DEGREE
    yield BATCH


def test_a_phase_keeps_the_order_of_its_checkers_and_reports_nothing_twice() -> None:
    found = run((check_batch, check_degree), object())
    assert [issue.code for issue in found] == ["batch-odd", "batch-large", "degree-odd"]
    assert run((check_degree,), object(), [BATCH]) == [DEGREE]
    assert without_duplicates([BATCH, DEGREE, BATCH]) == [BATCH, DEGREE]


def test_a_blocked_checker_does_not_run() -> None:
    for name in ("degree-odd", "task.parallelism", "task.parallelism.degree.x", "task"):

        @blocked_by(name)
        def check_memory(_: object) -> Iterator[Issue]:
            raise AssertionError("its answer means nothing")

        assert run((check_degree, check_memory), object()) == [DEGREE, BATCH], name
        assert run((check_memory,), object(), [DEGREE]) == [], name


def test_a_checker_runs_beside_issues_that_do_not_block_it() -> None:
    names = ("degree-even", "task.parallel", "task.parallelism.degrees")

    @blocked_by(*names)
    def check_memory(_: object) -> Iterator[Issue]:
        yield Issue("memory-short", "task.batch", "is too large")
        yield Issue("memory-none", "task.parallelism.degree", "has none")

    found = run((check_memory,), object(), [DEGREE, warning("degree-even", "task.parallel", "is even")])
    assert [(issue.code, issue.blocked_by) for issue in found] == [("memory-short", names), ("memory-none", names)]


def test_an_issue_names_what_blocks_it_by_code_or_path() -> None:
    follows = Issue("rate-odd", "task.optim", "is odd", blocked_by=("batch-odd",))
    assert without_duplicates([follows], [DEGREE]) == [follows]
    assert without_duplicates([follows], [BATCH]) == []
    assert without_duplicates([follows, BATCH]) == [follows, BATCH], "only what was reported before it blocks it"
