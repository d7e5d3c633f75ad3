"""Log streams as CloudWatch pages them, copied by one or several mirrors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.aws_account import account
from sm_llm.launcher.backends.sagemaker.jobs.cloudwatch import CloudWatchCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.sagemaker_double import SageMakerDouble

STREAM = "job/algo-1-1700000000"


@pytest.fixture
def cache(
    sagemaker_double: SageMakerDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], CloudWatchCache]:
    """Makes mirrors of one job, which all copy to the same folder."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    sagemaker_double.log(STREAM)
    return lambda: CloudWatchCache(account("us-west-2"), "job", tmp_path)


def paged(double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch, pages: list[list[dict[str, Any]]]) -> None:
    """Let the stream be of these pages; after the last one the service answers with the token that it was given."""

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        number = int(asked.get("nextToken", "0"))
        events = pages[number] if number < len(pages) else []
        return {"events": events, "nextForwardToken": str(min(number + 1, len(pages))), "nextBackwardToken": "b"}

    monkeypatch.setattr(double, "_GetLogEvents", answer, raising=False)


def lines_in(folder: Path) -> list[str]:
    return (folder / "node-0.log").read_text().splitlines()


def test_empty_pages_do_not_end_a_look(
    cache: Callable[[], CloudWatchCache],
    sagemaker_double: SageMakerDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged(sagemaker_double, monkeypatch, [[], [{"message": "one"}], [], [], [{"message": "two"}]])
    cache().pull()
    assert lines_in(tmp_path) == ["one", "two"]


def test_one_look_reads_a_log_of_any_length(
    cache: Callable[[], CloudWatchCache], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    lines = [str(number) for number in range(130)]  # 65 pages of the double
    sagemaker_double.log(STREAM, *lines)
    cache().pull()
    assert lines_in(tmp_path) == lines


def test_a_look_ends_though_the_job_prints_as_fast_as_it_is_read(
    cache: Callable[[], CloudWatchCache],
    sagemaker_double: SageMakerDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    times = [now - 60, now - 50, *(now + 60 + number for number in range(40))]
    pages = [[{"message": f"{number}", "ingestionTime": int(at * 1000)}] for number, at in enumerate(times)]
    paged(sagemaker_double, monkeypatch, pages)
    cache().pull()
    assert lines_in(tmp_path) == ["0", "1", "2"]


def test_mirrors_of_one_job_do_not_write_to_one_anothers_files_and_leave_one_copy(
    cache: Callable[[], CloudWatchCache], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    sagemaker_double.log(STREAM, "one", "two")
    first = cache()
    first.pull()
    with (tmp_path / "node-0.log").open() as followed:
        assert followed.readline() == "one\n"
        second = cache()
        second.pull()
        sagemaker_double.log(STREAM, "three")
        first.pull()
        second.pull()
        assert followed.read() == "two\nthree\n"
    assert lines_in(tmp_path) == ["one", "two", "three"]
    del first, second
    assert [it.name for it in tmp_path.iterdir()] == ["node-0.log"]


def test_what_was_copied_of_an_earlier_job_is_not_shown(
    cache: Callable[[], CloudWatchCache], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    (tmp_path / "node-1.log").write_text("of an earlier job of the same attempt, which had two hosts\n")
    sagemaker_double.log(STREAM, "new")
    cache().pull()
    assert sorted(it.name for it in tmp_path.glob("node-*")) == ["node-0.log"]
