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
    *("break_down", "look", "steer", "resume_proof", "s3_home", "place", "registry", "agreement", "ending", "starter"),
    *("tolerance", "published"),
}
"""Names of modules and classes that the field has other terms for."""
RETIRED_WORDS = {
    *("agreement", "cadence", "courier", "couriers", "ending", "freshness", "home", "inquest", "liveness"),
    *("mirror", "patience", "place", "places", "pulse", "rehearsal", "review", "ship", "shipper", "shipping", "sink"),
    *("sinks", "starter", "steer", "tolerance", "trouble", "upstreams", "verdict", "verdicts"),
}
"""Words that no module, class or function has in its name: most have no other meaning in the field."""
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
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_TEST_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
_NEW_BLOCK = re.compile(r"[-*+|#>] ?|```|\d+\. ")
"""How a line of a page begins that does not continue the one before."""
_CODE = re.compile(r"\{[^{}]*\}|``[^`]*``|`[^`]*`")
"""Names of code inside a text."""


@cache
def texts() -> dict[str, list[tuple[int, str]]]:
    """File -> its texts with their first lines: a page's paragraphs, a module's comments and strings."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    found = {str(it.relative_to(ROOT)): paragraphs(it.read_text()) for it in pages}
    for path in (ROOT / "sm_llm").rglob("*.py"):
        found[str(path.relative_to(ROOT))] = texts_of(path.read_text())
    return found


def paragraphs(page: str) -> list[tuple[int, str]]:
    """A page's paragraphs, entries of lists and rows of tables, each in one line: a word may be wrapped."""
    found: list[tuple[int, str]] = []
    is_open = False
    for number, line in enumerate(page.splitlines(), 1):
        text = line.strip()
        if is_open and text and not _NEW_BLOCK.match(text):
            found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
        elif text:
            found.append((number, text))
        is_open = bool(text) and not text.startswith(("|", "#", "```"))
    return found


def texts_of(source: str) -> list[tuple[int, str]]:
    """A module's comments, each with the lines that continue it, and its strings, joined where Python joins them."""
    found: list[tuple[int, str]] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, number = token.string.lstrip("# "), token.start[0]
            if found and last == number - 1 and token.line.lstrip().startswith("#"):
                found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
            else:
                found.append((number, text))
            last = number
    for node in ast.walk(ast.parse(source)):
        if (isinstance(node, ast.expr)) and (text := string_of(node)):
            found.append((node.lineno, " ".join(text.split())))
    return found


def string_of(node: ast.expr) -> str:
    """The text of a string, whose parts may be names or sums; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(string_of(it) or "{}" for it in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = string_of(node.left), string_of(node.right)
        return "".join(it or "{}" for it in parts) if any(parts) else ""
    return ""


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


@cache
def docstrings_of_tests() -> list[tuple[str, str]]:
    """File and text of every docstring of the tests."""
    own = [it for it in (ROOT / "tests").rglob("*.py") if it != Path(__file__)]
    return [(str(it.relative_to(ROOT)), " ".join(text.split())) for it in own for text in docstrings(it.read_text())]


@pytest.mark.parametrize("word", WORDS)
def test_a_house_word_stays_out_of_the_docstrings_of_tests(word: str) -> None:
    hits = [f"{file}: {text}" for file, text in docstrings_of_tests() if is_in(word, text)]
    assert not hits, f"write {WORDS[word]}:\n" + "\n".join(hits)


def test_words_are_found_in_comments_strings_and_docstrings_alone() -> None:
    source = 'told = goes_on = 1  # it goes on\nprint(f"x is told {told}")\n\ndef f():\n    """It\n    is mended."""\n'
    lines = texts_of(source)
    assert sorted({number for number, line in lines if any(is_in(word, line) for word in WORDS)}) == [1, 2, 5]


@pytest.mark.parametrize(
    "source",
    [
        "# It looks\n# at the store.\n",
        'x = "it looks " "at it"\n',
        'x = f"{name} goes" f" on"\n',
        'x = "it is mend" + "ed"\n',
        'def f():\n    """It goes\n\ton."""\n',
    ],
)
def test_a_word_over_several_lines_or_parts_is_found(source: str) -> None:
    assert any(is_in(word, text) for _, text in texts_of(source) for word in WORDS)


def test_a_word_over_two_lines_of_a_page_is_found_and_entries_of_lists_are_apart() -> None:
    found = paragraphs("The job looks\nat it.\n\n- what looks\n- at\n")
    assert [number for number, text in found if any(is_in(word, text) for word in WORDS)] == [1]


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


def words_of(name: str) -> list[str]:
    """The words of an identifier, lower case: of ``HangReport`` and of ``hang_report``."""
    return [it.lower() for it in _WORD.findall(name)]


def retired(module: str, tree: ast.Module) -> list[str]:
    """The module, its classes and its functions with a name that the field has another term for."""
    name = module.rpartition(".")[2]
    found = [module] if is_retired(name) or RETIRED_WORDS & set(words_of(name)) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (is_retired(node.name) or RETIRED_WORDS & set(words_of(node.name))):
            found.append(f"{module}.{node.name}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and RETIRED_WORDS & set(words_of(node.name)):
            found.append(f"{module}.{node.name}")
    return found


def is_retired(name: str) -> bool:
    return "_".join(words_of(name)) in NAMES


def test_no_module_class_or_function_has_a_name_that_the_field_has_another_term_for() -> None:
    assert not [it for module, tree in modules().items() for it in retired(module, tree)]


def test_a_retired_name_is_found_in_modules_classes_and_functions() -> None:
    source = (
        "class Place: ...\nclass _Ending: ...\nclass PlaceCheck: ...\ndef trouble(): ...\ndef await_verdicts(): ...\n"
    )
    assert retired("runs.store", ast.parse(source)) == [
        f"runs.store.{it}" for it in ("Place", "_Ending", "PlaceCheck", "trouble", "await_verdicts")
    ]
    assert retired("runs.courier", ast.parse("def begin(): ...")) == ["runs.courier"]


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
