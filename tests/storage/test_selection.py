"""Patterns, weight formats, and what a local folder holds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.base import StoredObject
from sm_llm.storage.syncing.scan import scan
from sm_llm.storage.syncing.selection import Selection, matches, other_weight_formats

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "original/consolidated.00.pth",
    "original/params.json",
    "pytorch_model.bin",
    "tokenizer.json",
    "USE_POLICY.md",
]


def items(paths: list[str]) -> list[StoredObject]:
    return [StoredObject(path, 10) for path in paths]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("original", "original/consolidated.00.pth", True),
        ("original/", "a/original/x", True),
        ("original", "originals/x", False),
        ("original", "not-original", False),
        ("a/original", "a/original/x", True),
        ("a/original", "b/a/original/x", False),
        (".pth", "deep/x.pth", True),
        (".pth", "x.pth.txt", False),
        ("pth", "x.pth", False),
        (".git", ".git/config", True),
        ("*.json", "deep/config.json", True),
        ("deep/*.json", "deep/config.json", True),
        ("deep/*.json", "config.json", False),
        ("model-0000[12]*", "model-00001-of-00002.safetensors", True),
        ("README.md", "README.md", True),
    ],
)
def test_S309_folder_suffix_and_glob_forms(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_S309_what_a_pattern_left_out_is_counted() -> None:
    kept, left_out = Selection(exclude=("original", ".pth", "*.md"), one_weight_format=False).apply(items(LLAMA))
    assert [it.key for it in kept] == [LLAMA[0], LLAMA[1], LLAMA[2], LLAMA[5], LLAMA[6]]
    assert [(it.reason, it.files, it.size) for it in left_out] == [
        ("exclude original", 2, 20),
        ("exclude .pth", 0, 0),
        ("exclude *.md", 1, 10),
    ]


def test_exclude_wins_and_a_mistyped_include_is_an_error() -> None:
    kept, left_out = Selection(include=("*.json",), exclude=("original",)).apply(items(LLAMA))
    assert [it.key for it in kept] == ["config.json", "tokenizer.json"]
    assert (left_out[0].reason, left_out[0].files) == ("not included", 5)
    with pytest.raises(StorageError, match=r"'\.safetensor' matches none of 8 files"):
        Selection(include=(".safetensor",)).apply(items(LLAMA))
    with pytest.raises(StorageError, match="leave nothing to copy"):
        Selection(exclude=("*",)).apply(items(LLAMA))


def test_one_weight_format_is_taken_of_a_model_folder() -> None:
    kept, left_out = Selection().apply(items(LLAMA))
    assert [it.key for it in kept] == [LLAMA[0], LLAMA[1], LLAMA[2], LLAMA[6], LLAMA[7]]
    assert [(it.reason, it.files, it.size) for it in left_out] == [("other formats of the weights", 3, 30)]


@pytest.mark.parametrize(
    "paths",
    [
        ["config.json", "pytorch_model.bin"],
        ["model.safetensors", "pytorch_model.bin"],
        ["a/config.json", "a/model.safetensors", "b/pytorch_model.bin"],
        ["config.json", "model.safetensors", "optimizer.bin", "adapter.bin", "data/original/x"],
    ],
    ids=["only-bin", "no-model-folder", "other-folder", "other-files"],
)
def test_nothing_else_is_taken_for_a_duplicate(paths: list[str]) -> None:
    assert other_weight_formats(paths) == set()


def test_SR13_links_count_as_what_they_point_at(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "sha").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/sha")
    (snapshot / "folder").symlink_to("../../blobs")
    assert [(it.key, it.size) for it in scan(snapshot)] == [("folder/sha", 7), ("model.safetensors", 7)]


def test_SR13_a_link_to_nothing_and_a_loop_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(StorageError, match=r"gone: is a link to nothing \(nowhere\)"):
        scan(tmp_path)
    (tmp_path / "gone").unlink()
    (tmp_path / "loop").symlink_to(".")
    with pytest.raises(StorageError, match="a link back to a folder above it"):
        scan(tmp_path)


def test_S308_what_cannot_be_stored_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="pipe: is not a plain file"):
        scan(tmp_path)
    (tmp_path / "pipe").unlink()
    with open(os.fsencode(tmp_path) + b"/\xff.bin", "wb"):
        pass
    with pytest.raises(StorageError, match="is not UTF-8"):
        scan(tmp_path)
