"""Encodes a text piece by piece, to the very ids that the whole would give."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sm_llm.data.prepare.encode import Encoder
    from sm_llm.data.prepare.pack import Tokens

PIECE = 1 << 20
"""Characters that are encoded at once."""
# Characters on both sides of a cut that are encoded with and without it.
_CONTEXT = 1024
_TRIES = 8
_CUTS = (
    re.compile(r"(?<=\S\n)(?=[^\W\d_])"),  # after the end of a line
    re.compile(r"(?<=\w)(?= [^\W\d_])"),  # before the blank in front of a word
    re.compile("(?<=[\u3002\uff01\uff1f])(?=\\w)"),  # after the end of a Chinese or Japanese sentence
)


def encode_long(encoder: Encoder, parts: Iterable[str]) -> Iterator[Tokens]:
    """Ids of the text that ``parts`` make up, int32 arrays one after another.

    It is cut only where encoding the text around a cut in two gives the same ids as in one; a text without such a place
    is encoded as a whole. Each piece is encoded behind the last character before it, whose ids are dropped: tokenizers
    treat the beginning of a text in a way of its own.
    """
    lead, text = "", ""
    wanted = PIECE
    for part in parts:
        text += part
        if len(text) < wanted:
            continue
        cut = _find_cut(encoder, text)
        if cut is None:
            # No good place in this piece; one is searched for in the next.
            wanted += PIECE
            continue
        yield _ids(encoder, lead, text[:cut])
        lead, text, wanted = text[cut - 1], text[cut:], PIECE
    if text:
        yield _ids(encoder, lead, text)


def _ids(encoder: Encoder, lead: str, text: str) -> Tokens:
    # In one call: the ids of the lead alone are counted, and as many are dropped from the front.
    ids, offsets = encoder.encode([lead + text, lead])
    return ids[offsets[2] - offsets[1] : offsets[1]]


def _find_cut(encoder: Encoder, text: str) -> int | None:
    """The last good place for a cut in the second half of the newest piece."""
    # The last _CONTEXT characters are no candidates: what follows them is not read yet.
    begin, end = len(text) - PIECE // 2, len(text) - _CONTEXT
    for kind in _CUTS:
        cuts = [match.start() for match in kind.finditer(text, max(begin, 1), max(end, 1))]
        # From the last place backwards; few are tried, because each costs four encodings.
        for cut in cuts[: -_TRIES - 1 : -1]:
            if _changes_nothing(encoder, text[max(cut - _CONTEXT, 0) : cut], text[cut : cut + _CONTEXT]):
                return cut
    return None


def _changes_nothing(encoder: Encoder, left: str, right: str) -> bool:
    lead = left[-1]
    ids, offsets = encoder.encode([left + right, left, lead + right, lead])
    # The lead must keep its ids in front of the right half, and both halves together must give the ids of the whole.
    whole, first, second, dropped = (ids[offsets[at] : offsets[at + 1]] for at in range(4))
    rest = second[len(dropped) :]
    return np.array_equal(second[: len(dropped)], dropped) and np.array_equal(whole, np.concatenate([first, rest]))
