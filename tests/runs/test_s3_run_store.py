"""A run in S3, on a real server: no change is lost, one launch has an attempt, growing files arrive whole."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError, SubmitError
from sm_llm.runs.replication import log_segments
from sm_llm.runs.replication.log_uploader import LogUploader
from sm_llm.runs.replication.periodic_task import PeriodicTask
from sm_llm.runs.replication.s3_cache import S3Cache
from sm_llm.runs.run_record import Attempt, RunRecord
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import FolderRunStore, local_root, run_store_at
from sm_llm.runs.s3_run_store import S3RunStore
from sm_llm.runs.stop_request import StopRequest
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3.swap import folders, read_tagged, swap
from sm_llm.storage.s3_store import S3Store

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.runs.run_store import RunStore

SPEC = {"backend": {"name": "local"}, "task": {"kind": "train"}}
RECORD = RunRecord(run_id="job-1", name="job", created=1.0, spec=SPEC, spec_digest="d")


def attempt(number: int, **facts: Any) -> Attempt:
    return Attempt(number=number, native_id=str(number), started=1.0, **facts)


@pytest.fixture
def store(bucket: str, s3_server: Any) -> S3Store:
    return S3Store(bucket, "runs/job-1", S3Options(endpoint_url=s3_server.endpoint))


@pytest.fixture
def run_store(store: S3Store, s3_server: Any) -> S3RunStore:
    found = run_store_at(store.uri, {"endpoint_url": s3_server.endpoint})
    assert isinstance(found, S3RunStore)
    return found


def at_once(count: int, action: Any) -> list[Any]:
    """What ``action(number)`` returned or raised in every one of ``count`` threads that began together."""
    results: list[Any] = [None] * count
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        gate.wait()
        try:
            results[number] = action(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# --- conditional writes


def test_an_object_is_replaced_only_if_it_is_the_one_that_was_read(store: S3Store) -> None:
    first = swap(store, "x", b"one", None)
    assert first is not None
    assert swap(store, "x", b"other", None) is None, "it exists"
    assert swap(store, "x", b"two", first) is not None
    assert swap(store, "x", b"three", first) is None, "somebody changed it"
    assert swap(store, "gone", b"three", first) is None
    assert read_tagged(store, "x").body == b"two"
    assert read_tagged(store, "gone").tag is None
    assert swap(store, "x", b"two", first) == read_tagged(store, "x").tag, "our own bytes: the answer was lost"


def test_folders_are_listed_without_what_is_in_them(bucket: str, s3_server: Any) -> None:
    store = S3Store(bucket, "", S3Options(endpoint_url=s3_server.endpoint))
    for key in ("runs/job-1/run.json", "runs/job-1/ckpt/a", "runs/job-10/run.json", "runs/other-1/run.json", "x"):
        store.put_if_absent(key, b"1")
    assert folders(store.below("runs"), "job-") == ["job-1", "job-10"]
    assert folders(store) == ["runs"]


# --- the record


def test_two_writers_of_a_record_never_lose_each_others_change(run_store: S3RunStore) -> None:
    run_store.create(RECORD)

    def add(number: int) -> None:
        for turn in range(3):
            mine = attempt(1 + number * 3 + turn)
            run_store.update(lambda held, mine=mine: held.with_attempt(mine))  # type: ignore[misc]

    assert at_once(4, add) == [None] * 4
    assert [it.number for it in run_store.record().attempts] == list(range(1, 13))


def test_of_launchers_that_race_for_an_attempt_one_has_it_and_the_others_know(
    run_store: S3RunStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_store.create(RECORD.with_attempt(attempt(1, ended=2.0, state=RunState.FAILED)))
    results = at_once(5, lambda number: run_store.claim(attempt(2, host=f"host-{number}")))
    lost = [it for it in results if isinstance(it, SubmitError)]
    assert (len(lost), results.count(None)) == (4, 1)
    winner = run_store.record().attempts[-1].host
    assert winner == f"host-{results.index(None)}"
    assert all(f"has started attempt 2 on {winner}" in str(it) for it in lost)
    assert all(f"sm-llm logs -f {run_store.uri}" in str(it) for it in lost)
    run_store.hold_originals(2)
    assert run_store.has_originals(2)
    run_store.unclaim(2)
    assert run_store.record().next_attempt == 2, "what could not be started can be tried again"
    assert not run_store.has_originals(2), "by another machine, too: then nothing here is of that attempt"


def test_a_run_of_the_same_id_is_not_written_over(run_store: S3RunStore, tmp_path: Path) -> None:
    results = at_once(3, lambda number: run_store.create(RECORD.model_copy(update={"created": float(number)})))
    assert results.count(None) == 1
    assert all("there is a run of this id already" in str(it) for it in results if it is not None)
    assert run_store.record().created == results.index(None)
    folder = FolderRunStore(tmp_path / "job-1")
    folder.create(RECORD)
    with pytest.raises(SubmitError, match="there is a run of this id already"):
        folder.create(RECORD)


def test_a_record_that_is_not_there_or_not_readable_is_reported_with_its_address(run_store: S3RunStore) -> None:
    assert not run_store.exists()
    with pytest.raises(StorageError, match=r"s3://.*/runs/job-1/run.json: there is no run record"):
        run_store.record()
    run_store.store.put_if_absent("run.json", b'{"version": 99}')
    with pytest.raises(StorageError, match="record version 99"):
        run_store.record()


def test_every_address_has_a_folder_of_its_own_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    locations = [local_root(uri) for uri in ("s3://one/runs/job-1", "s3://two/runs/job-1", "s3://one/runs/job-2")]
    assert len(set(locations)) == 3
    assert all(it.parent == tmp_path / "sm_llm" / "runs" and it.name.startswith("job-") for it in locations)
    assert local_root(tmp_path / "job-1") == tmp_path / "job-1"
    with pytest.raises(StorageError, match="a run has a folder of its own in a bucket"):
        run_store_at("s3://bucket")


# --- files that grow


def test_files_that_grow_arrive_whole_in_segments_that_never_change(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sm_llm.runs.replication.log_segments.SEGMENT_BYTES", 100)
    monkeypatch.setattr("sm_llm.runs.replication.log_uploader.SEGMENT_BYTES", 100)
    here, there = tmp_path / "here", tmp_path / "there"
    uploader, cache = LogUploader(here, store), S3Cache(there, store)
    names = ("events/attempt-1-rank0.jsonl", "logs/attempt-1/node-0.log", "logs/attempt-1/node-1.log")
    rng = random.Random(7)
    full: dict[str, str | None] = {}
    for turn in range(8):
        for name in names[: 1 + turn // 3]:
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            with (here / name).open("ab") as stream:
                stream.write(rng.randbytes(rng.randrange(0, 260)))
        if turn == 4:
            uploader = LogUploader(here, store)  # the old one was killed
        uploader.upload()
        assert uploader.is_done()
        for folder in ("events/", "logs/"):
            cache.refresh(folder, lambda name: True)
            for it in store.list(folder):
                if it.size == 100:
                    assert full.setdefault(it.key, it.tag) == it.tag, "a full segment was stored again"
        for name in names[: 1 + turn // 3]:
            assert (there / name).read_bytes() == (here / name).read_bytes(), (turn, name)
    assert full
    (here / "logs/attempt-1/node-2.log").touch()
    uploader.upload()
    assert uploader.is_done()
    cache.refresh("logs/", lambda name: True)
    assert (there / "logs/attempt-1/node-2.log").read_bytes() == b"", "a node that printed nothing is one all the same"
    (here / "logs/attempt-1/node-2.log").write_text("late")
    uploader.upload()
    cache.refresh("logs/", lambda name: True)
    assert (there / "logs/attempt-1/node-2.log").read_text() == "late"


def test_a_cache_is_read_while_it_grows_and_repairs_itself(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "events/attempt-1-rank0.jsonl"
    here, there = tmp_path / "here", tmp_path / "there"
    uploader, cache = LogUploader(here, store), S3Cache(there, store)
    (here / "events").mkdir(parents=True)
    (here / name).write_bytes(b"one\n")
    uploader.upload()
    cache.refresh("events/", lambda name: True)
    with (there / name).open("rb") as reader:
        assert reader.read() == b"one\n"
        (here / name).write_bytes(b"one\ntwo\n")
        uploader.upload()
        cache.refresh("events/", lambda name: True)
        assert reader.read() == b"two\n", "the file is the same one and only grew"
    (there / name).write_bytes(b"on")
    cache.refresh("events/", lambda name: True)
    assert (there / name).read_bytes() == b"one\ntwo\n"
    gets: list[str] = []
    monkeypatch.setattr("sm_llm.runs.replication.s3_cache.read_tagged", lambda store, key: gets.append(key))
    cache.refresh("events/", lambda name: True)
    assert gets == [], "what is here already is not fetched again"


def test_a_file_that_another_process_writes_too_is_left_to_it_and_reported(store: S3Store, tmp_path: Path) -> None:
    name = "events/attempt-1-rank0.jsonl"
    for folder in ("one", "two"):
        (tmp_path / folder / "events").mkdir(parents=True)
    one, two = LogUploader(tmp_path / "one", store), LogUploader(tmp_path / "two", store)
    (tmp_path / "one" / name).write_bytes(b"aaaa\n")
    one.upload()
    (tmp_path / "two" / name).write_bytes(b"aaaa\nbb\n")
    two.upload()
    (tmp_path / "one" / name).write_bytes(b"aaaa\ncc\n")
    with pytest.raises(StorageError, match="is written by another process too"):
        one.upload()
    one.upload()
    assert one.is_done(), "it is not tried again"
    S3Cache(tmp_path / "three", store).refresh("events/", lambda name: True)
    assert (tmp_path / "three" / name).read_bytes() == b"aaaa\nbb\n"


def test_a_file_that_grows_as_fast_as_it_is_uploaded_does_not_hold_up_the_others(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, behind = tmp_path / "events/attempt-1-rank0.jsonl", ["events/attempt-1-rank1.jsonl", "logs/attempt-1/0"]
    for name in behind:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"one\n")
    fast.write_bytes(b"line\n")

    def grows(*arguments: Any) -> Any:
        with fast.open("ab") as stream:
            stream.write(b"line\n")
        return swap(*arguments)

    monkeypatch.setattr("sm_llm.runs.replication.log_uploader.swap", grows)
    uploader = LogUploader(tmp_path, store)
    for _ in range(2):
        uploader.upload()
    assert set(behind) < set(log_segments.files_of(store.list("")))
    before = fast.stat().st_size
    uploader.upload()
    assert fast.stat().st_size > before, "its own turn comes again"


@pytest.mark.parametrize("before", [b"", b"aaaa\n"])
def test_a_file_that_grew_after_an_upload_whose_answer_was_lost_continues(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    file = tmp_path / "events" / "attempt-1-rank0.jsonl"
    file.parent.mkdir()
    uploader = LogUploader(tmp_path, store)
    if before:
        file.write_bytes(before)
        uploader.upload()
    file.write_bytes(before + b"bb\n")

    def lost(*arguments: Any) -> None:
        swap(*arguments)
        raise StorageError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr("sm_llm.runs.replication.log_uploader.swap", lost)
        with pytest.raises(StorageError, match="no answer"):
            uploader.upload()
    file.write_bytes(before + b"bb\ncc\n")
    uploader.upload_all()
    S3Cache(tmp_path / "there", store).refresh("events/", lambda name: True)
    assert (tmp_path / "there" / "events" / file.name).read_bytes() == before + b"bb\ncc\n"


def test_what_lies_behind_a_gap_is_not_part_of_a_file() -> None:
    from sm_llm.storage.base import StoredObject

    objects = [StoredObject(log_segments.segment_key("logs/a", begin), 10, tag="t") for begin in (0, 10, 30)]
    found = log_segments.files_of([*objects, StoredObject("logs/other", 3)])
    assert [it.begin for it in found["logs/a"]] == [0, 10]
    assert list(found) == ["logs/a"]


def test_a_store_that_is_down_is_an_error_and_not_an_old_copy(
    tmp_path: Path, aws_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sm_llm.runs.s3_run_store.CONFIG", {"connect_timeout": 1, "retries": {"total_max_attempts": 1}})
    run_store = run_store_at("s3://bucket/runs/job-1", {"endpoint_url": "http://127.0.0.1:9"})
    RECORD.write(run_store.paths.record)
    (run_store.paths.events).mkdir(parents=True)
    (run_store.paths.events / "attempt-1-rank0.jsonl").write_text("{}\n")
    for ask in (
        run_store.record,
        run_store.exists,
        lambda: run_store.refresh("events/"),
        lambda: run_store.update(lambda it: it),
    ):
        with pytest.raises(StorageError, match="s3://bucket/runs/job-1: cannot"):
            ask()


# --- requests and the courier


def test_a_request_to_stop_reaches_the_attempt_it_was_made_of(run_store: S3RunStore) -> None:
    asked: list[int] = []
    polls = [
        StopRequest(run_store.is_asked_to_stop, number, lambda number=number: asked.append(number)) for number in (1, 2)
    ]  # type: ignore[misc]
    for it in polls:
        it.poll()
    run_store.request_stop(1)
    run_store.request_stop(2)
    for it in [*polls, *polls]:
        it.poll()
    assert asked == [2]


def test_a_periodic_task_reports_trouble_once_and_its_end_and_does_the_last_duty_until_it_succeeds() -> None:
    reported: list[str] = []
    fails = [False, True, True, False, True, True]
    rounds = threading.Event()

    def duty() -> None:
        if not fails:
            rounds.set()
        elif fails.pop(0):
            raise StorageError("no answer")

    last = iter([StorageError("no answer"), StorageError("no answer"), None])
    done: list[bool] = []

    def final() -> None:
        if (error := next(last)) is not None:
            raise error
        done.append(True)

    periodic = PeriodicTask([duty], reported.append, last=final, round_seconds=0.005).start()
    assert rounds.wait(240)
    with periodic.quiet():
        pass
    periodic.close(240)
    periodic.close(240)
    assert done == [True]
    assert [it.rpartition(" ")[2] for it in reported] == ["answer", "logs", "answer", "logs", "answer", "logs"]


# --- a folder answers the same questions


def test_a_folder_is_asked_to_stop_by_a_file_and_has_nothing_to_copy_or_upload(tmp_path: Path) -> None:
    run_store: RunStore = FolderRunStore(tmp_path)
    assert not run_store.is_asked_to_stop(1)
    run_store.request_stop(1)
    assert run_store.is_asked_to_stop(1)
    assert run_store.paths.stop_file.stat().st_mode & 0o077 == 0
    run_store.beat(1)
    run_store.keep(run_store.paths.job_file)
    assert [it.name for it in tmp_path.iterdir()] == ["stop"]
    assert run_store.copied("events/", lambda name: pytest.fail("fetched"), tmp_path / "copy") == run_store.paths
    assert run_store.uploader(run_store.root, run_store.is_original) is None
    assert run_store.heartbeat(1, lambda: None) is None
    assert (run_store.silence(), run_store.options, run_store.endpoint) == (None, None, None)
    assert run_store.has_originals(7)
    with pytest.raises(StorageError, match="the request to stop cannot be written"):
        run_store.below("gone").request_stop(1)


def test_a_run_in_S3_keeps_files_copies_and_shows_that_it_is_alive(run_store: S3RunStore, tmp_path: Path) -> None:
    run_store.paths.job_file.parent.mkdir(parents=True)
    for body in (b"first", b"second"):
        run_store.paths.job_file.write_bytes(body)
        run_store.keep(run_store.paths.job_file)
        assert run_store.store.get("job.json") == body
    assert run_store.silence() is None
    run_store.beat(1)
    silence = run_store.silence()
    assert silence is not None
    assert silence < 60
    events = tmp_path / "here" / "events"
    events.mkdir(parents=True)
    for name in ("attempt-1-rank0.jsonl", "attempt-1-rank1.jsonl"):
        (events / name).write_text("{}\n")
    run_store.uploader(tmp_path / "here", lambda name: True).upload_all()
    copy = run_store.copied("events/", lambda name: "rank1" in name, tmp_path / "copy")
    assert [it.name for it in copy.events.iterdir()] == ["attempt-1-rank1.jsonl"]
    assert not run_store.has_originals(1)
    assert not run_store.is_original("events/attempt-1-rank1.jsonl")
