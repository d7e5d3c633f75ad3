"""A pickle of somebody else's makes its own objects, and changes nothing that was there before."""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import struct
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorProperties

from sm_llm.errors import CheckpointError
from sm_llm.worker.checkpoint.shard_reader import load_metadata
from sm_llm.worker.object_collectives import ObjectUnpickler
from tests.fixtures.sampling import number

METADATA = "torch.distributed.checkpoint.metadata"
NAMES = {
    (METADATA, "Metadata"): Metadata,
    (METADATA, "TensorProperties"): TensorProperties,
    (METADATA, "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def sets(target: bytes, name: str, value: bytes) -> bytes:
    """BUILD with attributes in slots: ``setattr(target, name, value)``."""
    return target + b"N}" + text(name) + value + b"s\x86b"


def state() -> list[dict[str, Any]]:
    return [dict(vars(it)) for it in (*NAMES.values(), *_MEM_FORMAT_ENCODING) if hasattr(it, "__dict__")]


def attempt(body: bytes) -> None:
    """Both unpicklers, whatever they raise; afterwards all is as before."""
    before = state()
    with pytest.raises(CheckpointError):
        load_metadata(io.BytesIO(body), "here")
    with contextlib.suppress(Exception):
        ObjectUnpickler(io.BytesIO(body)).load()
    assert state() == before
    assert not Path("/nonexistent").exists()


@pytest.mark.parametrize("key", NAMES, ids=lambda it: it[1])
@pytest.mark.parametrize("name", ["poison", "exists", "__init__", "__setstate__", "__doc__", "__eq__"])
def test_A13_7_no_attribute_of_a_class_or_function_is_set(key: tuple[str, str], name: str) -> None:
    attempt(b"\x80\x04" + sets(named(*key), name, named("collections", "OrderedDict")) + b".")


def test_A13_7_no_member_of_an_enumeration_is_changed() -> None:
    member = named(METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
    for build in (member + b"}" + text("_value_") + b"K\x07sb", sets(member, "poison", b"K\x07")):
        attempt(b"\x80\x04" + build + b".")
    assert _MEM_FORMAT_ENCODING(0).value == 0


def test_A13_7_a_change_before_good_metadata_is_refused_too() -> None:
    good = pickle.dumps(Metadata({}, None, {}), protocol=4)
    body = good[:2] + sets(named(METADATA, "Metadata"), "poison", b"K\x01") + b"0" + good[2:]
    with pytest.raises(CheckpointError, match="it changes"):
        load_metadata(io.BytesIO(body), "here")
    assert not hasattr(Metadata, "poison")


def test_members_and_paths_come_back() -> None:
    value = [_MEM_FORMAT_ENCODING(1), Path("a/b"), PurePosixPath("/c"), torch.Size([2]), torch.float32]
    found = ObjectUnpickler(io.BytesIO(pickle.dumps(value))).load()
    assert found == value
    assert isinstance(found[0], enum.Enum)


PIECES = st.sampled_from(
    [
        *(named(*key) for key in NAMES), b"N", b"}", b")", b"]", b"K\x01", text("poison"), text("exists"), b"\x85",
        b"\x86", b"\x87", b"R", b"\x81", b"b", b"s", b"0", b"2", b"(", b"t", b"l", b"d", b"o", b"\x94", b"h\x00", b"a",
    ]
)  # fmt: skip


@settings(max_examples=number(500, whole=5000))
@given(st.lists(PIECES, max_size=14))
def test_A13_7_no_order_of_opcodes_changes_anything(pieces: list[bytes]) -> None:
    before = state()
    body = b"\x80\x04" + b"".join(pieces) + b"."
    for load in (lambda: load_metadata(io.BytesIO(body), "here"), lambda: ObjectUnpickler(io.BytesIO(body)).load()):
        with contextlib.suppress(Exception):
            load()
    assert state() == before
