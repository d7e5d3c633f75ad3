"""Text to packed rows: reads documents, splits, encodes, packs and writes them, with an account of every token."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from sm_llm.contract.events import Progress
from sm_llm.data.account import PrepareAccount, SplitAccount, unigram_entropy
from sm_llm.data.describe import write_json
from sm_llm.data.documents import Documents, Rejections, is_held_out, no_documents
from sm_llm.data.encode import Encoder, EncoderMismatch, Tokenizer, choose_encoder
from sm_llm.data.files import SourceFile, find_files
from sm_llm.data.pack import Packer, Tokens, with_end_tokens
from sm_llm.data.rows_writer import RowsWriter
from sm_llm.data.tokenizer_choice import obtain_tokenizer
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.spec.tasks import PrepareTask

ACCOUNT = "account.json"
Report = Callable[[Progress], None]

_REPORT_SECONDS = 1.0
_MIN_TOKENS_PER_BYTE = 0.12  # of the input files; lower than any tokenizer of ours on compressed or plain text


def prepare(task: PrepareTask, output: Path, progress: Report) -> dict[str, Any]:
    """Write ``output``/{train,validation,tokenizer,account.json} and return the account.

    ``validation`` exists if ``validation_fraction`` > 0. Memory is bounded by one batch of documents (or the
    longest document). The result depends only on the task and the text. Raises ``DataError`` for missing,
    unreadable or too little text, an unusable tokenizer, or a disk too small.
    """
    notices: list[str] = []
    files = find_files(task.sources, notices.append)
    _clear(output)
    _check_space(task, files, output)
    try:
        tokenizer = obtain_tokenizer(task, files, output / "tokenizer", progress, notices)
        account = _encode(task, files, tokenizer, output, progress, notices).to_json()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(f"{output}: the disk is full. Free space, or write to a larger disk") from error
        raise
    write_json(output / ACCOUNT, account)
    return account


def _encode(
    task: PrepareTask, files: list[SourceFile], tokenizer: Tokenizer, output: Path, progress: Report, notices: list[str]
) -> PrepareAccount:
    """All text with the fast encoder; if that is caught erring, all of it again with the reference."""
    try:
        return _Run(task, files, tokenizer, choose_encoder(tokenizer), output, progress, notices).account()
    except EncoderMismatch as mismatch:
        notices.append(f"the fast encoder differs from the reference ({mismatch}); the reference encoded everything")
        _remove(output / "train", output / "validation")
    slow = choose_encoder(tokenizer, trust_fast=False)
    return _Run(task, files, tokenizer, slow, output, progress, notices).account()


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
    ) -> None:
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

    def account(self) -> PrepareAccount:
        with ExitStack() as open_files:
            for split in self._splits:
                open_files.enter_context(split.writer)
            for documents in _read(self._files, self._task.text_field, self._rejections, "prepare", self._progress):
                self._add(documents)
            if sum(split.documents for split in self._splits) == 0:
                raise DataError(no_documents(self._task.sources, self._rejections))
            splits = {split.name: split.finish() for split in self._splits}
        return PrepareAccount(
            seq_length=self._task.seq_length,
            encoder=self._encoder.name,
            tokenizer=self._describe_tokenizer(),
            rejections=self._rejections,
            text_bytes=self._text_bytes,
            splits=splits,
            notices=[*self._notices, *_literal_ends(splits, self._tokenizer.end_token)],
        )

    def _add(self, documents: Documents) -> None:
        ids, offsets = self._encoder.encode(documents.texts)
        joined = with_end_tokens(ids, offsets, self._tokenizer.end_id)
        self._text_bytes += sum(documents.sizes)
        seed, fraction = self._task.seed, self._task.validation_fraction
        held_out = np.array([is_held_out(text, seed, fraction) for text in documents.texts])
        if not held_out.any():
            self._splits[0].add(joined, len(held_out))
            return
        of_token = np.repeat(held_out, np.diff(offsets) + 1)
        self._splits[0].add(joined[~of_token], int((~held_out).sum()))
        self._splits[1].add(joined[of_token], int(held_out.sum()))

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
        self._tokens_in = 0
        self._packer = Packer(task.seq_length)
        columns = ("labels", "attention_mask") if task.tail == "pad" else tuple(dict.fromkeys(task.columns))
        self.writer = RowsWriter(folder, task.seq_length, tokenizer.vocab_size, columns, task.rows_per_shard)

    def add(self, ids: Tokens, documents: int) -> None:
        self.documents += documents
        self._tokens_in += len(ids)
        self.writer.write(self._packer.add(ids))

    def finish(self) -> SplitAccount:
        tail = self._packer.tail
        padding = 0
        if self._task.tail == "pad" and len(tail):
            row, mask = self._packer.padded_tail(self._tokenizer.end_id)
            self.writer.write(row, mask)
            padding = self._task.seq_length - len(tail)
            tail = tail[:0]
        if self.writer.rows == 0:
            raise DataError(self._too_little())
        self.writer.finish(self.name, padded=padding > 0)
        end_id = self._tokenizer.end_id
        return SplitAccount(
            documents=self.documents,
            tokens_in=self._tokens_in,
            tokens_kept=self.writer.tokens,
            tokens_dropped={"tail": len(tail)},
            padding=padding,
            rows=self.writer.rows,
            end_tokens=int(self.writer.counts[end_id]) + int((tail == end_id).sum()),
            unigram_entropy_nats=unigram_entropy(self.writer.counts),
        )

    def _too_little(self) -> str:
        found = f"{self.name}: {self.documents} documents with {self._tokens_in} tokens do not fill one row"
        remedy = "raise task.validation_fraction" if self.name == "validation" else "give more text"
        return f"{found} of {self._task.seq_length}. Set task.tail=pad, a smaller task.seq_length, or {remedy}"


def _read(
    files: list[SourceFile], text_field: str, rejections: Rejections, phase: str, progress: Report
) -> Iterator[Documents]:
    """Documents of all files in order, with a report about once a second."""
    total = float(sum(file.size for file in files))
    before, reported = 0, 0.0
    for file in files:
        for documents in file.documents(text_field, rejections):
            yield documents
            if (now := time.monotonic()) - reported >= _REPORT_SECONDS:
                progress(Progress(phase, before + documents.fraction * file.size, total, "bytes", file.path.name))
                reported = now
        before += file.size
    progress(Progress(phase, total, total, "bytes", f"{len(files)} files"))


def _clear(output: Path) -> None:
    """Make room for a new result: what an earlier, killed attempt left must not be mixed in."""
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
    needed = sum(file.size for file in files) * _MIN_TOKENS_PER_BYTE * 4 * columns
    free = shutil.disk_usage(output).free
    if needed > free:
        raise DataError(
            f"{output}: the rows need at least {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free. "
            "Write to a larger disk or prepare fewer sources at a time"
        )


def _literal_ends(splits: dict[str, SplitAccount], token: str) -> list[str]:
    extra = sum(split.end_tokens - split.documents for split in splits.values())
    return [f"{extra} end tokens come from the text {token!r} inside documents"] if extra else []
