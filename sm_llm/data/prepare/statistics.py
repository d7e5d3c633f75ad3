"""The account of a preparation: every document and token that came in was kept or dropped for a reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sm_llm.data.prepare.documents import Rejections

VERSION = 1


@dataclass(frozen=True)
class SplitStatistics:
    """Tokens of one split, end tokens included: ``tokens_in`` = ``tokens_kept`` + all of ``tokens_dropped``."""

    documents: int
    tokens_in: int
    tokens_kept: int
    tokens_dropped: dict[str, int]
    padding: int
    rows: int
    end_tokens: int
    """End tokens found in the kept and dropped ids; at least one for each document."""
    unigram_entropy_nats: float
    """What a model that knows only token frequencies of these rows would reach as loss."""

    def check(self, name: str) -> None:
        """The balance must hold, or the code is wrong."""
        dropped = sum(self.tokens_dropped.values())
        assert self.tokens_in == self.tokens_kept + dropped, f"{name}: {self.tokens_in} != {self.tokens_kept}+{dropped}"
        assert self.end_tokens >= self.documents, f"{name}: {self.end_tokens} end tokens, {self.documents} documents"


@dataclass(frozen=True)
class PrepareStatistics:
    """All of a preparation, as ``account.json`` and the account event hold it."""

    seq_length: int
    encoder: str
    tokenizer: dict[str, Any]
    rejections: Rejections
    text_bytes: int
    splits: dict[str, SplitStatistics]
    notices: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; totals over the splits beside each split's own."""
        for name, split in self.splits.items():
            split.check(name)
        used = sum(split.documents for split in self.splits.values())
        tokens = sum(split.tokens_in for split in self.splits.values())
        return {
            "version": VERSION,
            "seq_length": self.seq_length,
            "encoder": self.encoder,
            "tokenizer": self.tokenizer,
            "documents": self._documents(used),
            "text_bytes": self.text_bytes,
            # Without the one end token of each document, which stands for no text.
            "bytes_per_token": self.text_bytes / (tokens - used) if tokens > used else None,
            "tokens_in": tokens,
            "tokens_kept": sum(split.tokens_kept for split in self.splits.values()),
            "tokens_dropped": _add_up([split.tokens_dropped for split in self.splits.values()]),
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "notices": self.notices,
        }

    def _documents(self, used: int) -> dict[str, Any]:
        rejected = self.rejections.counts
        return {
            "read": used + sum(rejected.values()),
            "used": used,
            "rejected": dict(rejected),
            "first_rejected": dict(self.rejections.first),
        }


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the token frequencies ``counts`` [vocab_size]: - sum p ln p; 0 without tokens."""
    occurring = counts[counts > 0]
    if len(occurring) == 0:
        return 0.0
    shares = occurring / occurring.sum()
    return float(-(shares * np.log(shares)).sum())


def _add_up(parts: list[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for reason, count in part.items():
            total[reason] = total.get(reason, 0) + count
    return total
