"""Names from elsewhere stay below the folder they are meant for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.errors import StorageError
from sm_llm.storage.names import name_fault, path_below

BAD = [
    "", ".", "..", "../x", "a/../../x", "a/..", "/abs", "//x", "a//b", "./x", "a/./b", "a/", "a\\..\\b", "C:/x", "c:x",
    "a\0b", "con\n\x1b]0;t", "a\x7f", "a/\x85", "x" * 256, "/".join(["x" * 100] * 11),
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_s02_s03_a_name_that_leaves_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    assert name_fault(name)
    with pytest.raises(StorageError, match="cannot be the name of a file"):
        path_below(tmp_path, name, origin="s3://bucket/x")


@pytest.mark.parametrize("name", ["a", "a/b.c", ".hidden", "..a", "a..", "a b", "ü/日本", "data/.metadata", "xy:z"])
def test_plain_names_stay_what_they_are(name: str, tmp_path: Path) -> None:
    assert path_below(tmp_path, name) == tmp_path / name


def test_names_of_our_own_are_reserved_whatever_their_case() -> None:
    assert name_fault(".fetch/source.json", [".fetch/"])
    assert name_fault(".FETCH/source.json", [".fetch/"])
    assert not name_fault("a/.fetch/source.json", [".fetch/"])


PARTS = st.sampled_from(["..", ".", "", "a", "b", "\0", "\\", "C:", "\n", "/", "~", "x" * 300]) | st.text(max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.lists(PARTS, max_size=6).map("/".join) | st.text())
def test_s02_an_accepted_name_lies_below_the_folder(name: str) -> None:
    folder = Path("/some/folder")
    if not name_fault(name):
        path = path_below(folder, name)
        assert path.resolve().is_relative_to(folder)
        assert path != folder
        assert str(path) == f"{folder}/{name}"
