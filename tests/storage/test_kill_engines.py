"""A SIGKILL at every request of a save in many parts and of a restore, with every engine, and what comes after it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.storage.publication.publish import collect_garbage, fetch, find_newest, list_checkpoints, verify
from tests.fixtures.children import Location, bring, child, save
from tests.fixtures.sampling import one_of_each

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
pytestmark = pytest.mark.integration
ENGINES = ("crt", "boto3", "s5cmd")
PARTS = {"crt": 17 * MIB, "boto3": 17 * MIB, "s5cmd": 11 * MIB}
"""Bytes that make two or three parts."""


def killed_at(number: int, action: str, proxy: Any, rule: Any, work: Any, *arguments: Any) -> bool:
    """Run ``work`` in a child that is killed with all it started at request ``number``; whether it got there."""
    proxy.set(rule(".", action, first=number))
    with child(work, *arguments) as process:
        proxy.victim = process.pid
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return bool(process.exitcode)


def usable_steps(bench: Any) -> list[int]:
    """Steps that can be restored; one that cannot must not exist at all (I1)."""
    infos = list_checkpoints(bench.store, run_id=bench.run_id)
    assert [it for it in infos if not it.valid] == []
    return [it.step for it in infos]


def open_uploads(bench: Any) -> int:
    return len(bench.store.client.list_multipart_uploads(Bucket=bench.bucket).get("Uploads", ()))


@pytest.fixture
def location(s3_bench: Any, fault_proxy: Any) -> Location:
    """The run of ``s3_bench``, reached through the proxy."""
    return Location(s3_bench.bucket, s3_bench.root.as_posix(), fault_proxy.endpoint)


@pytest.mark.parametrize(
    ("engine", "action"),
    [("crt", "kill"), ("crt", "kill-after"), ("boto3", "kill-after"), ("s5cmd", "kill")],
)
def test_I1_I2_I3_a_save_in_many_parts_killed_at_any_request(
    s3_bench: Any, location: Location, fault_proxy: Any, rule: Any, engine: str, action: str
) -> None:
    sealed = s3_bench.sealed({"large.bin": os.urandom(PARTS[engine]), "sub/small.bin": b"small"})
    s3_bench.publish(1)
    number, left_open, committed = 0, 0, []
    while killed_at(number, action, fault_proxy, rule, save, location, s3_bench.run_id, number + 2, sealed, engine):
        step = number + 2
        steps = usable_steps(s3_bench)
        assert steps in ([step - 1], [step - 1, step])
        committed.append(step in steps)
        # The job that comes after: it saves the same step, unless the killed one has (I3), then cleans up (I5).
        assert s3_bench.publish(step).won == (step not in steps)
        assert verify(s3_bench.store, find_newest(s3_bench.store).commit, deep=True) == []
        left_open += open_uploads(s3_bench)
        collect_garbage(s3_bench.store, run_id=s3_bench.run_id, keep_last=1, clock=lambda: time.time() + 7200)
        assert usable_steps(s3_bench) == [step]
        assert len({it.key.split("/")[2] for it in s3_bench.store.list("ckpt/step-")}) == 1, "only garbage has gone"
        assert open_uploads(s3_bench) == 0
        number += 1
    assert number >= 10, fault_proxy.log
    assert any("partNumber=2" in line for line in fault_proxy.log)
    assert left_open > 1, "a kill leaves parts that nobody sees, and the collection finds them"
    assert committed == sorted(committed), "there is one instant from which on the commit exists"


@pytest.mark.parametrize("engine", ["ranges", *ENGINES])
def test_I9_a_restore_killed_at_any_request_and_begun_again(
    s3_bench: Any, location: Location, fault_proxy: Any, rule: Any, tmp_path: Path, engine: str
) -> None:
    files = {"large.bin": os.urandom(PARTS.get(engine, 3 * MIB)), "sub/small.bin": b"small"}
    commit = s3_bench.publish(3, files).commit
    assert not killed_at(10**6, "kill", fault_proxy, rule, bring, location, tmp_path / "whole", engine, MIB)
    requests = list(fault_proxy.log)
    assert len(requests) >= 5
    for at in one_of_each(requests):
        target = tmp_path / str(at)
        assert killed_at(at, "kill", fault_proxy, rule, bring, location, target, engine, MIB)
        assert find_newest(s3_bench.store).commit == commit
        for name, body in files.items():
            assert not (target / name).exists() or (target / name).read_bytes() == body
        fetch(s3_bench.store, commit, target)
        assert tree(target) == files, "whole, and nothing left beside it"


def tree(folder: Path) -> dict[str, bytes]:
    return {it.relative_to(folder).as_posix(): it.read_bytes() for it in folder.rglob("*") if it.is_file()}
