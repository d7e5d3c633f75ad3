"""Objects of torch's collectives are read as data: a pickle of somebody else's calls nothing."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from sm_llm.errors import StorageError
from sm_llm.storage.publication.publish import new_save
from sm_llm.worker.inputs.space import Disk
from sm_llm.worker.object_collectives import ObjectUnpickler, UnknownError, restrict_object_collectives

if TYPE_CHECKING:
    from pathlib import Path


def read(body: bytes) -> Any:
    return ObjectUnpickler(io.BytesIO(body)).load()


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


@pytest.mark.parametrize(
    "function", [os.system, subprocess.Popen, eval, exec, getattr, __import__, open, print, pickle.loads, torch.load]
)
def test_9_an_object_that_calls_a_function_is_refused_before_it_is_called(function: Any, tmp_path: Path) -> None:
    mark = tmp_path / "EXECUTED"
    with pytest.raises(pickle.UnpicklingError, match="which none may hold"):
        read(pickle.dumps(Calls(function, f"touch {mark}")))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("sm_llm.worker.script.child_program", "subprocess.Popen"),
        ("sm_llm.worker.script.child_program", "Program"),
        ("torch", "hub.load"),
        ("builtins", "type"),
        ("antigravity", "fly"),
    ],
)
def test_9_a_name_is_not_a_way_to_what_a_module_imports(module: str, name: str) -> None:
    body = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
        + b"\x93."
    )
    with pytest.raises(pickle.UnpicklingError, match="which none may hold"):
        read(body)


def test_9_what_the_processes_of_a_job_exchange_is_read_back() -> None:
    properties = TensorProperties(dtype=torch.bfloat16)
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))
    metadata = Metadata({"w": TensorStorageMetadata(properties, torch.Size([4, 2]), [chunk])}, storage_data={})
    item = WriteItem(MetadataIndex("w", torch.Size([0, 0]), 0), WriteItemType.TENSOR)
    for value in (
        None, (1, 2.5, "x", b"y", [True], {"a": {1, 2}}), Disk("d", "/x", 3), metadata, SavePlan([item]),
        new_save("run", 3, world_size=2, node_count=1),
    ):  # fmt: skip
        assert read(pickle.dumps(value)) == value
    for error in (ValueError("x"), OSError(28, "full"), StorageError("s")):
        assert repr(read(pickle.dumps(error))) == repr(error)


def test_9_an_error_of_an_unknown_class_arrives_as_an_error() -> None:
    body = b"\x80\x04\x8c\x05evils\x8c\x09EvilError\x93\x8c\x01x\x85R."
    found = read(body)
    assert isinstance(found, UnknownError)
    assert found.args == ("x",)


def test_9_torchs_own_collectives_read_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(c10d, "_unpickler", c10d._unpickler)
    restrict_object_collectives()
    mark = tmp_path / "EXECUTED"
    body = torch.frombuffer(bytearray(pickle.dumps(Calls(os.system, f"touch {mark}"))), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError):
        c10d._tensor_to_object(body, len(body), None)
    assert not mark.exists()
