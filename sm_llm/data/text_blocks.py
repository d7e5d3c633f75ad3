"""Blocks of documents from a streamed Hugging Face dataset, epoch after epoch, each with the place it starts at."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.data.prepare.documents import usable
from sm_llm.errors import DataError, SmLlmError
from sm_llm.optional import missing
from sm_llm.storage.hub.hub_addresses import is_hub, parse_hub
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.training import StreamData


@dataclass(frozen=True)
class StreamPosition:
    """``documents`` of this rank are read in ``epoch``; ``dataset`` is the library's own state there, if it has one."""

    epoch: int = 0
    documents: int = 0
    dataset: dict[str, Any] | None = None


@dataclass(frozen=True)
class Block:
    """Documents from ``position`` on."""

    position: StreamPosition
    texts: list[str]


def open_dataset(data: StreamData, split: str, rank: int, degree: int) -> Any:
    """The rank's part of a split as an ``IterableDataset``: its own files if they divide evenly, else every
    ``degree``-th document. Raises ``DataError`` if the dataset cannot be opened.
    """
    if (lack := missing("datasets")) is not None:
        raise DataError(f"task.data.format: a stream cannot be read: {lack}")
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    name, revision = data.dataset, None
    if is_hub(name):
        address = parse_hub(name)
        name, revision = address.repository, address.revision
    try:
        dataset = load_dataset(
            name, data.config_name, data_files=data.data_files, split=split, revision=revision, streaming=True
        )
        return split_dataset_by_node(dataset, rank=rank, world_size=degree)
    except Exception as error:  # the library raises whatever its network and file layers do
        raise DataError(
            f"task.data.dataset: cannot open {data.dataset!r}, split {split!r} ({type(error).__name__}: {error})"
        ) from error


class TextBlocks:
    """Reads blocks of at most ``size`` usable documents; a block never spans two epochs.

    The library's own position is used where it works: datasets before 2.20 has none, and in 5.0 it stands still
    after the first resume. There, documents are counted and skipped instead: as exact, only slower to resume.
    """

    def __init__(self, dataset: Any, text_field: str, size: int) -> None:
        self._dataset = dataset
        self._text_field = text_field
        self._size = size

    def read(self, start: StreamPosition) -> Iterator[Block]:
        """Blocks from ``start`` on, for ever. Raises ``DataError`` for a broken source or one without text."""
        position = start
        while True:
            found = False
            for block in self._epoch(position):
                found = True
                yield block
            # Only an epoch from its start proves this: a resumed one may begin behind the last document.
            if not found and position.documents == 0:
                raise DataError("task.data: the stream holds no document with text for this rank")
            position = StreamPosition(position.epoch + 1)

    def _epoch(self, position: StreamPosition) -> Iterator[Block]:
        cursor = _Cursor(self._dataset, position)
        while True:
            # Before the first read: the place of a block is where its first document is.
            begins = cursor.position()
            texts = list(itertools.islice(self._texts(cursor), self._size))
            if not texts:
                return
            yield Block(begins, texts)

    def _texts(self, cursor: _Cursor) -> Iterator[str]:
        for row in cursor:
            if self._text_field not in row:
                raise DataError(
                    f"task.data.text_field: no field {self._text_field!r} in the stream; "
                    f"fields found: {', '.join(map(str, row))}"
                )
            text = row[self._text_field]
            # Documents without text are counted by the cursor all the same, as the library's own position does.
            if usable(text)[1] is None:
                yield text


class _Cursor:
    """Iterates over one epoch of a dataset and knows its place."""

    def __init__(self, dataset: Any, position: StreamPosition) -> None:
        self._start = position
        self._documents = position.documents
        self._dataset = dataset
        self._tracks = hasattr(dataset, "state_dict")
        self._is_loaded = self._tracks and position.dataset is not None
        if self._tracks:  # None too: a state once loaded would move the start of every later epoch
            dataset.load_state_dict(copy.deepcopy(position.dataset))
        done = 0 if self._is_loaded else position.documents
        self._rows = itertools.islice(iter(dataset), done, None)

    def position(self) -> StreamPosition:
        if self._documents == self._start.documents:
            return self._start  # before its first row the library still returns the state of an earlier iteration
        return StreamPosition(self._start.epoch, self._documents, self._dataset.state_dict() if self._tracks else None)

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> dict[str, Any]:
        try:
            row: dict[str, Any] = next(self._rows)
        except (StopIteration, SmLlmError):
            raise
        except Exception as error:  # network and decoding errors of every kind end here
            raise DataError(
                f"task.data: the stream broke off after {counted(self._documents, 'document')} of epoch "
                f"{self._start.epoch} ({type(error).__name__}: {error})"
            ) from error
        self._documents += 1
        if self._is_loaded and self._documents == self._start.documents + 1:
            self._tracks = self._dataset.state_dict() != self._start.dataset  # it must have moved
        return row
