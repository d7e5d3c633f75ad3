"""Manifests repeat exactly and give themselves away when they were touched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from sm_llm.storage.publication.manifest import CommitManifest, FileEntry, PartManifest, Save, decode, encode

SAVE = Save(run_id="tiny-1", step=1200, save_id="0a" * 16, world_size=8, node_count=2)
FILES = (
    FileEntry(path="a/b.bin", size=5, crc64nvme="ae8b14860a799888"),
    FileEntry(path="ü.bin", size=0, crc64nvme="0" * 16),
)


def commit(**changes: Any) -> CommitManifest:
    values: dict[str, Any] = {"save": SAVE, "nonce": "0b" * 16, "time": 1753000000.1234567, "files": FILES}
    return CommitManifest(**(values | changes))


def test_manifests_read_back_as_they_were() -> None:
    meta = {"learning_rate": 0.1 + 0.2, "position": {"epoch": 3, "rows": [1, 2]}, "note": "größer"}
    manifest = commit(meta=meta)
    assert decode(encode(manifest), CommitManifest) == manifest
    part = PartManifest(save=SAVE, node=1, files=FILES)
    assert decode(encode(part), PartManifest) == part


def test_sizes_and_digests_follow_from_the_files() -> None:
    assert commit().size == 5
    assert commit(nonce="0c" * 16, time=1.0, files=FILES[::-1]).digest == commit().digest
    other = FILES[0].model_copy(update={"crc64nvme": "0" * 16})
    assert commit(files=(other, FILES[1])).digest != commit().digest


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_a_cut_manifest_is_not_trusted(cut: int) -> None:
    with pytest.raises(ValueError, match="not whole JSON"):
        decode(encode(commit())[:cut], CommitManifest)


def test_every_flipped_bit_is_noticed() -> None:
    body = encode(commit(meta={"position": 77}))
    trusted = 0
    for index in range(len(body)):
        flipped = body[:index] + bytes([body[index] ^ 1]) + body[index + 1 :]
        try:
            trusted += decode(flipped, CommitManifest) != commit(meta={"position": 77})
        except ValueError:
            continue
    assert trusted == 0


def test_a_later_version_is_not_guessed_at() -> None:
    record = json.loads(encode(commit())) | {"version": 2}
    with pytest.raises(ValueError, match="version 2 is not known to this release"):
        decode(json.dumps(record).encode(), CommitManifest)


def test_what_is_not_a_manifest_is_reported() -> None:
    reported = {b"[]": "not a JSON object", b'{"version": 1}': "own checksum", b"\xff": "not whole JSON"}
    for body, reason in reported.items():
        with pytest.raises(ValueError, match=reason):
            decode(body, CommitManifest)


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "", "a//b", "./a", "a\0b"])
def test_paths_cannot_leave_the_folder(path: str) -> None:
    with pytest.raises(ValidationError):
        FileEntry(path=path, size=1, crc64nvme="0" * 16)


def test_meta_without_a_json_form_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode(commit(meta={"loss": float("nan")}))
