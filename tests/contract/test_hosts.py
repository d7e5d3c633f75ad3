"""Which host leads, and names that are not there yet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from sm_llm.contract.hosts import Hosts, await_host
from sm_llm.errors import RunFailed

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, current: str, hosts: list[str]) -> Path:
    path.write_text(json.dumps({"current_host": current, "hosts": hosts}))
    return path


@pytest.mark.parametrize(
    ("hosts", "leader"),
    [
        (["algo-2", "algo-1"], "algo-1"),
        (["algo-10", "algo-9"], "algo-9"),
        (["algo-5", "algo-3", "algo-4"], "algo-3"),
        (["algo-1"], "algo-1"),
    ],
)
def test_DL06_every_node_finds_the_same_leader(tmp_path: Path, hosts: list[str], leader: str) -> None:
    for current in hosts:
        for order in (hosts, hosts[::-1]):
            found = Hosts.read(write(tmp_path / "resourceconfig.json", current, order))
            assert found is not None
            assert (found.leader, found.current) == (leader, current)


def test_a_file_that_names_no_hosts_is_refused(tmp_path: Path) -> None:
    assert Hosts.read(tmp_path / "none.json") is None
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(RunFailed, match="does not name"):
        Hosts.read(tmp_path / "bad.json")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_DL07_a_name_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() -> None:
    clock = Clock()

    def resolve(name: str) -> None:
        if clock.now < 30:
            raise OSError("Name or service not known")

    await_host("algo-2", 60, resolve=resolve, clock=clock, sleep=clock.sleep)
    assert 30 <= clock.now < 35
    clock.now = 0
    with pytest.raises(RunFailed, match=r"'algo-2' has no address after 20 s \(Name or service not known\)"):
        await_host("algo-2", 20, resolve=resolve, clock=clock, sleep=clock.sleep)
    assert clock.now < 25
