"""Messages between processes are data: what another process could have written runs nothing here."""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm_llm.errors import CheckpointError, RunFailed, StorageError
from sm_llm.storage.base import MissingObjectError
from sm_llm.storage.publication.publish import CommitManifest, CommitResult, FileEntry, Newest, Rejected, Save, new_save
from sm_llm.worker.runtime.message import decode, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)
SAVE = new_save("run", 3, world_size=2, node_count=1)
COMMIT = CommitManifest(
    save=SAVE, nonce="0a" * 16, time=1.5, files=(FileEntry(path="a/b", size=1, crc64nvme="0" * 16),), meta={"x": [1]}
)


@given(VALUES)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [SAVE, COMMIT, Newest(COMMIT, (Rejected(2, "damaged"),)), (CommitResult(COMMIT, False), None), Newest(None)],
)
def test_what_publication_states_arrives_as_it_was(value: Any) -> None:
    assert decode(encode(value)) == value


def test_errors_arrive_as_their_kind() -> None:
    found = decode(encode((None, CheckpointError("no good"))))
    assert type(found[1]) is CheckpointError
    assert str(found[1]) == "no good"
    assert type(decode(encode(MissingObjectError("gone")))) is StorageError


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(pickle.dumps(Evil())).decode(), "", "[]", "{}", '{"of": "system", "items": "x"}',
        '{"of": "Save", "items": {"run_id": 1}}', '{"of": "Newest", "items": {"x": 1}}', "[" * 100_000,
        '{"of": "dict", "items": [[{"of": "list", "items": []}, 1]]}',
    ],
)  # fmt: skip
def test_s05_anything_else_is_an_error_and_runs_nothing(text: str) -> None:
    with pytest.raises(RunFailed, match="cannot be read"):
        decode(text)


def test_what_no_message_may_hold_is_our_own_mistake() -> None:
    with pytest.raises(TypeError, match="Evil"):
        encode([Evil()])


@given(st.text() | st.binary().map(lambda raw: base64.b64encode(raw).decode()))
def test_s05_any_text_is_a_value_or_an_error(text: str) -> None:
    try:
        decode(text)
    except RunFailed:
        return


def test_save_is_a_message_of_its_own_type() -> None:
    assert isinstance(decode(encode(SAVE)), Save)
