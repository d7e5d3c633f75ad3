"""Texts and names use the field's terms: house words stay out of docs, messages, docstrings, comments and names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parent.parent
WORDS = {
    r"told|tells|says|said|heard": "reports, logs, raises, prints, returns",
    r"(look|looks|looked|looking) at": "read, check, inspect",
    r"(goes|go|went|gone|going) on": "continues",
    r"mend(s|ed)?": "fixed",
    r"(deals?|dealt) out": "resharded, distributed",
    r"sets? aside": "quarantined",
    r"(taken|takes?|took) back": "rolled back, released",
    r"pretend(s|ed)?": "simulated",
    r"is no (valid|name|address|prefix|folder|program|number|input|part|fault|place)": "is not a ...",
    r"mint(s|ed)?": "generate",
    r"rehears(e|es|ed|als)": "SageMaker emulation",
    r"(the )?doors? of": "interface",
    r"lines? of images": "image stack",
    r"wings?": "launcher and worker",
    r"verdict": "outcome",
    r"couriers?": "periodic task",
    r"inquest": "hang report",
}
"""Word -> what to write in its place."""
NAMES = {
    *("courier", "shipper", "shipping", "mirror", "run_home", "homes", "liveness", "segments", "stock", "trouble"),
    *("begin", "stage", "closing", "verdict", "review", "reporting", "lines", "patience", "upstream", "rehearsal"),
    *("board", "gathering", "inquest", "stacks", "pulse", "freshness", "cadence", "finite", "feed", "sinks"),
    *("break_down", "look", "steer", "resume_proof", "s3_home", "place", "registry"),
}
"""Names of modules that the field has other terms for."""
TASKS_AND_VERBS = ("cli", "worker.tasks")
"""Packages whose modules are named after the verbs and the task kinds of users."""
PARTS = {
    *("api", "base", "table"),
    *("backend", "cluster", "container", "jobs", "options", "paths", "plan_checks", "render", "shell", "states"),
    *("submit", "target", "transport", "workflow", "workflows"),
    *("manifest", "node", "schema"),
    *("device", "library", "model", "shards", "strategy"),
}
"""Names that modules of one purpose have in several packages: parts of a backend, a strategy, an interface."""
PART_CLASSES = {"Cluster", "LogCopy"}
"""Classes of one purpose that several backends have."""
_PATTERNS = {word: re.compile(rf"\b{word}\b", re.IGNORECASE) for word in WORDS}


IDENTIFIERS = {
    *("aside", "dealt", "goes", "heard", "look", "looked", "looks", "mended", "mint", "said", "says", "tells", "told"),
    *("home", "homes", "place", "placed", "places", "say"),
}
"""Words that no function, argument or variable has in its name, in the package, its tests and benchmarks."""
ALLOWED_IDENTIFIERS = {"look_up", "looks_up", "looked_up", "_LOOKS_UP"}
"""A look-up is the field's own term."""
_TEST_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
_CODE = re.compile(r"\{[^{}]*\}|``[^`]*``|`[^`]*`")
"""Names of code inside a text."""


@cache
def texts() -> dict[str, list[tuple[int, str]]]:
    """File -> its lines of text with their numbers: whole pages, and of a module its comments and strings."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    found = {str(it.relative_to(ROOT)): list(enumerate(it.read_text().splitlines(), 1)) for it in pages}
    for path in (ROOT / "sm_llm").rglob("*.py"):
        found[str(path.relative_to(ROOT))] = lines_of(path.read_text())
    return found


def lines_of(source: str) -> list[tuple[int, str]]:
    """The lines of a module's comments and strings."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            found += list(enumerate(token.string.splitlines(), token.start[0]))
    return found


def is_in(word: str, line: str) -> bool:
    return _PATTERNS[word].search(_CODE.sub("", line)) is not None


@pytest.mark.parametrize("word", WORDS)
def test_a_house_word_stays_out(word: str) -> None:
    hits = [
        f"{file}:{number}: {line.strip()[:110]}"
        for file, lines in texts().items()
        for number, line in lines
        if is_in(word, line)
    ]
    assert not hits, f"write {WORDS[word]}:\n" + "\n".join(hits)


@pytest.mark.parametrize("word", WORDS)
def test_a_house_word_stays_out_of_the_names_of_tests(word: str) -> None:
    files = {str(it.relative_to(ROOT)): it.read_text() for it in (ROOT / "tests").rglob("test_*.py")}
    names = ((file, name) for file, text in files.items() for name in _TEST_NAME.findall(text))
    hits = [f"{file}: {name}" for file, name in names if _PATTERNS[word].search(name.replace("_", " "))]
    assert not hits, f"write {WORDS[word]}:\n" + "\n".join(hits)


def docstrings(source: str) -> list[str]:
    """The docstrings of a module, of its classes and of its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for it in ast.walk(ast.parse(source)) if isinstance(it, kinds) and (text := ast.get_docstring(it))]


@pytest.mark.parametrize("word", WORDS)
def test_a_house_word_stays_out_of_the_docstrings_of_tests(word: str) -> None:
    own = {it: it.read_text() for it in (ROOT / "tests").rglob("*.py") if it != Path(__file__)}
    hits = [f"{it.relative_to(ROOT)}: {text}" for it, source in own.items() for text in docstrings(source)
            if is_in(word, text)]  # fmt: skip
    assert not hits, f"write {WORDS[word]}:\n" + "\n".join(hits)


def test_words_are_found_in_comments_strings_and_docstrings_alone() -> None:
    source = 'told = goes_on = 1  # it goes on\nprint(f"x is told {told}")\n\ndef f():\n    """It\n    is mended."""\n'
    lines = lines_of(source)
    assert [number for number, line in lines if any(is_in(word, line) for word in WORDS)] == [1, 2, 6]


def odd_identifiers(source: str) -> set[str]:
    """Names in ``source`` with a word of ``IDENTIFIERS``; test functions, whose names are sentences, aside."""
    # The folder of a user is what the standard library calls it.
    tokens = tokenize.generate_tokens(io.StringIO(source.replace("Path.home", "Path")).readline)
    names = {it.string for it in tokens if it.type == tokenize.NAME and not it.string.startswith("test_")}
    return {it for it in names - ALLOWED_IDENTIFIERS if IDENTIFIERS & set(it.lower().split("_"))}


def test_identifiers_are_standard_terms() -> None:
    files = [it for folder in ("sm_llm", "tests", "benchmarks", "entrypoints") for it in (ROOT / folder).rglob("*.py")]
    # The doubles of libraries have the names of these libraries.
    doubles = [ROOT / "tests" / "fixtures" / it for it in ("nxd_double", "smp_double")]
    own = [it for it in files if not any(it.is_relative_to(double) for double in doubles)]
    found = {str(it.relative_to(ROOT)): odd_identifiers(it.read_text()) for it in own}
    assert {file: names for file, names in found.items() if names} == {}


def test_an_identifier_with_a_house_word_is_found() -> None:
    source = "def f(said):\n    goes_on = look_up(said)\ndef test_a_look():\n    _LOOK = Path.home(job_home, place)\n"
    assert odd_identifiers(source) == {"said", "goes_on", "_LOOK", "job_home", "place"}


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name below the package -> syntax tree."""
    paths = (it for it in sorted((ROOT / "sm_llm").rglob("*.py")) if it.name != "__init__.py")
    names = ((".".join(it.relative_to(ROOT / "sm_llm").with_suffix("").parts), it) for it in paths)
    return {name: ast.parse(path.read_text()) for name, path in names}


def shared(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that are given more than once, with where: of pairs (name, where)."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, where in named:
        found[name].append(where)
    return {name: holders for name, holders in found.items() if len(holders) > 1}


def test_no_module_has_a_name_that_the_field_has_another_term_for() -> None:
    assert not [name for name in modules() if name.rpartition(".")[2] in NAMES]


def test_a_module_name_has_one_meaning() -> None:
    named = (name.rpartition(".") for name in modules() if not name.startswith(TASKS_AND_VERBS))
    assert not shared((name, package) for package, _, name in named if name not in PARTS)


def test_a_class_name_has_one_meaning() -> None:
    classes = (
        (node.name, module)
        for module, tree in modules().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in PART_CLASSES
    )
    assert not shared(classes)


def test_a_name_that_is_given_twice_is_found() -> None:
    assert shared([("Place", "worker"), ("Start", "worker"), ("Place", "data")]) == {"Place": ["worker", "data"]}
