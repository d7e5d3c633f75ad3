"""Texts and names use the field's terms: house words stay out of docs, messages, docstrings, comments and names."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

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
}
"""Word -> what to write in its place."""
NAMES = {
    *("courier", "shipper", "shipping", "mirror", "run_home", "homes", "liveness", "segments", "stock", "trouble"),
    *("begin", "stage", "closing", "verdict", "review", "reporting", "lines", "patience", "upstream", "rehearsal"),
    *("board", "gathering", "inquest", "stacks", "pulse", "freshness", "cadence", "finite", "feed", "sinks"),
    *("break_down", "look", "steer"),
}
"""Names of modules that the field has other terms for."""
KNOWN_NAMES = {
    "cli/begin.py",
    "cli/look.py",
    "cli/steer.py",
    "contract/stock.py",
    "launcher/backends/local/rehearsal.py",
    "launcher/backends/local/reporting.py",
    "launcher/display/closing.py",
    "launcher/display/lines.py",
    "launcher/observe/patience.py",
    "launcher/planning/upstream.py",
    "launcher/stage.py",
    "runs/events/trouble.py",
    "runs/liveness.py",
    "runs/replication/courier.py",
    "runs/replication/mirror.py",
    "runs/replication/segments.py",
    "runs/replication/shipper.py",
    "runs/run_home.py",
    "spec/sinks.py",
    "worker/publishing/freshness.py",
    "worker/publishing/shipping.py",
    "worker/runtime/board.py",
    "worker/runtime/break_down.py",
    "worker/runtime/gathering.py",
    "worker/runtime/inquest.py",
    "worker/runtime/pulse.py",
    "worker/runtime/stacks.py",
    "worker/trackers/sinks.py",
    "worker/training/cadence.py",
    "worker/training/feed.py",
    "worker/training/finite.py",
}
"""Modules that still have one of these names. None is added; one that is renamed is taken off this list."""
_PATTERNS = {word: re.compile(rf"\b{word}\b", re.IGNORECASE) for word in WORDS}


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


def test_words_are_found_in_comments_strings_and_docstrings_alone() -> None:
    source = 'told = goes_on = 1  # it goes on\nprint(f"x is told {told}")\n\ndef f():\n    """It\n    is mended."""\n'
    lines = lines_of(source)
    assert [number for number, line in lines if any(is_in(word, line) for word in WORDS)] == [1, 2, 6]


def test_no_module_gets_a_name_that_the_field_has_another_term_for() -> None:
    modules = (it.relative_to(ROOT / "sm_llm") for it in (ROOT / "sm_llm").rglob("*.py"))
    assert {str(it) for it in modules if it.stem in NAMES} <= KNOWN_NAMES
