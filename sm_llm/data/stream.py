"""Text streamed from a Hugging Face dataset and packed on the fly, disjoint per rank, resumable to the token."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sm_llm.data.order import stream_key
from sm_llm.data.prefetch import Prefetcher
from sm_llm.data.prepare.encode import Tokenizer
from sm_llm.data.prepare.pack import with_end_tokens
from sm_llm.data.source import ArraySource, Batch
from sm_llm.data.text_blocks import Block, StreamPosition, TextBlocks, open_dataset
from sm_llm.errors import DataError
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sm_llm.data.prepare.pack import Tokens
    from sm_llm.spec.training import StreamData

ENCODE_DOCUMENTS = 64
# What decides which token comes at which position: a saved position is only valid where all of it is equal.
_IDENTITY = ("dataset", "config_name", "data_files", "split", "text_field", "seq_length", "shuffle", "shuffle_buffer")


class TextStream:
    """The training split of a stream (``source.StreamSource``)."""

    padded = False
    count = None

    def __init__(self, data: StreamData, tokenizer: Path, vocab_size: int, seed: int) -> None:
        self.seq_length = data.seq_length
        self._data = data
        self._seed = seed
        self._tokenizer = _checked_tokenizer(tokenizer, vocab_size)

    def open(self, rank: int, degree: int, state: dict[str, Any] | None = None) -> TextRows:
        """See ``StreamSource.open``."""
        identity = self._identity(rank, degree)
        position = None if state is None else _position(state, identity)
        block_size = self._data.shuffle_buffer if self._data.shuffle else 0
        dataset = open_dataset(self._data, self._data.split, rank, degree)
        blocks = TextBlocks(dataset, self._data.text_field, max(block_size, ENCODE_DOCUMENTS))
        # A buffer of one document has nothing to permute.
        order = (self._seed, rank) if block_size > 1 else None
        return TextRows(blocks, self._tokenizer, self.seq_length, order, identity, position)

    def _identity(self, rank: int, degree: int) -> dict[str, Any]:
        fields = self._data.model_dump(mode="json", include=set(_IDENTITY))
        return {**fields, "seed": self._seed, "end_id": self._tokenizer.end_id, "rank": rank, "degree": degree}


@dataclass(frozen=True)
class Position:
    """Where a stream continues: documents emitted of the block at ``position``, then tokens to skip."""

    position: StreamPosition
    emitted: int
    skip: int


class TextRows:
    """Packs the documents of one rank into rows, for ever (``source.RowStream``).

    Documents come in blocks of ``shuffle_buffer``; each block is permuted by a key of (seed, rank, epoch, block).
    So the position is a block's start and two small numbers, and nothing of a shuffle buffer is lost on resume.
    """

    def __init__(
        self,
        blocks: TextBlocks,
        tokenizer: Tokenizer,
        seq_length: int,
        order: tuple[int, int] | None,
        identity: dict[str, Any],
        position: Position | None,
    ) -> None:
        self._seq_length = seq_length
        self._tokenizer = tokenizer
        self._encoder = tokenizer.reference()
        self._order = order
        self._identity = identity
        start = position or Position(StreamPosition(), 0, 0)
        self._ready: Tokens = np.empty(0, np.int32)
        self._consumed = 0
        self._fetched = 0
        self._marks: deque[tuple[int, StreamPosition, int]] = (
            deque()
        )  # tokens fetched before, block, documents emitted of it
        self._blocks = Prefetcher(blocks.read(start.position), depth=1, name="sm-llm-text")
        self._groups = self._all_groups(start.emitted)
        # A position is the start of a group of documents: the group is encoded again, and its trained tokens are
        # dropped.
        self._drop(start.skip)

    def take(self, rows: int) -> Batch:
        """The next rows; labels are the same array as ``input_ids``."""
        needed = rows * self._seq_length
        self._fetch(needed)
        ids = self._ready[:needed].astype(np.int64).reshape(rows, self._seq_length)
        self._drop(needed)
        return Batch(ids, ids)

    def state(self) -> dict[str, Any]:
        """See ``RowStream.state``."""
        # The newest mark at or before the position is the one to resume from; older ones are not needed again.
        while len(self._marks) > 1 and self._marks[1][0] <= self._consumed:
            self._marks.popleft()
        if not self._marks:
            raise RuntimeError("a stream has no position before its first row")
        fetched, position, emitted = self._marks[0]
        return {**self._identity, "place": asdict(position), "emitted": emitted, "skip": self._consumed - fetched}

    def close(self) -> None:
        """See ``RowStream.close``."""
        self._blocks.close()

    def _fetch(self, tokens: int) -> None:
        parts = [self._ready]
        have = len(self._ready)
        while have < tokens:
            parts.append(next(self._groups))
            have += len(parts[-1])
        self._ready = np.concatenate(parts)

    def _drop(self, tokens: int) -> None:
        self._fetch(tokens)
        self._ready = self._ready[tokens:]
        self._consumed += tokens

    def _all_groups(self, emitted: int) -> Iterator[Tokens]:
        for block in self._blocks:
            texts = self._permuted(block)
            for first in range(emitted, len(texts), ENCODE_DOCUMENTS):
                self._marks.append((self._fetched, block.position, first))
                ids, offsets = self._encoder.encode(texts[first : first + ENCODE_DOCUMENTS])
                joined = with_end_tokens(ids, offsets, self._tokenizer.end_id)
                self._fetched += len(joined)
                yield joined
            # Only the first block after a resume starts in its middle.
            emitted = 0

    def _permuted(self, block: Block) -> list[str]:
        if self._order is None:
            return block.texts
        # A block's own start is part of the key, so that a resumed run permutes it in the same way.
        key = [*self._order, block.position.epoch, block.position.documents]
        seed = int(stream_key(*key)[0])
        order = np.random.Generator(np.random.Philox(seed)).permutation(len(block.texts))
        return [block.texts[i] for i in order]


def validation_rows(data: StreamData, tokenizer: Path, vocab_size: int) -> ArraySource | None:
    """The first ``validation_rows`` rows of the validation split, the same on every rank; None without such a split.

    Fewer if the split is smaller. Raises ``DataError`` if it does not fill one row.
    """
    if data.validation_split is None:
        return None
    checked = _checked_tokenizer(tokenizer, vocab_size)
    wanted = data.validation_rows * data.seq_length
    # Rank 0 of 1: every rank reads the same rows here, and ``evaluation_batches`` divides them.
    blocks = TextBlocks(open_dataset(data, data.validation_split, 0, 1), data.text_field, ENCODE_DOCUMENTS)
    parts: list[Tokens] = []
    # The reader repeats the split for ever; validation takes one pass at most.
    first_epoch = itertools.takewhile(lambda block: block.position.epoch == 0, blocks.read(StreamPosition()))
    while sum(map(len, parts)) < wanted and (block := next(first_epoch, None)):
        ids, offsets = checked.reference().encode(block.texts)
        parts.append(with_end_tokens(ids, offsets, checked.end_id))
    tokens = np.concatenate([np.empty(0, np.int32), *parts])[:wanted]
    rows = len(tokens) // data.seq_length
    if rows == 0:
        raise DataError(
            f"task.data.validation_split: {data.validation_split!r} holds {counted(len(tokens), 'token')}, "
            f"one row needs {data.seq_length}"
        )
    ids64 = tokens[: rows * data.seq_length].astype(np.int64).reshape(rows, data.seq_length)
    return ArraySource(Batch(ids64, ids64))


def _checked_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"task.tokenizer: {folder} has {tokenizer.vocab_size} tokens, the model's vocabulary {vocab_size}. "
            "Set model.config.vocab_size, or use the model's own tokenizer"
        )
    return tokenizer


def _position(state: dict[str, Any], identity: dict[str, Any]) -> Position:
    changed = [key for key, value in identity.items() if state.get(key) != value]
    if changed:
        changes = ", ".join(f"{key} was {state.get(key)!r}, is {identity[key]!r}" for key in changed)
        raise DataError(
            f"task.data: the saved position belongs to another stream ({changes}). A stream continues exactly only "
            "with the same data and the same number of data-parallel ranks; change it back, or start a new run"
        )
    return Position(StreamPosition(**state["place"]), state["emitted"], state["skip"])
