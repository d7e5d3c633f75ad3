"""Which tokens of a sequence a context-parallel process has."""

from __future__ import annotations

import torch


def chunk_positions(length: int, degree: int, rank: int) -> torch.Tensor:
    """Positions of the two chunks of one of ``degree`` processes, each 1 / (2 degree) of the sequence.

    The r-th from the beginning and the r-th from the end: under a causal mask all then have as much to do.
    """
    if degree == 1:
        return torch.arange(length)
    size = length // (2 * degree)
    # A late token attends to more than an early one; a pair from both ends always has the same sum.
    first, second = rank * size, (2 * degree - 1 - rank) * size
    return torch.cat([torch.arange(first, first + size), torch.arange(second, second + size)])
