"""The invariants of publication in S3: a kill at every request leaves the old state or the new, never a third."""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.engines.ranges import RangesTransfer
from sm_llm.storage.publication.publish import (
    collect_garbage,
    fetch,
    find_newest,
    list_checkpoints,
    publish,
    restore,
    verify,
)
from tests.fixtures.sampling import number, one_of_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

MODES = ("before", "after")


@dataclass
class Guillotine:
    """Kills at request number ``at`` of a store's client: before it is sent, or after the server has answered."""

    killed: type[BaseException]
    at: int = -1
    mode: str = "before"
    requests: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def on(self, store: Any) -> Iterator[Any]:
        events = store.client.meta.events
        hooks = {"before-send.s3": self._before, "response-received.s3": self._after}
        for event, hook in hooks.items():
            events.register_first(event, hook)
        try:
            yield store
        finally:
            for event, hook in hooks.items():
                events.unregister(event, hook)

    def _before(self, request: Any, **_: Any) -> None:
        self.requests.append(f"{request.method} {request.url.partition('?')[0].rpartition('/ckpt/')[2]}")
        if self.mode == "before" and len(self.requests) - 1 == self.at:
            raise self.killed

    def _after(self, **_: Any) -> None:
        if self.mode == "after" and len(self.requests) - 1 == self.at:
            raise self.killed


@pytest.fixture
def guillotine(killed: Any) -> Callable[..., Guillotine]:
    return lambda at=-1, mode="before": Guillotine(killed, at, mode)


def usable_steps(bench: Any) -> list[int]:
    """Steps that can be restored; one that cannot must not exist at all (I1)."""
    infos = list_checkpoints(bench.store, run_id=bench.run_id)
    assert [it for it in infos if not it.valid] == []
    return [it.step for it in infos]


def leave_parts(store: Any, key: str) -> None:
    """What a writer that was killed in an upload leaves."""
    upload = store.client.create_multipart_upload(**store.at(key))["UploadId"]
    store.client.upload_part(**store.at(key), UploadId=upload, PartNumber=1, Body=b"part")


@pytest.mark.parametrize("mode", MODES)
def test_I1_I2_a_save_killed_at_any_request(s3_bench: Any, guillotine: Any, killed: Any, mode: str) -> None:
    s3_bench.publish(1)
    probe = guillotine()
    with probe.on(s3_bench.store) as store:
        s3_bench.publish(2, store=store)
    assert len(probe.requests) >= 8
    known = [1, 2]
    for at, request in enumerate(probe.requests):
        step = 10 + at
        with pytest.raises(killed), guillotine(at, mode).on(s3_bench.store) as store:
            s3_bench.publish(step, store=store)
        after = usable_steps(s3_bench)
        assert after in (known, [*known, step])
        assert (step in after) == (mode == "after" and request.startswith("PUT commits/"))
        known = after
    # The job that comes after is not hindered by what is left: it can save the first step that was killed.
    assert s3_bench.publish(10).won
    assert verify(s3_bench.store, find_newest(s3_bench.store).commit, deep=True) == []


@pytest.mark.parametrize("mode", MODES)
def test_I5_a_collection_killed_at_any_request(s3_bench: Any, guillotine: Any, killed: Any, mode: str) -> None:
    def collect(store: Any) -> None:
        collect_garbage(store, run_id=s3_bench.run_id, keep_last=2, clock=lambda: time.time() + 7200)

    def crowd(step: int) -> None:
        s3_bench.publish(step)
        leave_parts(s3_bench.store, f"ckpt/step-{step:08d}/left/data/x")

    s3_bench.publish(1)
    s3_bench.publish(2)
    crowd(3)
    probe = guillotine()
    with probe.on(s3_bench.store) as store:
        collect(store)
    assert 10 < len(probe.requests) < 60
    for step, at in enumerate(one_of_each(probe.requests), 4):
        crowd(step)
        with pytest.raises(killed), guillotine(at, mode).on(s3_bench.store) as store:
            collect(store)
        left = usable_steps(s3_bench)
        assert left[-2:] == [step - 1, step]
        collect(s3_bench.store)  # the next one finishes the work, and the next kill finds the same as this one
        assert usable_steps(s3_bench) == [step - 1, step]
    assert not s3_bench.store.client.list_multipart_uploads(Bucket=s3_bench.bucket).get("Uploads")
    assert len({it.key.split("/")[2] for it in s3_bench.store.list("ckpt/step-")}) == 2


def test_I9_a_restore_killed_at_any_request_and_begun_again(
    s3_bench: Any, guillotine: Any, killed: Any, contents: Any, tmp_path: Path
) -> None:
    commit = s3_bench.publish(3).commit
    probe = guillotine()
    with probe.on(s3_bench.store) as store:
        fetch(store, commit, tmp_path / "probe", transfer=RangesTransfer(workers=1))
    for at in range(len(probe.requests)):
        for mode in MODES:
            with pytest.raises(killed), guillotine(at, mode).on(s3_bench.store) as store:
                fetch(store, commit, tmp_path / f"{mode}-{at}", transfer=RangesTransfer(workers=1))
            for name, body in contents(3).items():
                there = tmp_path / f"{mode}-{at}" / name
                assert not there.exists() or there.read_bytes() == body
            fetch(s3_bench.store, commit, tmp_path / f"{mode}-{at}")
            assert {it: (tmp_path / f"{mode}-{at}" / it).read_bytes() for it in contents(3)} == contents(3)


def test_I4_a_lost_answer_at_any_request_of_a_save_has_one_outcome(s3_bench: Any, fault_proxy: Any, rule: Any) -> None:
    s3_bench.endpoint, behind, s3_bench.attempts = fault_proxy.endpoint, s3_bench.endpoint, 1
    fault_proxy.set()
    s3_bench.publish(1)
    requests = list(fault_proxy.log)
    assert len(requests) >= 8
    for at, request in enumerate(requests):
        step = 10 + at
        fault_proxy.set(rule(".", "lost", first=at))
        try:
            outcome = s3_bench.publish(step).won
        except StorageError:
            outcome = False
        s3_bench.endpoint = behind
        # A listing or a HEAD that is not answered ends the save; the commit and the parts are settled by reading.
        assert (step in usable_steps(s3_bench)) == outcome
        if "If-None" in request or "commits/step" in request:
            assert outcome
        s3_bench.endpoint = fault_proxy.endpoint


def test_I4_the_sdk_repeats_a_deletion_whose_answer_was_lost(s3_bench: Any, fault_proxy: Any, rule: Any) -> None:
    for step in (1, 2, 3):
        s3_bench.publish(step)
    s3_bench.endpoint = fault_proxy.endpoint
    fault_proxy.set(rule("POST .*delete", "lost", count=2))
    gone = collect_garbage(s3_bench.store, run_id=s3_bench.run_id, keep_last=1)
    assert (gone.steps, gone.refused) == ((1, 2), "")
    assert usable_steps(s3_bench) == [3]
    assert len({it.key.split("/")[2] for it in s3_bench.store.list("ckpt/step-")}) == 1


def test_I4_I5_a_lost_answer_at_any_request_of_a_collection_never_costs_a_kept_checkpoint(
    s3_bench: Any, fault_proxy: Any, rule: Any
) -> None:
    def collect(**rules: Any) -> None:
        s3_bench.endpoint, s3_bench.attempts = fault_proxy.endpoint, 1
        fault_proxy.set(rule(".", "lost", **rules))
        with contextlib.suppress(StorageError):
            collect_garbage(s3_bench.store, run_id=s3_bench.run_id, keep_last=2)
        s3_bench.endpoint, s3_bench.attempts = behind, 4

    behind = s3_bench.endpoint
    for step in (1, 2, 3):
        s3_bench.publish(step)
    collect(count=0)
    assert len(fault_proxy.log) > 10
    for step, at in enumerate(one_of_each(fault_proxy.log), 4):
        s3_bench.publish(step)
        collect(first=at)
        assert fault_proxy.rules[0].seen > at
        assert usable_steps(s3_bench)[-2:] == [step - 1, step]
        collect_garbage(s3_bench.store, run_id=s3_bench.run_id, keep_last=2)
        assert usable_steps(s3_bench) == [step - 1, step]


def test_I4_the_sdk_repeats_a_commit_whose_answer_was_lost_and_the_nonce_settles_it(
    s3_bench: Any, fault_proxy: Any, rule: Any
) -> None:
    from sm_llm.storage.s3.s3_options import S3Options
    from sm_llm.storage.s3_store import S3Store

    fault_proxy.set(rule("PUT .*/commits/", "lost"))
    store = S3Store(s3_bench.bucket, "runs/tiny", S3Options(endpoint_url=fault_proxy.endpoint))
    assert s3_bench.publish(5, store=store).won
    assert fault_proxy.count("PUT .*/commits/") == 2
    assert usable_steps(s3_bench) == [5]


def test_I3_I5_two_jobs_of_one_run_that_save_and_collect_at_once_lose_nothing(s3_bench: Any, together: Any) -> None:
    """Both believe they are the run: a restarted job beside a zombie. Whoever loses a step knows it."""
    benches = [s3_bench, type(s3_bench)(s3_bench.root, s3_bench.scratch, bucket=s3_bench.bucket)]
    benches[1].endpoint = s3_bench.endpoint

    steps = number(3, whole=6)

    def work(rank: int, gather: Any) -> list[bool]:
        won = []
        for step in range(1, steps + 1):
            gather(None)  # both begin each step together
            won.append(benches[rank].publish(step).won)
            collect_garbage(benches[rank].store, run_id=s3_bench.run_id, keep_last=2)
            assert find_newest(benches[rank].store, run_id=s3_bench.run_id).commit.step >= step
        return won

    mine, others = together(2, work)
    assert [sorted(pair) for pair in zip(mine, others, strict=True)] == [[False, True]] * steps
    assert usable_steps(s3_bench) == [steps - 1, steps]
    assert verify(s3_bench.store, find_newest(s3_bench.store).commit, deep=True) == []
    assert len({it.key.split("/")[2] for it in s3_bench.store.list("ckpt/step-")}) == 2, "losers cleaned up"


def test_I3_of_racing_jobs_one_wins_and_the_loser_knows(s3_bench: Any, together: Any) -> None:
    outcomes = together(3, lambda rank, gather: s3_bench.publish(7))
    assert sorted(it.won for it in outcomes) == [False, False, True]
    winner = next(it for it in outcomes if it.won)
    assert {it.commit.save_id for it in outcomes} == {winner.commit.save_id}
    assert usable_steps(s3_bench) == [7]
    assert len({it.key.split("/")[2] for it in s3_bench.store.list("ckpt/step-")}) == 1, "the losers cleaned up"


def test_I6_all_nodes_restore_the_same_and_fall_back_together(s3_bench: Any, together: Any, tmp_path: Path) -> None:
    s3_bench.publish(1)
    commit = s3_bench.publish(2).commit
    damaged = s3_bench.store.at(f"{commit.save.data_prefix}b.bin")
    size = s3_bench.store.require(f"{commit.save.data_prefix}b.bin").size
    s3_bench.store.client.put_object(**damaged, Body=b"x" * size)

    def bring(rank: int, gather: Any) -> Any:
        folder = tmp_path / str(rank)
        return restore(s3_bench.store, folder, run_id=s3_bench.run_id, leader=rank == 0, fetches=True, gather=gather)

    outcomes = together(2, bring)
    assert [it.commit.step for it in outcomes] == [1, 1], outcomes
    assert len({it.commit.save_id for it in outcomes}) == 1
    assert all("other content than was published" in str(it.rejected[0]) for it in outcomes)


@pytest.mark.parametrize("seconds", [1, 60])
def test_I2_I7_a_storm_of_503_costs_time_and_never_a_checkpoint(
    s3_bench: Any, fault_proxy: Any, rule: Any, retry_clock: Any, seconds: int
) -> None:
    """Of so many seconds of the pauses between tries."""
    from sm_llm.storage.s3.s3_options import S3Options
    from sm_llm.storage.s3_store import S3Store

    s3_bench.publish(1)
    store = S3Store(s3_bench.bucket, "runs/tiny", S3Options(endpoint_url=fault_proxy.endpoint))
    fault_proxy.set(rule(".", "503", count=10**9))
    retry_clock.after(seconds, fault_proxy.set)
    try:
        won = s3_bench.publish(2, store=store).won
    except StorageError:
        won = False
    with contextlib.suppress(StorageError):
        assert find_newest(store, run_id=s3_bench.run_id).commit.step == 1 + won
    retry_clock.sleep(seconds)  # by now the storm is over
    assert s3_bench.publish(3, store=store).won
    assert usable_steps(s3_bench) == ([1, 2, 3] if won else [1, 3])


@pytest.mark.parametrize("action", ["503", "reset"])
def test_I7_a_storm_of_errors_is_never_a_start_from_scratch(
    s3_bench: Any, fault_proxy: Any, rule: Any, action: str
) -> None:
    s3_bench.publish(1)
    s3_bench.endpoint, s3_bench.attempts = fault_proxy.endpoint, 1
    fault_proxy.set()
    assert find_newest(s3_bench.store, run_id=s3_bench.run_id).commit is not None
    for at in range(len(fault_proxy.log)):
        fault_proxy.set(rule(".", action, first=at))
        with pytest.raises(StorageError):
            find_newest(s3_bench.store, run_id=s3_bench.run_id)


def test_a_zombie_that_uploads_after_its_save_was_dropped_changes_nothing(s3_bench: Any) -> None:
    from sm_llm.storage.publication.publish import discard, upload_part, write_part

    save = s3_bench.save(4)
    discard(s3_bench.store, save)
    write_part(s3_bench.store, upload_part(s3_bench.store, save, s3_bench.sealed({"z.bin": b"late"}), 0))
    assert find_newest(s3_bench.store).commit is None
    s3_bench.publish(4)
    s3_bench.publish(5)
    assert usable_steps(s3_bench) == [4, 5]
    gone = collect_garbage(s3_bench.store, run_id=s3_bench.run_id, keep_last=2, clock=lambda: time.time() + 7200)
    assert gone.orphans == (save.save_id,)


def test_a_node_whose_clock_is_an_hour_ahead_collects_nothing_that_is_young(
    s3_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm_llm.storage.publication.publish import upload_part

    save = s3_bench.save(1)
    upload_part(s3_bench.store, save, s3_bench.sealed({"x.bin": b"in flight on another node"}), 0)
    s3_bench.publish(2)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    assert collect_garbage(s3_bench.store, run_id=s3_bench.run_id, keep_last=1).orphans == ()


def test_CK07_a_commit_waits_for_every_part(s3_bench: Any) -> None:
    from sm_llm.storage.publication.publish import commit, new_save, upload_part, write_part

    save = new_save(s3_bench.run_id, 3, world_size=2, node_count=2)
    for node in (0, 1):
        sealed = s3_bench.sealed({f"shard-{node}.bin": b"x" * 100})
        with pytest.raises(StorageError, match="is missing"):
            commit(s3_bench.store, save)
        write_part(s3_bench.store, upload_part(s3_bench.store, save, sealed, node))
    assert commit(s3_bench.store, save).won


def test_CK02_each_of_eight_nodes_uploads_its_own_and_nothing_twice(
    s3_bench: Any, together: Any, fault_proxy: Any
) -> None:
    from sm_llm.storage.publication.publish import new_save

    s3_bench.endpoint = fault_proxy.endpoint
    fault_proxy.set()
    save = new_save(s3_bench.run_id, 1, world_size=8, node_count=8)
    sealed = [s3_bench.sealed({f"shard-{rank}.bin": b"%d" % rank * 50}) for rank in range(8)]

    def work(rank: int, gather: Any) -> Any:
        return publish(s3_bench.store, save, sealed[rank], node=rank, leader=rank == 0, gather=gather)

    outcomes = together(8, work)
    assert all(it.won for it in outcomes), outcomes
    puts = [line for line in fault_proxy.log if line.startswith("PUT") and "/data/" in line]
    assert len(puts) == len(set(puts)) == 8


def test_no_history_in_s3_loses_or_invents_a_checkpoint(
    s3_bench: Any, faulty: Any, killed: Any, contents: Any, s3_server: Any
) -> None:
    """The same random histories as on folders, against the same model."""
    from hypothesis import HealthCheck, settings
    from hypothesis.stateful import run_state_machine_as_test

    location = spec_from_file_location("history", Path(__file__).with_name("test_history.py"))
    assert location is not None
    assert location.loader is not None
    history = module_from_spec(location)
    location.loader.exec_module(history)

    def bench(root: Any, scratch: Any) -> Any:
        prefix = Path("histories", uuid.uuid4().hex)
        return type(s3_bench)(prefix, scratch, bucket=s3_bench.bucket, endpoint=s3_server.endpoint)

    run_state_machine_as_test(
        history.machine(bench, faulty, killed, contents),
        settings=settings(
            max_examples=number(6, whole=20),
            stateful_step_count=10,
            suppress_health_check=list(HealthCheck),
        ),
    )
