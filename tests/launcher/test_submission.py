"""Claiming, submitting and rolling back an attempt, once for every backend: runs in folders and in a real S3 store."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import LaunchRefused, StorageError, SubmitError
from sm_llm.launcher.submission import Change, MayRun, claimed, submit_workflow
from sm_llm.runs.run_record import Attempt, RunRecord
from sm_llm.runs.run_store import run_store_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sm_llm.launcher.backend import Submission
    from sm_llm.runs.run_store import RunStore

SPEC = {"backend": {"name": "local"}, "task": {"kind": "train"}}


@pytest.fixture(params=["folder", "s3"])
def run_store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    """An empty run, in a folder and in S3."""
    if request.param == "folder":
        found = run_store_at(tmp_path / "job-1")
    else:
        server = request.getfixturevalue("s3_server")
        found = run_store_at(f"s3://{request.getfixturevalue('bucket')}/job-1", {"endpoint_url": server.endpoint})
    found.create(RunRecord(run_id="job-1", name="job", created=1.0, spec=SPEC, spec_digest="d"))
    return found


class Location:
    """A place where jobs run: ``start`` is what it does with a workflow."""

    def __init__(self, start: Callable[[RunStore, int], str], known_id: str = "") -> None:
        self.submit_workflow = start
        self.known_id = known_id
        self.holds = False

    @contextmanager
    def starting(self, run_store: RunStore, number: int, submission: None) -> Iterator[Attempt]:
        assert run_store.record().next_attempt == number
        self.holds = True
        yield Attempt.claim(number, self.known_id)
        self.holds = False

    def render_workflow(self, *_: object) -> list[Submission]:
        raise NotImplementedError

    def step_run_store(self, run_store: RunStore, step: str) -> RunStore:
        raise NotImplementedError


def submit(run_store: RunStore, location: Any, change: Change | None = None) -> str:
    return submit_workflow(location, run_store, 1, change)


def fails(run_store: RunStore, number: int) -> str:
    raise SubmitError("no capacity")


@pytest.mark.parametrize("known", ["", "job-7"])
def test_the_native_id_is_in_the_record_once_it_is_known(run_store: RunStore, known: str) -> None:
    seen = []

    def start(run_store: RunStore, number: int) -> str:
        seen.extend(run_store.record().attempts)
        return "job-7"

    location = Location(start, known)
    assert submit(run_store, location) == "job-7"
    assert not location.holds
    if run_store.is_remote:
        assert [it.native_id for it in seen] == [known], "claimed before it was started"
    assert [it.native_id for it in run_store.record().attempts] == ["job-7"]


def test_what_cannot_be_started_is_undone_while_nobody_else_can_start_it(run_store: RunStore) -> None:
    done: list[Any] = []
    change = Change(lambda: done.append("made"), lambda: done.append(run_store.record().attempt(1) is not None))
    with pytest.raises(SubmitError, match="no capacity"):
        submit(run_store, Location(fails), change)
    assert done == ["made", run_store.is_remote], "a folder's lock, or the claim in S3, is still held"
    assert run_store.record().attempts == ()


def test_a_change_that_stops_half_way_is_undone_and_nothing_is_started(run_store: RunStore) -> None:
    done = []

    def breaks() -> None:
        raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        submit(run_store, Location(lambda *_: pytest.fail("started")), Change(breaks, lambda: done.append("undone")))
    assert done == ["undone"]
    assert run_store.record().attempts == ()


def test_the_claim_is_released_even_where_the_change_cannot_be_undone(run_store: RunStore) -> None:
    def breaks() -> None:
        raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        submit(run_store, Location(fails), Change(undo=breaks))
    assert run_store.record().attempts == ()


def test_an_attempt_of_which_nobody_knows_whether_it_runs_is_kept(run_store: RunStore) -> None:
    def unanswered(run_store: RunStore, number: int) -> str:
        raise MayRun("no answer")

    with pytest.raises(MayRun):
        submit(run_store, Location(unanswered, "job-7"), Change(undo=lambda: pytest.fail("undone")))
    if run_store.is_remote:
        assert [it.native_id for it in run_store.record().attempts] == ["job-7"]


def test_an_attempt_that_has_recorded_itself_keeps_its_record(run_store: RunStore) -> None:
    """Ctrl-C in the launcher reaches no supervisor, which records how its attempt ends."""

    def begins(run_store: RunStore, number: int) -> str:
        run_store.update(lambda held: held.with_attempt(Attempt.claim(number, "4711")))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit(run_store, Location(begins), Change(undo=lambda: pytest.fail("undone")))
    assert [it.native_id for it in run_store.record().attempts] == ["4711"]


def test_a_started_job_that_the_record_cannot_hold_is_named(
    run_store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise StorageError("no space left")

    def start(run_store: RunStore, number: int) -> str:
        monkeypatch.setattr(type(run_store), "update", refuses)
        return "job-7"

    with pytest.raises(MayRun, match="job-7 was started, but the run's record does not hold it: no space left"):
        submit(run_store, Location(start))


def test_a_place_that_is_busy_claims_nothing(run_store: RunStore) -> None:
    class Busy(Location):
        @contextmanager
        def starting(self, run_store: RunStore, number: int, submission: None) -> Iterator[Attempt]:
            raise LaunchRefused("is running already")
            yield

    with pytest.raises(LaunchRefused):
        submit(run_store, Busy(fails), Change(lambda: pytest.fail("made"), lambda: pytest.fail("undone")))
    assert run_store.record().attempts == ()


def test_a_claim_of_a_job_that_exists_is_kept_though_its_start_failed(run_store: RunStore) -> None:
    """As of an estimator's ``fit``, which also raises where the job that it waited for has failed."""
    with pytest.raises(RuntimeError), claimed(run_store, Attempt.claim(1, "job-7"), exists=lambda: True):
        raise RuntimeError("the job failed")
    assert [it.native_id for it in run_store.record().attempts] == (["job-7"] if run_store.is_remote else [])
    number = run_store.record().next_attempt
    with pytest.raises(RuntimeError), claimed(run_store, Attempt.claim(number, "job-8")):
        raise RuntimeError("refused")
    assert run_store.record().next_attempt == number
