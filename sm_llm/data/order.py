"""The order in which rows are visited, as a pure function of (seed, epoch, global sample index)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8  # even, so that halves of different width are back in place at the end
_MIN_BITS = 6  # a half of at least three bits, or the network could not mix at all
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64


def mix(words: _Words) -> _Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words that looks random."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stream_key(*numbers: int) -> _Words:
    """One 64-bit key, shape [1], for a sequence of whole numbers (seed, purpose, ...); order matters."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key + np.array([(number + _GOLDEN) % _WORD], np.uint64))
    return key


def row_indices(global_indices: npt.NDArray[Any], rows: int, seed: int, shuffle: bool) -> Ints:
    """Row numbers for global sample indices: sample ``g`` belongs to epoch ``g // rows``.

    Every epoch visits each of ``rows`` rows once. With ``shuffle`` the epoch's order is a keyed permutation: a
    Feistel network over the smallest power of two that holds ``rows``, with cycle walking (Black and Rogaway
    2002), so any index costs the same and nothing is stored. Shape and order of the argument are kept; int64.
    """
    if rows < 1:
        raise ValueError(f"an order needs at least one row, got {rows}")
    epoch, position = np.divmod(np.asarray(global_indices, np.int64), rows)
    if not shuffle or rows == 1:
        return position
    keys = mix(stream_key(seed) + epoch.astype(np.uint64) * np.uint64(_GOLDEN))
    flat = _permute(position.astype(np.uint64).ravel(), rows, keys.ravel())
    return flat.astype(np.int64).reshape(position.shape)


def _permute(position: _Words, rows: int, keys: _Words) -> _Words:
    """Walk each position through the network until it lands inside ``[0, rows)``; on average under two rounds."""
    bits = max(_MIN_BITS, (rows - 1).bit_length())
    value = _feistel(position, keys, bits)
    # The network permutes [0, 2**bits), so a walk that starts inside comes back inside, at the latest at its start: the
    # loop ends, and no two positions meet in one row.
    while (outside := value >= rows).any():
        value[outside] = _feistel(value[outside], keys[outside], bits)
    return value


def _feistel(value: _Words, keys: _Words, bits: int) -> _Words:
    """A permutation of ``[0, 2**bits)``; halves swap, and with them their widths, every round."""
    narrow, wide = bits // 2, bits - bits // 2
    left, right = value >> np.uint64(narrow), value & np.uint64(2**narrow - 1)
    for number in range(_ROUNDS):
        width = wide if number % 2 == 0 else narrow
        round_key = mix(keys + np.uint64(number * _GOLDEN % _WORD))
        scrambled = mix(right ^ round_key) >> np.uint64(64 - width)
        left, right = right, left ^ scrambled
    return (left << np.uint64(narrow)) | right
