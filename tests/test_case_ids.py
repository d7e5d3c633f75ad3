"""The case ids in names of tests are those that ``tests/README.md`` explains."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ID = re.compile(r"_([A-Z]{1,2}|[a-z])(\d+)(?=_|$)")
WORDS = {"S3", "s3"}
"""Parts of names that only look like ids."""


def ids(name: str) -> list[str]:
    """Prefixes of the ids at the start of a test's name, one for each id."""
    found, at = [], len("test")
    while match := ID.match(name, at):
        if "".join(match.groups()) in WORDS:
            break
        found.append(match[1])
        at = match.end()
    return found


def test_ids_are_read_from_the_start_of_a_name() -> None:
    assert ids("test_F12_C9_a_variable") == ["F", "C"]
    assert ids("test_s05_it") == ["s"]
    assert ids("test_S303_odd") == ["S"]
    assert ids("test_s3_holds_no_secret") == ids("test_a_run_of_I1") == ids("test_two_gpus") == []


def test_every_prefix_is_explained_and_every_explained_prefix_is_used() -> None:
    text = (TESTS / "README.md").read_text()
    explained = set(re.findall(r"^\| `(\w+)` \| .* \| .* \|$", text, re.MULTILINE))
    names = [it for path in TESTS.rglob("test_*.py") for it in re.findall(r"def (test_\w+)", path.read_text())]
    assert {prefix for name in names for prefix in ids(name)} == explained
