"""Documents on their way from a file to the encoder: gathered into batches, the unusable ones counted by reason."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH_DOCUMENTS = 1024
BATCH_BYTES = 8_000_000
"""A batch of documents ends at whichever comes first; so memory is bounded by this or by the longest document."""


@dataclass
class Rejections:
    """Documents that could not be used: how many for each reason, and where the first one was."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, location: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, location)


@dataclass(frozen=True)
class LongText:
    """A document that is not held in memory: ``parts()`` reads it again, in pieces of whole lines where it has some."""

    parts: Callable[[], Iterator[str]]
    size: int
    """UTF-8 bytes."""


@dataclass(frozen=True)
class Documents:
    """A batch of documents of one file. ``lines`` are 1-based lines, rows or sections; ``fraction`` of it is read."""

    texts: list[str]
    sizes: list[int]
    """UTF-8 bytes of each text."""
    file: str
    lines: list[int]
    fraction: float
    long: LongText | None = None
    """The only document of its batch, if it is there."""


class Collector:
    """Gathers usable texts into batches and counts the others."""

    def __init__(self, file: str, rejections: Rejections) -> None:
        self._file = file
        self._rejections = rejections
        self._texts: list[str] = []
        self._sizes: list[int] = []
        self._lines: list[int] = []
        self._bytes = 0
        self._field_seen = False
        self._without_field: tuple[int, list[str]] | None = None

    def add(self, line: int, value: Any, fraction: float) -> Documents | None:
        """Take one value of the text field; returns a batch when one is full."""
        self._field_seen = True
        # A long text is the only document of its file, so no gathered batch has to come before it.
        if isinstance(value, LongText):
            return Documents([], [], self._file, [line], fraction, value)
        size, reason = usable(value)
        if reason:
            self.reject(reason, line)
            return None
        self._texts.append(value)
        self._sizes.append(size)
        self._lines.append(line)
        self._bytes += size
        full = len(self._texts) >= BATCH_DOCUMENTS or self._bytes >= BATCH_BYTES
        return self.flush(fraction) if full else None

    def reject(self, reason: str, line: int) -> None:
        self._rejections.add(reason, f"{self._file}:{line}")

    def missing_field(self, line: int, fields: list[str]) -> None:
        self.reject("missing_field", line)
        self._without_field = self._without_field or (line, fields)

    def check_field(self, text_field: str) -> None:
        """A field that is never there is a mistake in the specification, not in single rows."""
        if self._field_seen or self._without_field is None:
            return
        line, fields = self._without_field
        raise DataError(
            f"{self._file}:{line}: no field {text_field!r} here or in any row of this file; "
            f"fields found: {', '.join(fields) or 'none'}. Set task.text_field to the one that holds the text"
        )

    def flush(self, fraction: float) -> Documents | None:
        if not self._texts:
            return None
        batch = Documents(self._texts, self._sizes, self._file, self._lines, fraction)
        self._texts, self._sizes, self._lines, self._bytes = [], [], [], 0
        return batch


def usable(value: Any) -> tuple[int, str | None]:
    """(UTF-8 bytes, None), or (0, reason why this is not a document)."""
    if value is None:
        return 0, "null"
    if not isinstance(value, str):
        return 0, "not_text"
    if not value or value.isspace():
        return 0, "empty"
    if value.isascii():
        return len(value), None
    try:
        return len(value.encode("utf-8")), None
    except UnicodeEncodeError:  # a lone surrogate from a JSON escape; no tokenizer takes it
        return 0, "not_unicode"


def is_held_out(text: str | Iterable[str], seed: int, fraction: float) -> bool:
    """Whether a document, or its parts, belong to validation: by a hash of the text, so equal documents stay on one
    side."""
    if fraction <= 0:
        return False
    # Keyed with the seed: another seed holds out other documents.
    hashed = hashlib.blake2b(digest_size=8, key=seed.to_bytes(16, "little"))
    for part in [text] if isinstance(text, str) else text:
        hashed.update(part.encode("utf-8"))
    return int.from_bytes(hashed.digest(), "little") < fraction * 2.0**64


def no_documents(sources: list[str], rejections: Rejections) -> str:
    """The message for sources without one usable document."""
    reasons = ", ".join(
        f"{count} {reason} (first: {rejections.first[reason]})" for reason, count in rejections.counts.items()
    )
    return f"no document in {', '.join(sources)}: {f'rejected {reasons}' if reasons else 'the files are empty'}"
