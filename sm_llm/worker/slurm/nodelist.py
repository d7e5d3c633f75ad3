"""Slurm's compressed lists of nodes: ``a[01-03,7],b5``."""

from __future__ import annotations

import re
from itertools import product

_PART = re.compile(r"((?:\[[0-9,-]+\]|[^\[\],])+)(?:,|$)")
_PIECE = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST = 100_000


def expand(text: str) -> list[str]:
    """The names, in the order of the list. Raises ``ValueError`` for text that is not such a list."""
    names: list[str] = []
    position = 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            raise ValueError(f"{text!r} is not a list of nodes")
        pieces, count = [], 1
        for ranges, plain in _PIECE.findall(part[1]):
            pieces.append(_values(ranges) if ranges else [plain])
            count *= len(pieces[-1])
            # Counted before the names are made: a few ranges stand for more than fit into memory.
            if len(names) + count > _MOST:
                raise ValueError(f"{text!r} is not a list of nodes: it stands for more than {_MOST:,} names")
        names += ["".join(chosen) for chosen in product(*pieces)]
        position = part.end()
    if not names:
        raise ValueError(f"{text!r} is not a list of nodes")
    return names


def keeping_positions(names: list[str], before: list[str]) -> list[str]:
    """``names`` in an order in which those that are in ``before`` have the places they had; the others fill the rest.

    ``names`` must be in the same order on every node, for each derives its rank from the result.
    """
    ordered: list[str | None] = [it if it in names else None for it in before[: len(names)]]
    ordered += [None] * (len(names) - len(ordered))
    others = iter([it for it in names if it not in ordered])
    return [it if it is not None else next(others) for it in ordered]


def _values(ranges: str) -> list[str]:
    """Numbers keep their leading zeros: ``009-011`` is 009, 010, 011."""
    found: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(_MOST):
            raise ValueError(f"[{ranges}] is not a range of numbers")
        first, width = int(match[1]), len(match[1])
        numbers = range(first, int(match[2] or first) + 1)
        if len(found) + len(numbers) > _MOST:
            raise ValueError(f"[{ranges}] is not a range of at most {_MOST:,} numbers")
        found += [f"{number:0{width}}" for number in numbers]
    return found
