"""Text that reaches a terminal: without control sequences, and quoted where it is to be pasted."""

from __future__ import annotations

import io
import re
import shlex
import sys

_SEQUENCES = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, clearing
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS …
    r"|\x1b[ -/]*[0-~]"
)
# C0 but tab and newline, delete, C1; marks and overrides of writing direction, line separators, tags; characters that
# take no place: joiners, fillers, selectors of variants, marks of annotations.
_CHARACTERS = (
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
_CONTROL = re.compile(f"{_SEQUENCES}|{_CHARACTERS}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAYBE = re.compile("[^\t\n\x20-\x7e]")


def clean(text: str) -> str:
    """``text`` without control sequences and characters that a terminal acts upon or does not show.

    Newlines and tabs stay. What is no character, as in names of files that are not UTF-8, becomes U+FFFD.
    """
    if _MAYBE.search(text) is None:
        return text
    return _LONE_SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def say(*lines: object, err: bool = False) -> None:
    """Print lines on standard output or standard error, ``clean``."""
    stream = sys.stderr if err else sys.stdout
    for line in lines:
        print(clean(str(line)), file=stream, flush=True)


def quoted(*words: object) -> str:
    """Words of a command, to be typed into a shell: ``shlex.split`` gives them back.

    A word with characters that a terminal would not show is written in the spelling of bash and zsh, ``$'…'``.
    """
    return " ".join(_quoted(str(word)) for word in words)


def _quoted(word: str) -> str:
    if clean(word) == word:
        return f"'{word}'" if word.startswith("=") and shlex.quote(word) == word else shlex.quote(word)
    shown = "".join(it if clean(it) == it and it not in "\\'" else _escaped(it) for it in word)
    return f"$'{shown}'"


def _escaped(character: str) -> str:
    # A byte of a name that is no UTF-8 is a surrogate from U+DC80 on; any other surrogate comes from JSON.
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", errors))


class CleanStream(io.TextIOWrapper):
    """A text stream that whatever is written to it reaches ``clean``; ``raw`` is the stream in whose place it is."""

    def __init__(self, raw: io.TextIOWrapper) -> None:
        encoding = "utf-8" if raw.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968") else raw.encoding
        super().__init__(
            raw.buffer, encoding, "backslashreplace", write_through=True, line_buffering=raw.line_buffering
        )
        self.raw = raw

    def close(self) -> None:
        """Only flush: the buffer belongs to ``raw``."""
        self.flush()

    def write(self, text: str) -> int:
        super().write(clean(text))
        return len(text)


def clean_streams() -> None:
    """Let everything that this process prints be ``clean``: also warnings, tracebacks and what libraries print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, CleanStream):
            setattr(sys, name, CleanStream(stream))
