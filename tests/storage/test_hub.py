"""The hub as a source: the real huggingface_hub library against a double of the hub's addresses."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.checksum import crc64_bytes
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.hub import hub_fetch
from sm_llm.storage.hub.hub_addresses import HubAddress, config_file, parse_hub
from sm_llm.storage.hub.hub_fetch import StoreTarget, bring_files, fetch, select
from sm_llm.storage.hub.hub_ledger import Ledger, ledger_prefix
from sm_llm.storage.syncing.selection import Selection
from sm_llm.storage.uri import open_store

if TYPE_CHECKING:
    from pathlib import Path

Hub = Any
TOKEN = "hf_" + "Zz9" * 12


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": noise(50_000, 1),
    "model-00002-of-00002.safetensors": noise(30_000, 2),
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": noise(80_000, 3),
    "original/consolidated.00.pth": noise(80_000, 4),
    "a b/ü$.txt": b"odd",
    "empty.txt": b"",
}
WANTED = sorted(set(MODEL) - {"pytorch_model.bin", "original/consolidated.00.pth"})


def fetched(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".fetch" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("hf://org/name", HubAddress("model", "org/name")),
        ("hf://models/org/name@v1.0", HubAddress("model", "org/name", "v1.0")),
        ("hf://datasets/org/na.me@main/data/x.parquet", HubAddress("dataset", "org/na.me", "main", "data/x.parquet")),
        ("hf://org/name@refs/pr/3/sub/", HubAddress("model", "org/name", "refs/pr/3", "sub")),
        ("hf://org/name@feature%2Fx", HubAddress("model", "org/name", "feature/x")),
    ],
)
def test_an_address_has_parts(uri: str, address: HubAddress) -> None:
    assert parse_hub(uri) == address
    assert parse_hub(address.uri) == address


@pytest.mark.parametrize("uri", ["hf://", "hf://name", "hf://org/name@", "s3://a/b", "hf://org/name/../x", "hf:/a/b"])
def test_anything_else_is_refused(uri: str) -> None:
    with pytest.raises(StorageError, match="is not a hub address"):
        parse_hub(uri)


def test_a_model_arrives_in_one_weight_format_and_every_byte_is_proved(hub: Hub, tmp_path: Path) -> None:
    commit = next(iter(hub.add("org/name", MODEL).commits))
    seen: list[tuple[int, int]] = []
    report = fetch("hf://org/name", tmp_path / "m", progress=lambda done, total: seen.append((done, total)))
    assert fetched(tmp_path / "m") == {path: MODEL[path] for path in WANTED}
    assert sorted(report.copied) == WANTED
    assert (report.commit, report.copied_size) == (commit, sum(len(MODEL[path]) for path in WANTED))
    assert {it.reason: it.files for it in report.left_out} == {"exclude original": 1, "other formats of the weights": 1}
    assert seen[-1] == (report.copied_size, report.copied_size)
    record = json.loads((tmp_path / "m/.fetch/source.json").read_text())
    assert (record["uri"], record["commit"]) == ("hf://org/name", commit)
    checksums = {it["path"]: it["checksum"] for it in record["files"]}
    assert checksums["model-00001-of-00002.safetensors"].startswith("sha256:")
    assert checksums["config.json"].startswith("git-sha1:")
    assert len(checksums) == len(MODEL), "listed over two pages"
    assert sorted(path.name for path in (tmp_path / "m/.fetch").iterdir()) == ["source.json"]


def test_a_second_fetch_brings_nothing_and_stays_with_its_commit(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("org/name", MODEL)
    first = fetch("hf://org/name@main", tmp_path)
    repository.commit({**MODEL, "config.json": b"{}"})
    hub.requests.clear()
    second = fetch("hf://org/name@main", tmp_path)
    assert (second.commit, second.copied, second.unchanged) == (first.commit, [], len(WANTED))
    assert not hub.requests, "the pin tells it all"
    with pytest.raises(StorageError, match=r"holds hf://org/name@main at commit [0-9a-f]{40}"):
        fetch(f"hf://org/name@{second.commit}", tmp_path)


def test_a_damaged_or_missing_file_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    fetch("hf://org/name", tmp_path)
    large = tmp_path / "model-00001-of-00002.safetensors"
    large.write_bytes(bytes([large.read_bytes()[0] ^ 1]) + large.read_bytes()[1:])
    (tmp_path / "tokenizer.json").unlink()
    report = fetch("hf://org/name", tmp_path)
    assert sorted(report.copied) == [large.name, "tokenizer.json"]
    assert fetched(tmp_path)[large.name] == MODEL[large.name]


def test_a_connection_that_breaks_continues_inside_the_file(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.add("org/name", {"big.bin": noise(50_000)})
    hub.cuts, hub.cut_after = 1, 20_000
    fetch("hf://org/name", tmp_path)
    assert (tmp_path / "big.bin").read_bytes() == noise(50_000)
    assert "bytes=20000-" in [span for _, span in hub.bodies()]


def test_a_fetch_that_was_killed_continues_inside_the_file(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    """The library itself keeps nothing of a file that broke off; ours does."""
    hub.add("org/name", {"big.bin": noise(50_000)})

    class Killed(BaseException):
        pass

    def die(done: int, total: int) -> None:
        if done:
            raise Killed

    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    with pytest.raises(Killed):
        fetch("hf://org/name", tmp_path, progress=die)
    (part,) = (tmp_path / ".fetch").glob("*.part")
    held = part.stat().st_size
    assert 0 < held < 50_000
    hub.requests.clear()
    seen: list[int] = []
    fetch("hf://org/name", tmp_path, progress=lambda done, total: seen.append(done))
    assert f"bytes={held}-" in [span for _, span in hub.bodies()]
    assert fetched(tmp_path) == {"big.bin": noise(50_000)}
    assert (seen[0], seen[-1]) == (0, 50_000)
    assert held in seen


@pytest.mark.parametrize(("flips", "arrives"), [(2, True), (3, False)])
def test_a_turned_bit_is_fetched_again_at_most_three_times(hub: Hub, tmp_path: Path, flips: int, arrives: bool) -> None:
    hub.add("org/name", {"big.bin": noise(50_000)})
    hub.flips = flips
    if arrives:
        fetch("hf://org/name", tmp_path)
        assert fetched(tmp_path) == {"big.bin": noise(50_000)}
    else:
        with pytest.raises(StorageError, match=r"'big.bin' arrives with other content .* 3 times"):
            fetch("hf://org/name", tmp_path)
        assert fetched(tmp_path) == {}


def test_s03_no_more_is_written_than_the_hub_lists(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", {"big.bin": noise(50_000)})
    hub.grows = 1
    with pytest.raises(StorageError, match=r"'big.bin' has 50,000 bytes, and more of them arrive"):
        fetch("hf://org/name", tmp_path)
    assert max(it.stat().st_size for it in tmp_path.rglob("*")) <= 50_000
    fetch("hf://org/name", tmp_path)
    assert fetched(tmp_path) == {"big.bin": noise(50_000)}


def test_a_busy_hub_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", {"x.bin": noise(5000)})
    hub.busy = 3
    fetch("hf://org/name", tmp_path)
    assert fetched(tmp_path) == {"x.bin": noise(5000)}


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("org/gated", MODEL, token=TOKEN)
    fetch("hf://org/gated", tmp_path)
    assert hub.authorizations["127.0.0.1", f"Bearer {TOKEN}"] > 3
    assert not hub.authorizations["127.0.0.1", None]
    assert hub.authorizations["localhost", None], "large files come from another host"
    assert not hub.authorizations["localhost", f"Bearer {TOKEN}"]


@pytest.mark.parametrize("refusal", [(401, "GatedRepo"), (403, "GatedRepo"), (403, ""), (401, "")])
@pytest.mark.parametrize("token", [None, "hf_" + "Wrong" * 6])
def test_a_refusal_names_the_licence_page_and_what_the_token_lacks(
    hub: Hub, tmp_path: Path, monkeypatch: Any, refusal: tuple[int, str], token: str | None
) -> None:
    hub.add("org/gated", MODEL, token=TOKEN, refusal=refusal)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(StorageError) as caught:
        fetch("hf://org/gated", tmp_path)
    text = str(caught.value)
    assert f"{hub.url}/org/gated" in text
    assert str(refusal[0]) in text
    assert ("public gated repos" if token else "No token was sent") in text
    assert token is None or token not in text


def test_what_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    with pytest.raises(StorageError, match=r"shows no such dataset.*name is wrong"):
        fetch("hf://datasets/org/name", tmp_path / "a")
    with pytest.raises(StorageError, match="no revision 'v9'"):
        fetch("hf://org/name@v9", tmp_path / "b")
    with pytest.raises(StorageError, match="no file or folder 'nothing'"):
        fetch("hf://org/name/nothing", tmp_path / "c")


def test_offline_is_reported_at_once(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.forget_connections()
    with pytest.raises(StorageError, match=r"HF_HUB_OFFLINE is set.*name a folder or s3://"):
        fetch("hf://org/name", tmp_path)
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE is set"):
        config_file(parse_hub("hf://org/name"))
    assert not hub.requests


def test_a_hub_that_cannot_be_reached_is_reported(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"hub at http://127\.0\.0\.1:9 cannot be reached.*name a folder"):
        fetch("hf://org/name", tmp_path)


def test_E20_a_plan_without_a_connection_does_not_wait_for_the_librarys_retries(
    hub: Hub, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub.add("org/name", MODEL)
    kept = config_file(parse_hub("hf://org/name"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    tried: list[object] = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *given, **named: tried.append(given))
    assert config_file(parse_hub("hf://org/name")) == kept
    with pytest.raises(StorageError, match=r"hub at http://127\.0\.0\.1:9 cannot be reached.*name a folder"):
        config_file(parse_hub("hf://org/other"))
    assert not tried


def test_a_full_disk_is_reported_before_anything_is_fetched(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    hub.add("org/name", MODEL)
    free = os.statvfs(tmp_path)
    usage = type("Usage", (), {"free": 1000, "total": free.f_blocks, "used": 0})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=r"disk full: [\d,]+ bytes are to be fetched, but only 1,000"):
        fetch("hf://org/name", tmp_path)
    assert not fetched(tmp_path)


def test_a_part_of_a_dataset_can_be_meant(hub: Hub, tmp_path: Path) -> None:
    hub.add("datasets/org/texts", {"en/a.txt": b"a", "en/b.txt": b"b", "english.txt": b"c"})
    report = fetch("hf://datasets/org/texts/en", tmp_path)
    assert sorted(fetched(tmp_path)) == ["en/a.txt", "en/b.txt"]
    assert report.source == "hf://datasets/org/texts/en"


def test_a_name_that_climbs_out_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", {"../../evil": b"x"})
    with pytest.raises(StorageError, match="cannot be fetched"):
        fetch("hf://org/name", tmp_path / "x")
    assert not (tmp_path.parent / "evil").exists()


def test_a_config_is_read_for_a_plan_and_kept_for_the_next(hub: Hub, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub.add("org/name", MODEL)
    assert config_file(parse_hub("hf://org/name")).read_bytes() == MODEL["config.json"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert config_file(parse_hub("hf://org/name")).read_bytes() == MODEL["config.json"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.add("org/empty", {"x": b""})
    with pytest.raises(StorageError, match="no such file"):
        config_file(parse_hub("hf://org/empty"))


class Dies(Exception):
    pass


def test_a_store_gets_file_after_file_and_a_killed_attempt_is_continued_with(
    hub: Hub, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(hub_fetch, "WORKERS", 1)
    hub.add("org/name", MODEL)
    (tmp_path / "store").mkdir()
    store = FolderStore(tmp_path / "store")
    ledger = Ledger(store, ledger_prefix("hf://org/name"))
    snapshot = ledger.pin(parse_hub("hf://org/name"))
    files, _ = select(snapshot, Selection(exclude=["original"]))
    sink = StoreTarget(store, "data/", ledger, tmp_path / "scratch")
    noted: list[str] = []
    note = Ledger.note

    def dying(self: Ledger, file: Any, entry: Any) -> None:
        if len(noted) == 3:
            raise Dies  # stored, but not noted
        noted.append(file.path)
        note(self, file, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "note", dying)
        with pytest.raises(Dies):
            bring_files(snapshot, files, sink, lambda done, total: None)
    hub.requests.clear()
    bring_files(snapshot, files, sink, lambda done, total: None)
    asked = {path.partition("/resolve/")[2].partition("/")[2] for path, _ in hub.bodies() if "/resolve/" in path}
    assert asked == set(WANTED) - set(noted)
    assert {it.key: it.size for it in store.list("data/")} == {f"data/{it}": len(MODEL[it]) for it in WANTED}
    entries = {it.path: it.crc64nvme for it in sink.entries(files)}
    assert entries == {path: crc64_bytes(MODEL[path]) for path in WANTED}
    assert not list((tmp_path / "scratch").iterdir())


def test_s3_gets_the_files_and_the_same_call_continues(
    hub: Hub, tmp_path: Path, monkeypatch: Any, s3_server: Any, bucket: str
) -> None:
    """SeaweedFS in S3's place: real parts from the hub's library to the store."""
    hub.add("org/name", MODEL)
    options = {"endpoint_url": s3_server.endpoint, "region": "us-east-1"}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = fetch("hf://org/name", f"s3://{bucket}/models/name", options=options)
    store = open_store(f"s3://{bucket}/models/name", options)
    listed = {it.key: it.size for it in store.list("") if not it.key.startswith(".fetch/")}
    assert listed == {path: len(MODEL[path]) for path in WANTED}
    assert store.checksum(WANTED[-1]) == crc64_bytes(MODEL[WANTED[-1]])
    assert json.loads(store.get(".fetch/source.json") or b"")["commit"] == report.commit
    assert not list(tmp_path.glob("fetch-*")), "nothing stays on the local disk"
    store.delete(["config.json"])
    again = fetch("hf://org/name", f"s3://{bucket}/models/name", options=options)
    assert (again.copied, again.unchanged) == (["config.json"], len(WANTED) - 1)
