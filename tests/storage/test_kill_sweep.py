"""A kill at every operation of a save, a collection or a restore leaves the old state or the new, never a third."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.publication.keys import Slot
from sm_llm.storage.publication.publish import collect_garbage, fetch, find_newest, list_checkpoints, verify
from tests.fixtures.sampling import one_of_each

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration

MODES = ("before", "torn", "after")
CHANGES = ("os.link", "os.remove", "os.rename", "os.mkdir", "os.rmdir")


def usable_steps(bench: Any) -> list[int]:
    """Steps that can be restored, each checked with all its data; one that cannot must not exist at all."""
    infos = list_checkpoints(bench.store, run_id=bench.run_id)
    assert [it for it in infos if not it.valid] == []
    for step in (it.step for it in infos):
        commit = find_newest(bench.store, allow_step=lambda it, step=step: it == step).commit
        assert verify(bench.store, commit, deep=True) == []
    return [it.step for it in infos]


@pytest.mark.parametrize("mode", MODES)
def test_a_save_killed_at_any_operation(bench: Any, faulty: Any, killed: Any, mode: str) -> None:
    bench.publish(1)
    probe = faulty(bench.store)
    bench.publish(2, store=probe)
    assert len(probe.calls) > 5
    for at in range(len(probe.calls)):
        step = 10 + at
        before = usable_steps(bench)
        with pytest.raises(killed):
            bench.publish(step, store=faulty(bench.store, at, mode))
        after = usable_steps(bench)
        assert after in (before, [*before, step])
        assert (step in after) == (mode != "before" and probe.calls[at].startswith("put ckpt/commits/"))
        # The job that comes after is not hindered by what is left: it can save the same step.
        assert bench.publish(step).won == (step not in after)
        assert usable_steps(bench)[-1] == step


@pytest.fixture
def crowded(bench: Any, tmp_path: Path) -> Callable[[], Any]:
    """Gives, each time anew, a run's folder with four checkpoints and a save that nobody committed."""
    for step in (1, 2, 3, 4):
        bench.publish(step)
    (bench.root / Slot(1).commit_key).unlink()
    shutil.copytree(bench.root, tmp_path / "crowded")

    def again() -> Any:
        shutil.rmtree(bench.root)
        shutil.copytree(tmp_path / "crowded", bench.root)
        return bench

    return again


def collect(bench: Any, store: Any = None) -> None:
    collect_garbage(store or bench.store, run_id=bench.run_id, keep_last=2, clock=lambda: 1e10)


def check_collected(bench: Any) -> None:
    """After a killed collection the kept ones are there, and the next one finishes the work."""
    left = usable_steps(bench)
    assert left[-2:] == [3, 4]
    assert set(left) <= {2, 3, 4}
    collect(bench)
    assert usable_steps(bench) == [3, 4]
    assert len({it.key.split("/")[2] for it in bench.store.list("ckpt/step-")}) == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_collection_killed_at_any_operation(crowded: Callable[[], Any], faulty: Any, killed: Any, mode: str) -> None:
    probe = faulty(crowded().store)
    collect(crowded(), probe)
    assert len(probe.calls) > 20
    for at in one_of_each(probe.calls):
        bench = crowded()
        with pytest.raises(killed):
            collect(bench, faulty(bench.store, at, mode))
        check_collected(bench)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_fetch_killed_at_any_operation(
    bench: Any, faulty: Any, killed: Any, contents: Any, tmp_path: Path, mode: str
) -> None:
    commit = bench.publish(3).commit
    for at in range(2):
        with pytest.raises(killed):
            fetch(faulty(bench.store, at, mode), commit, tmp_path / "out")
        for name, body in contents(3).items():
            assert not (tmp_path / "out" / name).exists() or (tmp_path / "out" / name).read_bytes() == body
    fetch(bench.store, commit, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in contents(3)} == contents(3)


def killed_at(number: int, action: Callable[[], Any]) -> bool:
    """Run ``action`` in a forked child that kills itself at its change ``number`` of the disk; whether it got there."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        try:
            sys.addaudithook(count)
            action()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
threads_are_idle = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")


@needs_fork
@threads_are_idle
def test_a_real_sigkill_at_every_change_of_the_disk_in_a_save(bench: Any) -> None:
    bench.publish(1)
    committed, number = [], 0
    while killed_at(number, lambda: bench.publish(2)):
        steps = usable_steps(bench)
        assert steps in ([1], [1, 2])
        committed.append(2 in steps)
        (bench.root / Slot(2).commit_key).unlink(missing_ok=True)
        number += 1
    assert number > 15
    assert committed == sorted(committed), "there is one instant from which on the commit exists"
    assert usable_steps(bench) == [1, 2]


@needs_fork
@threads_are_idle
def test_a_real_sigkill_at_every_change_of_the_disk_in_a_collection(crowded: Callable[[], Any]) -> None:
    number = 0
    bench = crowded()
    while killed_at(number, lambda: collect(bench)):
        check_collected(bench)
        crowded()
        number += 1
    assert number > 10
    assert usable_steps(bench) == [3, 4]


def test_a_lost_answer_in_a_collection_never_costs_a_kept_checkpoint(crowded: Callable[[], Any], faulty: Any) -> None:
    probe = faulty(crowded().store)
    collect(crowded(), probe)
    for at in one_of_each(probe.calls):
        bench = crowded()
        with pytest.raises(StorageError, match="the answer was lost"):
            collect(bench, faulty(bench.store, at, "lost"))
        check_collected(bench)
