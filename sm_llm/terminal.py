"""Text that reaches a terminal: without control sequences, quoted where it is to be pasted, quantities in words."""

from __future__ import annotations

import io
import math
import re
import shlex
import sys
import time

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
# Beyond it a float has not all whole numbers.
_EXACT = 2**53


def clean(text: str) -> str:
    """``text`` without control sequences and characters that a terminal acts upon or does not show.

    Newlines and tabs stay. What is no character, as in names of files that are not UTF-8, becomes U+FFFD.
    """
    # Nearly all lines are plain ASCII, for which this one search is enough.
    if _MAYBE.search(text) is None:
        return text
    return _LONE_SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def echo(*lines: object, err: bool = False) -> None:
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
        # zsh expands a bare ``=name`` to the path of a command.
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


def duration(seconds: float) -> str:
    """``95`` -> ``1m35s``."""
    if not math.isfinite(seconds):
        return "an unknown time"
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def moment(at: float) -> str:
    """Seconds since the epoch as local time: ``2026-01-31 12:00``."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def size(count: float) -> str:
    """Bytes in decimal units: ``73_950_000`` -> ``74.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def exact(value: float) -> str:
    """A number with all its digits, to be typed again without the commas: ``16_777_216`` -> ``16,777,216``."""
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < _EXACT)
    return f"{int(value):,}" if whole else repr(value)


def counted(amount: int, name: str) -> str:
    """``1, "process"`` -> ``1 process``; ``2, "process"`` -> ``2 processes``. ``name`` is a regular noun."""
    if amount == 1:
        return f"1 {name}"
    outcome = "es" if name.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{amount:,} {name}{outcome}"


def big(number: float) -> str:
    """A count for people: ``6_160_000`` -> ``6.16 M``."""
    for power, unit in zip(range(8, 0, -1), "YZEPTGMk", strict=True):
        if abs(number) >= 1000**power:
            return f"{number / 1000**power:.3g} {unit}"
    return f"{number:g}"
