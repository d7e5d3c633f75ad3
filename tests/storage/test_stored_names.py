"""Names from elsewhere stay below the folder they are meant for."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.errors import StorageError
from sm_llm.file_names import brought_problem, name_problem, paths_problem
from sm_llm.storage.stored_names import path_below
from tests.fixtures.sampling import number

BAD = [
    "", ".", "..", "../x", "a/../../x", "a/..", "/abs", "//x", "a//b", "./x", "a/./b", "a/", "a\\..\\b", "C:/x", "c:x",
    "a\0b", "con\n\x1b]0;t", "a\x7f", "a/\x85", "x" * 256, "/".join(["x" * 100] * 11), "\u00e9" * 128, "a/\ud800",
    "a\u2028b", "...", "a/ /b", ". .", "\uff0e\uff0e/x", ".\u200b./x", "a/\u200b", "CON", "nul.txt", "nul:", "a/PRN:x",
    "a/Aux", "lpt1.",
    "x.sm_llm.part", "a/x.SM_LLM.part.ranges", "x.sm_llm.part.aB3dE6", "a\u202egpj.exe", "a/\u200eb",
    "com\u00b9", "co\u200bn", "a/prn .txt",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_s02_s03_a_name_that_leaves_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    assert name_problem(name)
    with pytest.raises(StorageError, match="cannot be the name of a file"):
        path_below(tmp_path, name, origin="s3://bucket/x")


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "a/b.c",
        ".hidden",
        "..a",
        "a..",
        "a b",
        "ü/日本",
        "data/.metadata",
        "xy:z",
        "console",
        "icon.txt",
        "com10",
        "nul_token.json",
        "a\uff0fb",
        "\u200da",
        "x" * 255,
    ],
)
def test_plain_names_stay_what_they_are(name: str, tmp_path: Path) -> None:
    assert path_below(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    [
        ".git/config",
        ".GIT/hooks/x",
        "a/.git/config",
        ".gi\u200bt/x",
        "git~1/x",
        ".git",
        ".git./x",
        ".git::$INDEX_ALLOCATION/config",
    ],
)
def test_A13_24_what_is_brought_is_not_a_repositorys_own(name: str) -> None:
    assert "whose files are programs" in brought_problem(name)
    assert not brought_problem("a/.gitignore")
    assert brought_problem("../x")


def test_names_of_our_own_are_reserved_whatever_their_case() -> None:
    assert name_problem(".fetch/source.json", [".fetch/"])
    for name in (".FETCH/a", ".fetch", ".fetch./a", ".fetch /a", ".fe\u200btch/a", "\uff0efetch/a", ".\uff26etch/a"):
        assert "a name of our own" in name_problem(name, [".fetch/"]), name
    assert not name_problem("a/.fetch/source.json", [".fetch/"])


PARTS = (
    st.sampled_from(
        ["..", ".", "", "a", "b", "\0", "\\", "C:", "\n", "/", "~", "x" * 300, "\uff0e", "\u200b", " ", "CON", "\ud800"]
    )
    | st.text(max_size=4)
    | st.text(st.characters(categories=["Cf", "Zs", "Po", "Mn"]), max_size=4)
)


@settings(max_examples=number(500, whole=5000))
@given(st.lists(st.lists(PARTS, max_size=3).map("".join), max_size=6).map("/".join) | st.text())
def test_s02_an_accepted_name_lies_below_the_folder(name: str) -> None:
    folder = Path("/some/folder")
    if not name_problem(name):
        path = path_below(folder, name)
        assert path.resolve().is_relative_to(folder)
        assert path != folder
        assert str(path) == f"{folder}/{name}"
        os.fsencode(path)
        for part in name.split("/"):
            assert unicodedata.normalize("NFKC", part).strip(" .")
            assert part.isprintable() or not any(unicodedata.category(it) == "Cc" for it in part)


@settings(max_examples=number(300, whole=3000))
@given(st.lists(st.sampled_from(["", "\u200b", " ", "."]), min_size=8, max_size=8), st.lists(st.booleans(), min_size=6))
def test_s03_no_spelling_of_a_reserved_name_passes(between: list[str], upper: list[bool]) -> None:
    letters = [it.upper() if up else it for it, up in zip("fetch", upper, strict=False)]
    middle = "".join(it + ("\u200b" if gap == "\u200b" else "") for it, gap in zip(letters, between, strict=False))
    assert name_problem(f".{middle}{''.join(between[5:])}/source.json", [".fetch/"])


@settings(max_examples=number(300, whole=3000))
@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join), max_size=6))
def test_files_that_cannot_lie_in_one_folder_are_known(paths: list[str]) -> None:
    inside = any(one != other and other.startswith(f"{one}/") for one in paths for other in paths)
    assert bool(paths_problem(paths)) == (inside or len(set(paths)) < len(paths))
