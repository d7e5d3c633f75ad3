"""Checkpoints that others wrote are data: their metadata is read, and never run."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from sm_llm.errors import CheckpointError
from sm_llm.worker.checkpoint.save_writer import ShardWriter
from sm_llm.worker.checkpoint.shard_reader import ShardReader, load_metadata
from tests.fixtures.sampling import number

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "step": torch.tensor(3)}
    save(state, storage_writer=ShardWriter(folder, sync_files=False))
    return folder


def metadata(saved: Path) -> Any:
    return pickle.loads((saved / ".metadata").read_bytes())


def refusal(body: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_metadata(io.BytesIO(body), "here/.metadata")
    assert str(caught.value).startswith("here/.metadata: is not the metadata of a checkpoint")
    return str(caught.value)


def test_what_was_saved_is_read(saved: Path) -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16), "step": torch.tensor(0)}
    load(state, storage_reader=ShardReader(saved))
    assert state["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["step"].item() == 3


class Evil:
    """Unpickles as the result of a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


@pytest.mark.parametrize(
    "function",
    [os.system, eval, exec, getattr, __import__, torch.load, pickle.loads, Path.unlink, open],
)
def test_s06_no_function_is_called(function: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("")
    assert "which is not part of a checkpoint" in refusal(pickle.dumps(Evil(function, str(mark))))
    assert mark.read_text() == ""


def test_s06_code_beside_real_metadata_is_refused(saved: Path, tmp_path: Path) -> None:
    whole = metadata(saved)
    whole.planner_data = {"a": Evil(os.system, f"touch {tmp_path}/mark")}
    assert "system" in refusal(pickle.dumps(whole))
    assert not (tmp_path / "mark").exists()


def test_s06_entries_that_would_be_unpickled_later_are_refused(saved: Path) -> None:
    whole = metadata(saved)
    whole.state_dict_metadata["a"] = BytesStorageMetadata()
    assert "BytesStorageMetadata" in refusal(pickle.dumps(whole))


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "deep/file", "a\0b", ""])
def test_s06_a_tensor_lies_beside_its_metadata(saved: Path, path: str) -> None:
    whole = metadata(saved)
    next(iter(whole.storage_data.values())).relative_path = path
    assert "expected the name of a file beside it" in refusal(pickle.dumps(whole))


@pytest.mark.parametrize("value", [None, 1, {"a": 1}, [torch.Size([1])]])
def test_other_pickles_are_refused(value: Any) -> None:
    refusal(pickle.dumps(value))


def _fills_memory(body: bytes) -> bool:
    """Whether Python's unpickler would make room for billions of objects, which it does on one opcode's word."""
    with contextlib.suppress(Exception):  # it ends where the unpickler would
        return any(it.name == "LONG_BINPUT" and found > 1000 for it, found, _ in pickletools.genops(body))
    return False


@settings(max_examples=number(300, whole=3000))
@given(data=st.data())
def test_s06_damaged_metadata_is_refused_or_still_metadata(saved: Path, data: st.DataObject) -> None:
    body = bytearray((saved / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assume(not _fills_memory(bytes(body)))
    try:
        load_metadata(io.BytesIO(bytes(body)), "here")
    except CheckpointError:
        return
