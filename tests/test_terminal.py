"""Foreign text loses what a terminal acts upon; printed commands can be pasted."""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sm_llm
from sm_llm.launcher.display.console import CleanConsole
from sm_llm.terminal import CleanStream, clean, counted, exact, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

SEQUENCES = [
    "\x1b]0;TITLE\x1b\\", "\x1b]0;TITLE\x07", "\x1b[2J", "\x1b[1;1H", "\x1b]52;c;eA==\x07", "\x1bP1$r\x1b\\", "\x1bc",
    "\x1b(0", "\x9b31m", "\x9d0;x\x9c", "\x1b_x\x1b\\", "\x1b^x\x1b\\", "\x1bXx\x1b\\", "\x07", "\x08", "\r", "\x7f",
    "\u202e", "\u2066", "\u200b", "\u2028", "\ufeff", "\x1b[38;5;1m", "\x1b[?1049h", "\x1b", "\x85", "\U000e0041",
    "\xad", "\u034f", "\u115f", "\u180e", "\u200d", "\u3164", "\ufe0f", "\uffa0", "\ufff9", "\U000e0100",
]  # fmt: skip
FORBIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b\u200e\u200f\u2028\u2029]")
SOURCES = sorted(Path(sm_llm.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_s14_a_control_sequence_is_taken_out_and_the_text_around_it_stays(sequence: str) -> None:
    assert clean(f"before{sequence}\n\tafter é 漢 🙂") == "before\n\tafter é 漢 🙂"


def test_s14_a_sequence_that_does_not_end_hides_nothing_after_it() -> None:
    assert clean("\x1b]0;error: the next line\nis shown") == "0;error: the next line\nis shown"


@given(st.text(st.characters() | st.sampled_from("\x1b[]\\;0m\x9b\x9d\x07\u202e"), max_size=60))
@example("\x1b\x1b[2J[2J")
@example("\x1b\x1b]0;x\x07]0;x\x07")
def test_s14_no_text_keeps_a_control_character(text: str) -> None:
    found = clean(text)
    assert not FORBIDDEN.search(found)
    found.encode()
    assert clean(found) == found


def test_s14_a_long_text_of_beginnings_of_sequences_takes_no_time_to_speak_of() -> None:
    for begin in ("\x1b]", "\x9d", "\x1b[", "\x9b0", "\x1b "):
        assert "\x1b" not in clean(begin * 500_000)


@given(st.lists(st.text(max_size=12), max_size=4))
@example(["=ls", "~", "!!", "$(id)", "`id`", "a b", "'", '"', "", "-x", "a\nb", "$'x'", "\\"])
def test_s19_a_shell_reads_back_the_words_that_were_quoted(words: list[str]) -> None:
    words = [clean(it) for it in words]
    printed = quoted(*words)
    assert clean(printed) == printed
    assert shlex.split(printed) == words


@pytest.mark.parametrize(
    "word", ["x\x1b]0;T\x07y", "a\u202eb'\\c", "\x07", "q'\x9b2J", "no\udcffutf8\x1b", "json's \ud800"]
)
def test_s19_a_word_that_a_terminal_would_not_show_is_spelled_out_for_bash(word: str) -> None:
    printed = quoted(word)
    assert clean(printed) == printed
    done = subprocess.run(["bash", "-c", f"printf %s {printed}"], capture_output=True, check=True)
    escaped = "surrogatepass" if "\ud800" in word else "surrogateescape"
    assert done.stdout == word.encode("utf-8", escaped)


def test_s14_a_console_shows_its_own_styles_and_none_of_a_texts() -> None:
    from rich.table import Table
    from rich.text import Text

    stream = io.StringIO()
    console = CleanConsole(stream, 60)
    console._force_terminal, console._color_system = True, 1  # type: ignore[assignment]  # a terminal with colours
    evil = "".join(SEQUENCES) + "[bold]m[/bold][link=http://evil]l[/link]:smile:"
    table = Table(title=evil)
    table.add_column(evil)
    table.add_row(Text(evil, "red"))
    table.add_row(evil)
    console.print(table)
    console.print(evil, style="bold", soft_wrap=True)
    console.print(Text("x", "link http://evil"))
    shown = stream.getvalue()
    assert "\x1b[" in shown, "styles of ours"
    assert not FORBIDDEN.search(re.sub(r"\x1b\[[0-9;]*m", "", shown))
    assert "[bold]m[/bold]" in shown
    assert ":smile:" in shown


def test_s14_what_is_written_to_the_streams_of_a_command_is_clean() -> None:
    raw = io.TextIOWrapper(io.BytesIO(), "ascii")
    stream = CleanStream(raw)
    print("a\x1b]0;T\x07b é \udcff", file=stream)
    stream.writelines(["\x1b[2J", "c\n"])
    assert raw.buffer.getvalue().decode() == "ab é \ufffd\nc\n"  # type: ignore[attr-defined]


PRINTERS = ("print", "typer.echo", "typer.secho", "click.echo", "sys.stderr.write", "Console", "rich.print")


def printing(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each call that prints."""
    for it in ast.walk(tree):
        if isinstance(it, ast.Call) and (name := ast.unparse(it.func)) in PRINTERS:
            yield it.lineno, name


PRINT = ("terminal.py", "launcher/backends/slurm/setup/environment_check.py")
"""The one way, and a program that prints into the log of a job on a cluster, which its launcher cleans."""


def test_s14_verbs_and_launcher_print_in_one_way_only() -> None:
    wrong = []
    for path in SOURCES:
        location = path.relative_to(Path(sm_llm.__file__).parent).as_posix()
        if location.startswith(("worker/", "contract/")):  # what runs in a job prints into a log
            continue
        tree = ast.parse(path.read_text())
        found = printing(tree)
        wrong += [f"{location}:{line} {name}" for line, name in found if location not in PRINT or name != "print"]
    assert wrong == []


def unquoted(text: ast.JoinedStr) -> list[str]:
    """What a text fills into a command of ours without quoting it for a shell."""
    found, in_command = [], False
    for part in text.values:
        if isinstance(part, ast.Constant):
            rest = str(part.value)
            begins = [it.end() for it in re.finditer(r"sm-llm [a-z]", rest)]
            in_command = bool(begins) or in_command
            if in_command and re.search(r"[,;()\n]|\. |: ", rest[begins[-1] if begins else 0 :]):
                in_command = False
        elif in_command and isinstance(part, ast.FormattedValue):
            name = ast.unparse(part.value)
            if not name.startswith("quoted("):
                found.append(name)
    return found


def test_s19_everything_that_is_filled_into_a_printed_command_is_quoted() -> None:
    wrong, seen = [], 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                seen += "sm-llm " in ast.unparse(node)
                wrong += [f"{path.name}:{node.lineno} {name}" for name in unquoted(node)]
    assert wrong == []
    assert seen > 30


def test_s19_no_command_is_put_together_without_quotes() -> None:
    joined = re.compile(r"\" \"\.join\((?:list\()?(?:argv|command|words)|' '\.join\(argv")
    assert [path.name for path in SOURCES if joined.search(path.read_text())] == []


def test_a_count_has_its_noun_in_the_right_form() -> None:
    assert [counted(1, "process"), counted(0, "file"), counted(12345, "box")] == [
        "1 process",
        "0 files",
        "12,345 boxes",
    ]
    wrong = []
    for file in Path(sm_llm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            ends = (
                {getattr(it, "value", None) for it in (node.body, node.orelse)}
                if isinstance(node, ast.IfExp)
                else set()
            )
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if ends in ({"", "s"}, {"", "es"}) or (file.name != "terminal.py" and re.search(r"\w\(e?s\)", text)):
                wrong.append(f"{file.name}:{node.lineno}")  # type: ignore[attr-defined]
    assert not wrong, "sm_llm.terminal.counted writes plurals"


def test_a_number_has_all_its_digits() -> None:
    found = [exact(it) for it in (2**24, 2.0**24, 0.1, 1e9, 1e-8, float("inf"))]
    assert found == ["16,777,216", "16,777,216", "0.1", "1,000,000,000", "1e-08", "inf"]
