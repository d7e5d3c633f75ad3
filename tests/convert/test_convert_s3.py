"""Conversions from and to S3 (SeaweedFS)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from safetensors.numpy import load_file

from sm_llm.convert import remote
from sm_llm.convert.api import convert
from sm_llm.convert.work import MANIFEST
from sm_llm.errors import CheckpointError, ConversionRefused, StorageError
from sm_llm.storage.publication.restore import fetch
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.syncing.sync import sync
from sm_llm.storage.uri import open_store
from tests.convert.models import CONFIGS, write_model
from tests.convert.test_run_checkpoints import is_equal, publish_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.storage.s3.s3_objects import S3Objects
    from tests.fixtures.s3_server import S3Server

pytestmark = pytest.mark.integration


def test_weights_in_s3_go_to_shards_in_s3_and_back(
    tmp_path: Path, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, scratch = S3Options(endpoint_url=s3_server.endpoint), tmp_path / "scratch"
    write_model(tmp_path / "model", CONFIGS["llama"])
    model, shards = f"s3://{bucket}/model", f"s3://{bucket}/shards"
    sync(tmp_path / "model", model, options=access)
    given: dict[str, Any] = {"to": "nxd", "tensor_parallel_degree": 4, "scratch": scratch, "options": access}

    # Broken off while it is stored: no manifest, so no result; the same call continues with what is there.
    def broken(source: Any, *rest: Any, **named: Any) -> None:
        if str(source).endswith("converted"):
            raise StorageError("the store is away")
        sync(source, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "sync", broken)
        with pytest.raises(StorageError, match="away"):
            convert(model, shards, **given)
    report = convert(model, shards, **given)
    assert report.is_unchanged
    assert (report.source, report.destination) == (model, shards)
    keys = {it["Key"] for it in s3_server.client.list_objects_v2(Bucket=bucket, Prefix="shards/")["Contents"]}
    assert {"shards/conversion.json", "shards/config.json"} <= keys
    assert not list(scratch.iterdir()), "copies are deleted"
    with pytest.raises(ConversionRefused, match="holds objects already"):
        convert(model, shards, **given)
    convert(shards, tmp_path / "back", to="hf", scratch=scratch, options=access)
    before, after = (load_file(it / "model.safetensors") for it in (tmp_path / "model", tmp_path / "back"))
    assert {name: it.tobytes() for name, it in before.items()} == {name: it.tobytes() for name, it in after.items()}


WIDE = {**CONFIGS["llama"], "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 384}


def tree(folder: Path) -> dict[str, bytes]:
    return {it.relative_to(folder).as_posix(): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def manifest(folder: Path) -> dict[str, Any]:
    return {name: it for name, it in json.loads((folder / MANIFEST).read_text()).items() if name != "identity"}


@pytest.mark.parametrize("files", [1, 3])
def test_safetensors_in_s3_are_read_by_ranges_without_a_copy(
    files: int, tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    access, scratch = S3Options(endpoint_url=s3_server.endpoint), tmp_path / "scratch"
    model = write_model(tmp_path / "model", WIDE, files=files)
    sync(model, f"s3://{bucket}/model", options=access)
    used: list[int] = []

    def measured(done: int, total: int) -> None:
        used.append(sum(it.stat().st_blocks * 512 for it in scratch.rglob("*.safetensors")))

    given: dict[str, Any] = {"to": "nxd", "tensor_parallel_degree": 4, "pipeline_parallel_degree": 2}
    how = {"scratch": scratch, "options": access, "progress": measured, "verify": True}
    report = convert(f"s3://{bucket}/model", tmp_path / "streamed", **given, **how)
    convert(model, tmp_path / "local", **given)
    assert set(report.verified) == {"checksums", "logits"}
    assert manifest(tmp_path / "streamed") == manifest(tmp_path / "local")
    streamed, local = (tree(tmp_path / name) for name in ("streamed", "local"))
    assert {name for name in local if streamed.get(name) != local[name]} <= {MANIFEST}
    whole = sum(it.stat().st_size for it in model.glob("*.safetensors"))
    assert used
    assert max(used) < whole / 4, "only what is cut into columns is kept"
    assert not list(scratch.iterdir())


def test_a_source_that_is_replaced_while_it_is_read_is_refused(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    access = S3Options(endpoint_url=s3_server.endpoint)
    model = write_model(tmp_path / "model", WIDE)
    sync(model, f"s3://{bucket}/model", options=access)
    body = (model / "model.safetensors").read_bytes()
    replaced: list[bool] = []

    def replace(done: int, total: int) -> None:
        if not replaced:
            replaced.append(True)
            changed = body[:-1] + bytes([body[-1] ^ 1])
            s3_server.client.put_object(Bucket=bucket, Key="model/model.safetensors", Body=changed)

    how: dict[str, Any] = {"scratch": tmp_path / "scratch", "options": access, "progress": replace, "workers": 1}
    with pytest.raises(StorageError, match="was replaced while it was read"):
        convert(f"s3://{bucket}/model", tmp_path / "shards", to="nxd", tensor_parallel_degree=4, **how)
    assert not (tmp_path / "shards" / MANIFEST).exists()


def test_a_damaged_file_in_s3_is_refused_before_anything_is_written(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    access = S3Options(endpoint_url=s3_server.endpoint)
    model = write_model(tmp_path / "model", CONFIGS["llama"])
    for body in (b"abc", b"\xff" * 100, (model / "model.safetensors").read_bytes()[:-5]):
        (model / "model.safetensors").write_bytes(body)
        sync(model, f"s3://{bucket}/model", options=access)
        how: dict[str, Any] = {"scratch": tmp_path / "scratch", "options": access}
        with pytest.raises(ConversionRefused, match=r"model\.safetensors (is|has)"):
            convert(f"s3://{bucket}/model", tmp_path / "shards", to="nxd", tensor_parallel_degree=4, **how)
        assert not (tmp_path / "shards").exists()


def test_a_checkpoint_of_a_run_in_s3_is_converted_without_its_optimiser(
    tmp_path: Path, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, run = S3Options(endpoint_url=s3_server.endpoint), f"s3://{bucket}/runs/mine"
    models = {step: publish_checkpoint(open_store(run, access), tmp_path, step, step) for step in (3, 12)}
    fetched: list[str] = []

    def listed(store: Any, commit: Any, target: Path, **named: Any) -> Path:
        found = fetch(store, commit, target, **named)
        fetched.extend(tree(found))
        return found

    monkeypatch.setattr(remote, "fetch", listed)
    how: dict[str, Any] = {"to": "hf", "scratch": tmp_path / "scratch", "options": access}
    for source, step in ((f"{run}@3", 3), (run, 12)):
        report = convert(source, tmp_path / f"back-{step}", **how)
        assert f"ckpt/step-{step:08d}/" in report.source
        assert is_equal(tmp_path / f"back-{step}", models[step])
    assert fetched
    assert not [it for it in fetched if "optim" in it]
    with pytest.raises(ConversionRefused, match="does not have a checkpoint of step 4"):
        convert(f"{run}@4", tmp_path / "none", **how)
    store = cast("S3Objects", open_store(run, access))
    key = max((it for it in store.list("ckpt/step-00000012/") if "/optim/" not in it.key), key=lambda it: it.size).key
    held = bytearray(store.get(key))
    held[len(held) // 2] ^= 1
    store.client.put_object(**store.at(key), Body=bytes(held))
    with pytest.raises(CheckpointError, match="has other content than was published"):
        convert(run, tmp_path / "damaged", **{**how, "scratch": tmp_path / "other"})
