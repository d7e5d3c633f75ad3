"""What lies in a store beside our own files, or in place of them, costs its own row and nothing else."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage import base, folder
from sm_llm.storage.hub.hub_fetch import fetch
from sm_llm.storage.publication.collect import collect_garbage
from sm_llm.storage.publication.find import find_newest, list_checkpoints
from sm_llm.storage.publication.keys import COMMITS, Slot, save_of_key, slot_of_commit
from sm_llm.storage.publication.manifest import CommitManifest, _checksum, decode
from sm_llm.storage.publication.pins import pin, pinned
from sm_llm.storage.publication.publish import upload_part
from sm_llm.storage.publication.retire import retire_damaged
from tests.fixtures.sampling import number

Hub = Any


def rewrite(bench: Any, step: int, **changes: Any) -> None:
    """Change fields of a commit, with a checksum that fits."""
    path = bench.root / COMMITS / f"step-{step:08d}.json"
    record = json.loads(path.read_bytes())
    record.pop("self_crc64nvme")
    record.update(changes)
    path.write_text(json.dumps({**record, "self_crc64nvme": _checksum(record)}))


def spoil(bench: Any, step: int, how: str) -> None:
    path = bench.root / COMMITS / f"step-{step:08d}.json"
    files = json.loads(path.read_bytes())["files"]
    if how == "too deep":
        path.write_text('{"version": 1, "meta": ' + "[" * 100_000 + "]" * 100_000 + "}")
    elif how == "too large":
        with path.open("r+b") as stream:
            stream.truncate(base.SMALL_BYTES + 1)
    elif how == "a path twice":
        rewrite(bench, step, files=[*files, files[0]])
    elif how == "a file below a file":
        rewrite(bench, step, files=[*files, {**files[0], "path": files[0]["path"] + "/x"}])
    elif how == "a path that climbs out":
        rewrite(bench, step, files=[{**files[0], "path": "../../../x"}, *files[1:]])
    elif how == "a version that is no integer":
        rewrite(bench, step, version=True)
    elif how == "a size that is no integer":
        rewrite(bench, step, files=[{**files[0], "size": str(files[0]["size"])}, *files[1:]])
    elif how == "a huge number":
        path.write_text('{"version": ' + "1" * 10_000 + "}")
    elif how == "a file that another one is while it is fetched":
        rewrite(bench, step, files=[*files, {**files[0], "path": f"{files[0]['path']}.sm_llm.part"}])
    elif how == "no files":
        rewrite(bench, step, files=[])
    elif how == "an impossible time":
        rewrite(bench, step, time=1e300)
    else:
        path.write_text('{"version": 1, "time": NaN}')


HOWS = [
    "too deep", "too large", "a path twice", "a file below a file", "a path that climbs out",
    "a version that is no integer", "a size that is no integer", "a huge number", "not a number",
    "an impossible time", "a file that another one is while it is fetched", "no files",
]  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
def test_a_commit_that_cannot_be_right_is_passed_over_by_every_verb(bench: Any, how: str) -> None:
    for step in (1, 2, 3):
        bench.publish(step)
    spoil(bench, 3, how)
    found = find_newest(bench.store, run_id=bench.run_id)
    assert found.commit is not None
    assert found.commit.step == 2
    assert [it.step for it in found.rejected] == [3]
    assert [(it.step, it.valid) for it in list_checkpoints(bench.store)] == [(1, True), (2, True), (3, False)]
    assert collect_garbage(bench.store, run_id=bench.run_id, keep_last=1).steps == (1,)
    assert retire_damaged(bench.store, {3}, run_id=bench.run_id, label="x") in ([], [3])


@pytest.mark.parametrize("name", ["data/x\ny", "data/\x1b[2J", "data/a\\b", "other", "data/nul"])
def test_s12_a_foreign_object_in_a_save_stops_no_collection(
    bench: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    saves = [bench.publish(step).commit.save for step in (1, 2)]
    foreign = bench.root / saves[0].slot.save_prefix(saves[0].save_id) / name
    foreign.write_text("foreign")
    (bench.root / "ckpt" / "step-x").mkdir()
    (bench.root / "ckpt" / "step-x" / "y").write_text("foreign")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            collected = collect_garbage(bench.store, run_id=bench.run_id, keep_last=1)
    assert [it.step for it in list_checkpoints(bench.store)] == [2]
    assert collected.refused == ""
    assert foreign.exists() == (name != "other")
    reported = [it.getMessage() for it in caplog.records]
    assert len(reported) == len(set(reported)) == (1 if name == "other" else 2)


@pytest.mark.parametrize("kind", ["a link to itself", "a link to nothing", "a pipe", "a folder", "a device"])
@pytest.mark.parametrize("name", [f"{COMMITS}step-00000003.json", f"{COMMITS}final.json", "ckpt/wanted/step-00000001"])
def test_A13_22_what_is_not_a_plain_file_stops_neither_find_nor_collection(bench: Any, name: str, kind: str) -> None:
    for step in (1, 2):
        bench.publish(step)
    path = bench.root / name
    path.parent.mkdir(exist_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to({"a link to itself": path, "a device": "/dev/zero"}.get(kind, bench.root / "nothing"))
    assert find_newest(bench.store, run_id=bench.run_id).commit.step == 2
    assert [it.step for it in list_checkpoints(bench.store)] == [1, 2]
    if not (name.endswith("final.json") and kind in ("a pipe", "a device")):  # errors, for something is there
        assert collect_garbage(bench.store, run_id=bench.run_id, keep_last=1).steps == (1,)


def test_s12_an_unknown_name_among_commits_is_reported_once(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench.publish(1)
    (bench.root / COMMITS / "notes\x1b[2J.txt").write_text("foreign")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert find_newest(bench.store, run_id=bench.run_id).commit is not None
    assert [it.getMessage() for it in caplog.records] == [
        f"{bench.root}: ignored {COMMITS + 'notes' + chr(27) + '[2J.txt'!r}: not a file of a run"
    ]


def test_s12_the_time_of_a_foreign_file_makes_no_save_old(bench: Any) -> None:
    bench.publish(1)
    young = bench.save(1)
    upload_part(bench.store, young, bench.sealed({"x": b"y"}), 0)
    foreign = bench.root / COMMITS / "notes.txt"
    foreign.write_text("foreign")
    os.utime(foreign, (4e9, 4e9))
    assert collect_garbage(bench.store, run_id=bench.run_id, keep_last=1).orphans == ()


class Changing:
    """A store whose commit is another one at every read."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, key: str) -> bytes | None:
        self.reads += 1
        body: bytes | None = self.inner.get(key)
        return body and body + b" " * self.reads + (b"x" if self.reads % 2 else b"y")


def test_a_commit_that_differs_at_each_read_is_not_valid(bench: Any) -> None:
    bench.publish(1)
    store = Changing(bench.store)
    with pytest.raises(CheckpointError, match="another one at each of 10 reads"):
        find_newest(store, run_id=bench.run_id)
    assert store.reads < 50


class Vanishing(Changing):
    """A store that lists commits and then answers that there are none."""

    def get(self, key: str) -> bytes | None:
        self.reads += 1
        return None


def test_I7_commits_that_are_listed_and_then_all_vanish_are_an_error(bench: Any) -> None:
    bench.publish(1)
    bench.publish(2)
    with pytest.raises(StorageError, match="lists 2 commits"):
        find_newest(Vanishing(bench.store), run_id=bench.run_id)


def test_a_checkpoint_that_was_collected_since_the_first_listing_is_looked_for_again(bench: Any) -> None:
    bench.publish(1)

    class Outdated(Changing):
        def get(self, key: str) -> bytes | None:
            if not self.reads:
                self.reads += 1
                bench.publish(2)
                collect_garbage(bench.store, run_id=bench.run_id, keep_last=1)
            found: bytes | None = self.inner.get(key)
            return found

    found = find_newest(Outdated(bench.store), run_id=bench.run_id)
    assert found.commit is not None
    assert found.commit.step == 2


@pytest.mark.parametrize(
    "name",
    [
        "step-abc",
        "step-00000001.bak",
        "step-",
        ".step-00000001.swp",
        "step-00000001~",
        "step-\u0661",
        "step-" + "9" * 40,
    ],
)
def test_s12_a_foreign_pin_stops_no_collection(bench: Any, name: str) -> None:
    for step in (1, 2, 3):
        bench.publish(step)
    pin(bench.store, 1)
    (bench.root / "ckpt" / "wanted" / name).write_text("x")
    assert pinned(bench.store, time.time()) == {1}
    assert collect_garbage(bench.store, run_id=bench.run_id, keep_last=1).steps == (2,)


@pytest.mark.parametrize("name", ["step-\u0661.json", "step-\u00b9.json", f"step-{'9' * 40}.json", "step--1.json"])
def test_s12_step_numbers_are_ascii_digits(bench: Any, name: str) -> None:
    bench.publish(1)
    (bench.root / COMMITS / name).write_text("{}")
    assert slot_of_commit(f"{COMMITS}{name}") is None
    assert save_of_key(f"ckpt/{name.removesuffix('.json')}/{'0a' * 16}/x") is None
    assert [it.step for it in list_checkpoints(bench.store)] == [1]


@settings(max_examples=number(200, whole=2000))
@given(st.binary(max_size=200) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(str))
def test_anything_is_a_commit_or_a_reason(body: Any) -> None:
    raw = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    with pytest.raises(ValueError):
        decode(raw, CommitManifest)


def test_an_object_too_large_for_memory_is_refused_before_it_is_read(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "SMALL_BYTES", 10)
    (bench.root / "x").write_bytes(b"x" * 11)
    with pytest.raises(base.TooLargeError, match="more than 10 bytes"):
        bench.store.get("x")


def test_s12_slots_are_equal_only_by_number() -> None:
    assert slot_of_commit(f"{COMMITS}step-1.json") == slot_of_commit(f"{COMMITS}step-00000001.json") == Slot(1)


PIN = ".fetch/source.json"


@pytest.mark.parametrize("paths", [["config.json"], ["config.json/x"], ["a", "a"], ["a/b", "a"]])
def test_2_a_pin_that_names_a_file_twice_is_refused(hub: Hub, tmp_path: Any, paths: list[str]) -> None:
    hub.add("org/name", {"config.json": b"{}"})
    fetch("hf://org/name", tmp_path)
    record = json.loads((tmp_path / PIN).read_text())
    record["files"] += [{"path": it, "size": 1, "checksum": "git-sha1:" + "0" * 40} for it in paths]
    (tmp_path / PIN).write_text(json.dumps(record))
    with pytest.raises(StorageError, match="cannot lie in one folder"):
        fetch("hf://org/name", tmp_path)


@pytest.mark.parametrize("version", [True, "1", 1.0, None])
def test_4_the_version_of_a_pin_is_an_integer(hub: Hub, tmp_path: Any, version: Any) -> None:
    hub.add("org/name", {"config.json": b"{}"})
    fetch("hf://org/name", tmp_path)
    record = json.loads((tmp_path / PIN).read_text())
    (tmp_path / PIN).write_text(json.dumps({**record, "version": version}))
    with pytest.raises(StorageError, match="cannot be used"):
        fetch("hf://org/name", tmp_path)


def test_s03_a_repository_cannot_bring_its_own_pin(hub: Hub, tmp_path: Any) -> None:
    hub.add("org/name", {"config.json": b"{}", PIN: b"{}"})
    with pytest.raises(StorageError, match=r"\.fetch is a name of our own"):
        fetch("hf://org/name", tmp_path / "x")
    assert not (tmp_path / "x" / "config.json").exists()


@pytest.mark.parametrize("path", ["../outside.txt", "/abs", "a//b", "a\\..\\b", ".FETCH/source.json", "a\n\x1b]0;t"])
def test_s03_a_pin_is_checked_like_the_hub_itself(hub: Hub, tmp_path: Any, path: str) -> None:
    hub.add("org/name", {"config.json": b"{}"})
    location = tmp_path / "a" / "dest"
    fetch("hf://org/name", location)
    record = json.loads((location / PIN).read_text())
    record["files"].append({"path": path, "size": 1, "checksum": "git-sha1:" + "0" * 40})
    (location / PIN).write_text(json.dumps(record))
    with pytest.raises(StorageError, match="cannot be used"):
        fetch("hf://org/name", location)
    assert not (tmp_path / "a" / "outside.txt").exists()
