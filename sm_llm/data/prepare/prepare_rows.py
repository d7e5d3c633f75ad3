"""Text to packed rows: reads documents, splits, encodes, packs and writes them, with an account of every token."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sm_llm.data.describe import write_json
from sm_llm.data.prepare.documents import Documents, Rejections, is_held_out, no_documents
from sm_llm.data.prepare.encode import Encoder, EncoderMismatch, Tokenizer, choose_encoder
from sm_llm.data.prepare.long_text import encode_long
from sm_llm.data.prepare.pack import Packer, Tokens, with_end_tokens
from sm_llm.data.prepare.readers import LONG_BYTES
from sm_llm.data.prepare.rows_writer import RowsWriter
from sm_llm.data.prepare.source_files import SourceFile, find_files
from sm_llm.data.prepare.statistics import PrepareStatistics, SplitStatistics, unigram_entropy
from sm_llm.data.prepare.tokenizer_choice import obtain_tokenizer
from sm_llm.errors import DataError
from sm_llm.runs.events.events import Progress
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.spec.tasks import PrepareTask

ACCOUNT = "account.json"
Report = Callable[[Progress], None]
Ends = npt.NDArray[np.int64]
Held = npt.NDArray[np.bool_]

# From here on a hash of each divides documents about as asked.
_MANY_DOCUMENTS = 100
_REPORT_SECONDS = 1.0
_MIN_TOKENS_PER_BYTE = 0.12  # of the input files; lower than any tokenizer of ours on compressed or plain text


def prepare(task: PrepareTask, output: Path, progress: Report) -> dict[str, Any]:
    """Write ``output``/{train,validation,tokenizer,account.json} and return the account.

    ``validation`` exists if ``validation_fraction`` > 0: whole documents where there are enough, else the last rows.
    Memory is bounded by one batch of documents (or the longest line); a text file is read in parts. The result depends
    only on the task and the text. Raises ``DataError`` for missing, unreadable or too little text, an unusable
    tokenizer, or a disk too small.
    """
    notices: list[str] = []
    files = find_files(task.sources, notices.append)
    _clear(output)
    # After clearing: the space of an earlier result counts as free.
    _check_space(task, files, output)
    try:
        tokenizer = obtain_tokenizer(task, files, output / "tokenizer", progress, notices)
        account = _encode(task, files, tokenizer, output, progress, notices).to_json()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(f"{output}: the disk is full. Free space, or write to a larger disk") from error
        raise
    # Last: a folder with an account is a finished preparation.
    write_json(output / ACCOUNT, account)
    return account


def _encode(
    task: PrepareTask, files: list[SourceFile], tokenizer: Tokenizer, output: Path, progress: Report, notices: list[str]
) -> PrepareStatistics:
    """All text with the fast encoder; all of it again with the reference if that is caught erring, or divided by rows
    if there are too few documents to divide."""
    encoder, boundary = choose_encoder(tokenizer), None
    # Three passes at most: the reference encoder never mismatches, and a boundary is never found to be too few
    # documents.
    while True:
        try:
            return _Run(task, files, tokenizer, encoder, output, progress, notices, boundary).account()
        except EncoderMismatch as mismatch:
            notices.append(
                f"the fast encoder differs from the reference ({mismatch}); the reference encoded everything"
            )
            encoder = choose_encoder(tokenizer, trust_fast=False)
        except _TooFewDocuments as few:
            rows, held_out = _divide_rows(task, few)
            boundary = (rows - held_out) * task.seq_length
            notices.append(
                f"too few documents ({few.documents:,}) to hold out {task.validation_fraction:.3g} of the text in "
                f"whole ones: the last {held_out:,} of {counted(rows, 'row')} are held out instead"
            )
        _remove(output / "train", output / "validation")


class _TooFewDocuments(Exception):
    """Whole documents do not make the two splits that were asked for."""

    def __init__(self, documents: int, tokens: int) -> None:
        self.documents = documents
        self.tokens = tokens


def _divide_rows(task: PrepareTask, found: _TooFewDocuments) -> tuple[int, int]:
    """(rows, those of them to hold out). Raises ``DataError`` for text that does not fill two rows."""
    rows = found.tokens // task.seq_length if task.tail == "drop" else -(-found.tokens // task.seq_length)
    if rows < 2:
        raise DataError(
            f"{counted(found.documents, 'document')} with {counted(found.tokens, 'token')} make {rows} row of "
            f"{task.seq_length}, but "
            "task.validation_fraction wants one to train on and one to hold out. Set task.tail=pad, a smaller "
            "task.seq_length, task.validation_fraction=0, or give more text"
        )
    return rows, min(rows - 1, max(1, round(task.validation_fraction * rows)))


class _Run:
    """One pass over all text with one encoder."""

    def __init__(
        self,
        task: PrepareTask,
        files: list[SourceFile],
        tokenizer: Tokenizer,
        encoder: Encoder,
        output: Path,
        progress: Report,
        notices: list[str],
        boundary: int | None = None,
    ) -> None:
        # Tokens in front of those that are held out; None divides by documents.
        self._boundary = boundary
        self._seen = 0
        self._task = task
        self._files = files
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._progress = progress
        self._notices = notices
        self._rejections = Rejections()
        self._text_bytes = 0
        names = ["train", *(["validation"] if task.validation_fraction > 0 else [])]
        self._splits = [_Split(name, task, tokenizer, output / name) for name in names]

    def account(self) -> PrepareStatistics:
        with ExitStack() as open_files:
            for split in self._splits:
                open_files.enter_context(split.writer)
            for documents in _read(self._files, self._task.text_field, self._rejections, "prepare", self._progress):
                self._add(documents)
            # Before the division is checked, which divides by the number of tokens.
            if sum(split.documents for split in self._splits) == 0:
                raise DataError(no_documents(self._task.sources, self._rejections))
            if self._boundary is None and len(self._splits) > 1:
                self._check_division()
            splits = {split.name: split.finish() for split in self._splits}
        return PrepareStatistics(
            seq_length=self._task.seq_length,
            encoder=self._encoder.name,
            tokenizer=self._describe_tokenizer(),
            rejections=self._rejections,
            text_bytes=self._text_bytes,
            splits=splits,
            notices=[*self._notices, *_literal_ends(splits, self._tokenizer.end_token)],
        )

    def _check_division(self) -> None:
        """Raise ``_TooFewDocuments`` where a split has no row, or a few documents make another share than was asked."""
        documents, tokens = (sum(getattr(it, name) for it in self._splits) for name in ("documents", "tokens"))
        asked, share = self._task.validation_fraction, self._splits[1].tokens / tokens
        is_near = documents >= _MANY_DOCUMENTS or asked / 2 <= share <= 2 * asked
        if not (is_near and all(split.has_rows for split in self._splits)):
            raise _TooFewDocuments(documents, tokens)

    def _add(self, documents: Documents) -> None:
        if documents.long is not None:
            self._add_long(documents.long.parts, documents.long.size)
        # A long line of a JSON file is in memory already; encoded in pieces, its ids are not as well.
        elif len(documents.texts) == 1 and documents.sizes[0] > LONG_BYTES:
            self._add_long(lambda: iter(documents.texts), documents.sizes[0])
        else:
            self._add_texts(documents)

    def _add_texts(self, documents: Documents) -> None:
        ids, offsets = self._encoder.encode(documents.texts)
        self._text_bytes += sum(documents.sizes)
        seed, fraction = self._task.seed, self._task.validation_fraction
        held_out = np.array([is_held_out(text, seed, fraction) for text in documents.texts])
        # + 1 for the end token of each document.
        lengths = np.diff(offsets) + 1
        self._deal(with_end_tokens(ids, offsets, self._tokenizer.end_id), np.cumsum(lengths), held_out)

    def _add_long(self, parts: Callable[[], Iterator[str]], size: int) -> None:
        """One document, of which never more than a piece is held with its ids."""
        self._text_bytes += size
        held_out = np.array([is_held_out(parts(), self._task.seed, self._task.validation_fraction)])
        for ids in encode_long(self._encoder, parts()):
            # No document ends in a piece: its end token follows the last one.
            self._deal(ids, np.empty(0, np.int64), held_out)
        self._deal(np.array([self._tokenizer.end_id], np.int32), np.array([1]), held_out)

    def _deal(self, tokens: Tokens, ends: Ends, held_out: Held) -> None:
        """Give tokens to their splits. ``ends`` are the places behind end tokens, ``held_out`` is for each document."""
        first, last = self._splits[0], self._splits[-1]
        if self._boundary is not None:
            cut = min(max(self._boundary - self._seen, 0), len(tokens))
            self._seen += len(tokens)
            # A document belongs to the split that it ends in.
            before = int((ends <= cut).sum())
            first.add(tokens[:cut], before)
            last.add(tokens[cut:], len(ends) - before)
        # Most often all documents go to one split, and no mask over the tokens is needed.
        elif held_out.all() or not held_out.any():
            (last if held_out.all() else first).add(tokens, len(ends))
        else:
            of_token = np.repeat(held_out, np.diff(ends, prepend=0))
            first.add(tokens[~of_token], int((~held_out).sum()))
            last.add(tokens[of_token], int(held_out.sum()))

    def _describe_tokenizer(self) -> dict[str, Any]:
        return {
            "vocab_size": self._tokenizer.vocab_size,
            "end_token": self._tokenizer.end_token,
            "end_id": self._tokenizer.end_id,
            "trained": self._task.tokenizer is None,
        }


class _Split:
    """Packs and writes the documents of one split."""

    def __init__(self, name: str, task: PrepareTask, tokenizer: Tokenizer, folder: Path) -> None:
        self.name = name
        self.documents = 0
        self._task = task
        self._tokenizer = tokenizer
        self.tokens = 0
        self._packer = Packer(task.seq_length)
        columns = ("labels", "attention_mask") if task.tail == "pad" else tuple(dict.fromkeys(task.columns))
        self.writer = RowsWriter(folder, task.seq_length, tokenizer.vocab_size, columns, task.rows_per_shard)

    def add(self, ids: Tokens, documents: int) -> None:
        self.documents += documents
        self.tokens += len(ids)
        self.writer.write(self._packer.add(ids))

    @property
    def has_rows(self) -> bool:
        """Whether ``finish`` would find a row."""
        return self.writer.rows > 0 or (self._task.tail == "pad" and len(self._packer.tail) > 0)

    def finish(self) -> SplitStatistics:
        tail = self._packer.tail
        padding = 0
        if self._task.tail == "pad" and len(tail):
            # Padding is masked, so any id of the vocabulary serves; many tokenizers have no padding token.
            row, mask = self._packer.padded_tail(self._tokenizer.end_id)
            self.writer.write(row, mask)
            padding = self._task.seq_length - len(tail)
            tail = tail[:0]
        if self.writer.rows == 0:
            raise DataError(self._too_little())
        self.writer.finish(self.name, padded=padding > 0)
        end_id = self._tokenizer.end_id
        return SplitStatistics(
            documents=self.documents,
            tokens_in=self.tokens,
            tokens_kept=self.writer.tokens,
            tokens_dropped={"tail": len(tail)},
            padding=padding,
            rows=self.writer.rows,
            end_tokens=int(self.writer.counts[end_id]) + int((tail == end_id).sum()),
            unigram_entropy_nats=unigram_entropy(self.writer.counts),
        )

    def _too_little(self) -> str:
        found = f"{self.name}: {counted(self.documents, 'document')} with {counted(self.tokens, 'token')}"
        remedy = "Set task.tail=pad, a smaller task.seq_length, or give more text"
        return f"{found} fill no row of {self._task.seq_length}. {remedy}"


def _read(
    files: list[SourceFile], text_field: str, rejections: Rejections, phase: str, progress: Report
) -> Iterator[Documents]:
    """Documents of all files in order, with a report about once a second."""
    total = float(sum(file.size for file in files))
    before, reported = 0, 0.0
    for file in files:
        for documents in file.documents(text_field, rejections):
            yield documents
            # After the yield, when the caller has encoded this batch.
            if (now := time.monotonic()) - reported >= _REPORT_SECONDS:
                progress(Progress(phase, before + documents.fraction * file.size, total, "bytes", file.path.name))
                reported = now
        before += file.size
    progress(Progress(phase, total, total, "bytes", counted(len(files), "file")))


def _clear(output: Path) -> None:
    """Clear the place of a new result: what an earlier, killed attempt left must not be mixed in."""
    output.mkdir(parents=True, exist_ok=True)
    (output / ACCOUNT).unlink(missing_ok=True)
    _remove(output / "train", output / "validation", output / "tokenizer")


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.is_dir():
            shutil.rmtree(folder)


def _check_space(task: PrepareTask, files: list[SourceFile], output: Path) -> None:
    """Refuse now what would certainly fill the disk in an hour."""
    columns = 2 if task.tail == "pad" or "labels" in task.columns else 1
    # 4 bytes for each id and label. An attention mask is left out: this is a lower bound.
    needed = sum(file.size for file in files) * _MIN_TOKENS_PER_BYTE * 4 * columns
    free = shutil.disk_usage(output).free
    if needed > free:
        raise DataError(
            f"{output}: the rows need at least {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free. "
            "Write to a larger disk or prepare fewer sources at a time"
        )


def _literal_ends(splits: dict[str, SplitStatistics], token: str) -> list[str]:
    extra = sum(split.end_tokens - split.documents for split in splits.values())
    return [f"{extra} end tokens come from the text {token!r} inside documents"] if extra else []
