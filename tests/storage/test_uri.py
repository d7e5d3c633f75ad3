"""Storage addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.uri import fill, join, open_store, parse


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("./runs").path == tmp_path / "runs"
    assert parse("runs").uri == str(tmp_path / "runs")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("~/runs").path == tmp_path / "runs"


def test_file_uris_are_folders() -> None:
    assert parse("file:///data/my%20runs").path == Path("/data/my runs")
    with pytest.raises(StorageError, match="names a host"):
        parse("file://server/data")


def test_s3_is_recognised_and_closed() -> None:
    location = parse("s3://my-bucket/a/b/")
    assert (location.scheme, location.bucket, location.prefix, location.path) == ("s3", "my-bucket", "a/b", None)
    assert location.uri == "s3://my-bucket/a/b"
    assert parse("s3://my-bucket").uri == "s3://my-bucket"


@pytest.mark.parametrize("uri", ["s3:///no-bucket", "s3://Bad_Name/x", "s3:/one-slash/x", "gs://bucket/x", "", "  "])
def test_malformed_addresses_are_refused(uri: str) -> None:
    with pytest.raises(StorageError):
        parse(uri)


@pytest.mark.parametrize("prefix", ["/x", "a//b", "../x", "a/./b", "a/.."])
def test_a_prefix_that_no_folder_could_have_is_refused(prefix: str) -> None:
    with pytest.raises(StorageError, match=r"holds an empty folder, '\.' or '\.\.', which S3 takes for names"):
        parse(f"s3://bucket/{prefix}")


@pytest.mark.parametrize("uri", ["s3://bucket/p/{run_name}", "s3://bucket/{other}", "runs/{", "runs/}", "runs/{}"])
def test_CK11_literal_braces_are_refused(uri: str) -> None:
    with pytest.raises(StorageError, match="is not filled in"):
        parse(uri)


def test_CK11_the_known_placeholder_is_filled() -> None:
    assert parse(fill("s3://bucket/p/{run_name}", run_name="tiny")).prefix == "p/tiny"


def test_CK11_a_remote_address_is_never_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("s3://bucket/runs", {"region": "eu-west-1"})
    assert isinstance(store, S3Store)
    assert (store.bucket, store.prefix, store.options.region) == ("bucket", "runs/", "eu-west-1")
    assert list(tmp_path.iterdir()) == []


def test_opening_a_folder_touches_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "later")
    assert isinstance(store, FolderStore)
    assert store.uri == str(tmp_path / "later")
    assert list(tmp_path.iterdir()) == []


def test_join_goes_down_only(tmp_path: Path) -> None:
    assert join(tmp_path, "a/b", "c") == str(tmp_path / "a/b/c")
    assert join("s3://bucket/runs/", "tiny") == "s3://bucket/runs/tiny"
    assert join("s3://bucket/runs") == "s3://bucket/runs"
    for part in ("../other", "/absolute", "a/../../b"):
        with pytest.raises(StorageError, match="does not stay below"):
            join("s3://bucket/runs", part)


@pytest.mark.parametrize("uri", ["s3://me:planted@bucket/x", "s3://me:planted@bucket"])
def test_s09b_no_part_of_an_address_shows_its_credentials(uri: str) -> None:
    with pytest.raises(StorageError, match="names no valid bucket") as caught:
        parse(uri)
    assert "planted" not in str(caught.value)
