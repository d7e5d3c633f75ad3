"""Conversions from and to S3 (SeaweedFS)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file

from sm_llm.convert import remote
from sm_llm.convert.api import convert
from sm_llm.errors import ConversionRefused, StorageError
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.syncing.sync import sync
from tests.convert.models import CONFIGS, write_model

if TYPE_CHECKING:
    from pathlib import Path

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
