"""From a data specification to the batches of one data-parallel rank, one optimiser step after another."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np

from sm_llm.data.order import row_indices
from sm_llm.data.prefetch import Prefetcher
from sm_llm.data.source import IGNORED, Batch, Source, StreamSource, SyntheticSource
from sm_llm.errors import DataError
from sm_llm.spec.training import DataSpec, JsonRowsData, RowsData, StreamData, SyntheticData

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Split = Literal["train", "validation"]
AnySource = Source | StreamSource
_Steps = Generator[tuple[list[Batch], dict[str, Any]], None, None]


@overload
def open_source(
    data: DataSpec,
    split: Literal["train"],
    vocab_size: int,
    seed: int,
    tokenizer: str | None = None,
    scratch: Path | None = None,
) -> AnySource: ...
@overload
def open_source(
    data: DataSpec,
    split: Literal["validation"],
    vocab_size: int,
    seed: int,
    tokenizer: str | None = None,
    scratch: Path | None = None,
) -> Source | None: ...
def open_source(
    data: DataSpec,
    split: Split,
    vocab_size: int,
    seed: int,
    tokenizer: str | None = None,
    scratch: Path | None = None,
) -> AnySource | None:
    """Open one split. Paths in ``data`` are local folders (the worker has staged them).

    ``vocab_size`` is the model's: a larger id is a ``DataError``. ``tokenizer`` (a folder) is needed for streams.
    ``scratch`` holds what must be converted once per node (``json_rows``). Validation is visited in order, and is
    None where the specification names none. Raises ``DataError`` for unusable data.
    """
    if isinstance(data, SyntheticData):
        return _synthetic(data, split, vocab_size, seed)
    if isinstance(data, StreamData):
        return _stream(data, split, vocab_size, seed, tokenizer)
    folder = data.train if split == "train" else data.validation
    if folder is None:
        return None
    return _rows(data, Path(folder), split, vocab_size, seed, scratch)


def _synthetic(data: SyntheticData, split: Split, vocab_size: int, seed: int) -> Source | None:
    if split == "train":
        return SyntheticSource(data.rows, data.seq_length, vocab_size, seed, data.shuffle)
    if data.validation_rows == 0:
        return None
    # ``part`` gives validation a key of its own: its rows are not those of the training split.
    return SyntheticSource(data.validation_rows, data.seq_length, vocab_size, seed, shuffle=False, part=1)


def _rows(
    data: RowsData | JsonRowsData, folder: Path, split: Split, vocab_size: int, seed: int, scratch: Path | None
) -> Source:
    from sm_llm.data.rows import RowsFolder, RowsSource

    # Validation is the same rows in the same order at every evaluation.
    shuffle = data.shuffle and split == "train"
    if isinstance(data, JsonRowsData):
        from sm_llm.data.json_rows import RowLocations, convert, left_out

        converted = convert(folder, data.seq_length, vocab_size, scratch)
        locations = RowLocations(folder, converted, data.seq_length)
        notices = [*left_out(folder), *locations.notices]
        return RowsSource(
            RowsFolder.open(converted), vocab_size, seed, shuffle, locate=locations.location, notices=notices
        )
    source = RowsSource(RowsFolder.open(folder), vocab_size, seed, shuffle)
    # Line files were just cut to the length asked for; saved rows keep the length that they were packed with.
    if source.seq_length != data.seq_length:
        raise DataError(
            f"data.seq_length: rows in {folder} hold {source.seq_length} tokens, the job asks for {data.seq_length}. "
            f"Set data.seq_length={source.seq_length} or prepare the text again"
        )
    return source


def _stream(data: StreamData, split: Split, vocab_size: int, seed: int, tokenizer: str | None) -> AnySource | None:
    from sm_llm.data.stream import TextStream, validation_rows

    if tokenizer is None:
        raise DataError("task.tokenizer: streamed text needs the folder of a tokenizer")
    if split == "train":
        return TextStream(data, Path(tokenizer), vocab_size, seed)
    return validation_rows(data, Path(tokenizer), vocab_size)


class Batches:
    """The micro-batches of one rank: each item is the list for one optimiser step, prefetched by one thread.

    Step ``s`` (0-based) of the whole job takes global samples ``[s * global_batch, (s + 1) * global_batch)``;
    micro-batch ``m`` of rank ``r`` takes ``micro_batch_size`` of them, from
    ``s * global_batch + (m * degree + r) * micro_batch_size`` on. So a step sees the same samples for every
    ``degree``, and every rank has the same number of steps and micro-batches. ``start_step`` steps are done already;
    without ``total_steps`` the iterator never ends. ``state`` is what ``state()`` gave when a stream was saved.
    """

    def __init__(
        self,
        source: AnySource,
        *,
        micro_batch_size: int,
        accumulation_steps: int,
        rank: int,
        degree: int,
        start_step: int = 0,
        total_steps: int | None = None,
        state: Mapping[str, Any] | None = None,
        depth: int = 2,
    ) -> None:
        self._micro = micro_batch_size
        self._accumulation = accumulation_steps
        self._rank = rank
        self._degree = degree
        self._end = total_steps
        self._state = dict(state or {})
        self._prefetcher = Prefetcher(self._steps(source, start_step), depth, name="sm-llm-batches")

    @property
    def global_batch_size(self) -> int:
        return self._micro * self._accumulation * self._degree

    @property
    def wait_seconds(self) -> float:
        """Seconds the loop has waited for data in all."""
        return self._prefetcher.wait_seconds

    def state(self) -> dict[str, Any]:
        """Position of a stream behind the step handed out last, as JSON values; {} for rows by number.

        Per rank: each rank saves its own.
        """
        return self._state

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        # The position comes with its batches: the thread is ahead, and its own position would pass over batches that
        # were fetched but not trained on.
        batches, self._state = next(self._prefetcher)
        return batches

    def close(self) -> None:
        """End the background thread."""
        self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steps(self, source: AnySource, start: int) -> _Steps:
        steps = self._streamed(source) if isinstance(source, StreamSource) else self._indexed(source, start)
        # The prefetcher closes this generator, and with it the stream and its thread.
        with closing(steps):
            for _ in itertools.count(start) if self._end is None else range(start, self._end):
                yield next(steps)

    def _indexed(self, source: Source, start: int) -> _Steps:
        # Sample numbers of this rank inside one global batch, [accumulation_steps, micro_batch_size].
        micro_batches = self._micro * (self._rank + self._degree * np.arange(self._accumulation, dtype=np.int64))
        of_rank = micro_batches[:, None] + np.arange(self._micro)
        for step in itertools.count(start):
            samples = of_rank + step * self.global_batch_size
            yield [source.rows(rows) for rows in row_indices(samples, source.count, source.seed, source.shuffle)], {}

    def _streamed(self, source: StreamSource) -> _Steps:
        stream = source.open(self._rank, self._degree, self._state or None)
        try:
            while True:
                batches = [stream.take(self._micro) for _ in range(self._accumulation)]
                yield batches, stream.state()
        finally:
            stream.close()


def evaluation_batches(
    source: Source, micro_batch_size: int, rank: int, degree: int, max_rows: int | None = None
) -> Iterator[Batch]:
    """The first ``max_rows`` rows, in order, each on exactly one rank.

    Every rank gets the same number of full micro-batches, because forward passes under sharding are collectives:
    where rows run out, row 0 fills up with all its labels ``IGNORED``.
    """
    count = source.count if max_rows is None else min(max_rows, source.count)
    span = micro_batch_size * degree
    for begin in range(rank * micro_batch_size, -(-count // span) * span, span):
        indices = np.arange(begin, begin + micro_batch_size, dtype=np.int64)
        real = indices < count
        batch = source.rows(np.where(real, indices, 0))
        yield Batch(batch.input_ids, np.where(real[:, None], batch.labels, IGNORED))
