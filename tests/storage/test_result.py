"""The stable address of a result, in a folder and in S3: an error before the commit, the whole result after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.publication.publish import find_final, new_save, publish, seal
from sm_llm.storage.publication.result import (
    POINTER,
    NotPublished,
    leave_pointers,
    pointed,
    remove_pointers,
    result_address,
)
from sm_llm.storage.syncing.sync import sync
from sm_llm.storage.uri import open_store

if TYPE_CHECKING:
    from tests.fixtures.s3_server import S3Server


@pytest.fixture(params=["folder", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The address of a run, below a folder of the name that results have, and how its store is reached."""
    if request.param == "folder":
        return str(tmp_path / "result" / "run"), {}
    server: S3Server = request.getfixturevalue("s3_server")
    return f"s3://{request.getfixturevalue('bucket')}/result/run", {"endpoint_url": server.endpoint}


def begin(location: tuple[str, dict[str, Any]]) -> Any:
    if not location[0].startswith("s3://"):
        Path(location[0]).mkdir(parents=True)
    store = open_store(*location)
    store.put_if_absent("run.json", b"{}")
    return store


def put(store: Any, tmp_path: Path, text: str = "weights") -> None:
    working = tmp_path / "working"
    (working / "train").mkdir(parents=True)
    (working / "train" / "x.bin").write_text(text)
    save = new_save("run", None, world_size=1, node_count=1)
    publish(store, save, seal(working, tmp_path / "sealed"), node=0, leader=True, gather=lambda it: [it])


def test_C12_the_stable_address_is_an_error_until_the_commit_and_then_the_result(
    location: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    uri, options = location
    store = begin(location)
    with pytest.raises(NotPublished, match="has not published a result"):
        sync(f"{uri}/result", tmp_path / "early", options=options)
    assert not (tmp_path / "early").exists()
    put(store, tmp_path)
    leave_pointers(store, find_final(store))  # type: ignore[arg-type]
    for address, inside in ((f"{uri}/result", "train/x.bin"), (f"{uri}/result/train/", "x.bin")):
        target = tmp_path / inside.replace("/", "-")
        sync(address, target, options=options)
        assert [it.relative_to(target).as_posix() for it in target.rglob("*") if it.is_file()] == [inside]
    commit = find_final(store)
    assert commit is not None
    assert result_address(f"{uri}/result", options) == f"{uri}/{commit.save.data_prefix.rstrip('/')}"


def test_C12_a_folder_that_happens_to_have_the_name_is_itself(tmp_path: Path) -> None:
    (tmp_path / "result" / "a").mkdir(parents=True)
    (tmp_path / "result" / "a" / "x").write_text("x")
    assert result_address(str(tmp_path / "result" / "a")) == str(tmp_path / "result" / "a")
    sync(tmp_path / "result", tmp_path / "copy")
    assert (tmp_path / "copy" / "a" / "x").read_text() == "x"


def test_C12_in_s3_the_prefix_exists_after_the_commit_and_points_to_the_result(
    bucket: str, s3_server: S3Server, tmp_path: Path
) -> None:
    location = (f"s3://{bucket}/run", {"endpoint_url": s3_server.endpoint})
    store = begin(location)
    assert not list(store.list("result/"))
    put(store, tmp_path)
    for _ in range(2):  # a later attempt makes sure of it
        leave_pointers(store, find_final(store))  # type: ignore[arg-type]
    assert [it.key for it in store.list("result/")] == [f"result/{POINTER}", f"result/train/{POINTER}"]
    # What a channel of the whole result, and of a folder in it, brings.
    for address in ("result", "result/train"):
        channel = tmp_path / f"channel-{address.replace('/', '-')}"
        for it in store.list(f"{address}/"):
            (channel / it.key.removeprefix(f"{address}/")).parent.mkdir(parents=True, exist_ok=True)
            (channel / it.key.removeprefix(f"{address}/")).write_bytes(store.get(it.key))
        assert pointed(channel) == f"{location[0]}/{address}"
        (channel / "more").write_text("")
        assert pointed(channel) is None
    remove_pointers(store)
    assert not list(store.list("result/"))


def test_C12_any_other_json_of_that_name_is_data(tmp_path: Path) -> None:
    (tmp_path / POINTER).write_text('{"uri": "s3://bucket/x"}')
    assert pointed(tmp_path) is None
    for text in ("no json", "[" * 200_000):
        (tmp_path / POINTER).write_text(text)
        assert pointed(tmp_path) is None


def test_C12_a_store_that_does_not_answer_is_not_a_missing_run() -> None:
    with pytest.raises(StorageError):
        result_address("s3://no-such-bucket-anywhere/run/result", {"endpoint_url": "http://127.0.0.1:9"})
