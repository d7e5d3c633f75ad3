"""Processes of ours never import from the folder that somebody happens to stand in."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sm_llm
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

Fakes = Any
SHADOWED = ("yaml", "random", "select", "queue", "torch", "selectors", "socket")
USERS_PROGRAM = "contract/program.py"
"""Starts the program of a script job, which imports what lies beside it."""


def test_s04_a_run_started_beside_files_named_like_modules_runs_none_of_them(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = tmp_path / "somebody-elses"
    location.mkdir()
    mark = str(tmp_path / "EXECUTED")
    for name in SHADOWED:
        (location / f"{name}.py").write_text(f"open({mark!r}, 'a').write({name!r})\nraise ImportError\n")
    monkeypatch.chdir(location)
    fakes.use("put(None)")
    run = fakes.launch()
    assert fakes.end(run) is RunState.COMPLETED, run.logs()
    assert not (tmp_path / "EXECUTED").exists()


def started_programs() -> Iterator[tuple[str, list[str]]]:
    """File, and what follows ``sys.executable`` in every list or tuple of the package's source."""
    root = Path(sm_llm.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
            for position, word in enumerate(words):
                if isinstance(word, ast.Attribute) and ast.unparse(word) == "sys.executable":
                    following = [it.value for it in words[position + 1 :] if isinstance(it, ast.Constant)]
                    yield path.relative_to(root).as_posix(), following


def test_s04_every_interpreter_that_we_start_is_made_not_to_look_in_the_working_folder() -> None:
    found = [(file, words) for file, words in started_programs() if file != USERS_PROGRAM]
    assert len(found) >= 7
    assert [(file, words) for file, words in found if words[:1] != ["-P"]] == []


def test_s04_interpreters_in_scripts_for_a_shell_are_too() -> None:
    root = Path(sm_llm.__file__).parent
    starts = [
        (path.relative_to(root).as_posix(), match[1])
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.j2")])
        for match in re.finditer(r"python[0-9.]*[\"'}]*[\"'] (-\w)(?: -\w)* \w", path.read_text())
    ]
    assert len(starts) >= 2
    assert [it for it in starts if it[1] != "-P"] == []


def test_s05_processes_of_an_attempt_share_a_secret_that_is_written_nowhere(fakes: Fakes, tmp_path: Path) -> None:
    fakes.use(
        "import pathlib, hashlib; secret = os.environ['SM_LLM_STORE_SECRET']; assert len(secret) == 32\n"
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(secret); put(None)"
    )
    run = fakes.launch()
    assert fakes.end(run) is RunState.COMPLETED, run.logs()
    secret = (tmp_path / "seen").read_bytes()
    assert not [path for path in run.root.rglob("*") if path.is_file() and secret in path.read_bytes()]
