"""The tokenizer of a preparation: an existing one, copied, or one trained on the same text."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.data.prepare.documents import Rejections, is_held_out, no_documents
from sm_llm.data.prepare.encode import Tokenizer
from sm_llm.data.prepare.train_tokenizer import train_tokenizer
from sm_llm.errors import DataError
from sm_llm.models.safetensors_folder import TOKENIZER_FILES
from sm_llm.runs.events.events import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sm_llm.data.prepare.source_files import SourceFile
    from sm_llm.spec.tasks import PrepareTask


_HELD_OUT = "held_out_for_validation"


def obtain_tokenizer(
    task: PrepareTask,
    files: list[SourceFile],
    folder: Path,
    progress: Callable[[Progress], None],
    notices: list[str],
) -> Tokenizer:
    """Put the task's tokenizer into ``folder`` and open it. Raises ``DataError`` if it is unusable.

    Training reads at most ``max_bytes`` of text that is not held out for validation; a result smaller than asked
    is reported in ``notices``.
    """
    if task.tokenizer is not None:
        return _copy(Path(task.tokenizer), folder)
    rejections = Rejections()
    texts = _training_texts(task, files, rejections)
    # One text is read ahead: without any text the error must name the reasons, which the trainer does not know.
    first = next(texts, None)
    if first is None and _HELD_OUT in rejections.counts:
        # So few documents that all are held out: then rows are, and the tokenizer learns from all text.
        texts = _training_texts(task.model_copy(update={"validation_fraction": 0.0}), files, Rejections())
        first = next(texts, None)
    if first is None:
        raise DataError(no_documents(task.sources, rejections))
    asked = task.train_tokenizer
    progress(Progress("tokenizer", 0, 1, "", f"training {asked.vocab_size} entries"))
    size = train_tokenizer(chain([first], texts), folder, asked.vocab_size, asked.end_token)
    progress(Progress("tokenizer", 1, 1, "", f"{size} entries"))
    if size < asked.vocab_size:
        notices.append(f"the text gives a tokenizer of {size} entries, {asked.vocab_size} were asked for")
    return Tokenizer(folder)


def _copy(source: Path, folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(source)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return tokenizer


def _training_texts(task: PrepareTask, files: list[SourceFile], rejections: Rejections) -> Iterator[str]:
    """From the front of every file in proportion to its size, so that no source is left out."""
    limit = task.train_tokenizer.max_bytes
    share = limit / max(sum(file.size for file in files), 1)
    used = 0
    for file in files:
        # Text unpacks to several times its compressed size: well below the limit there is nothing to share out.
        budget = limit if share >= 8 else max(share * file.size, 1)
        for text, size in _not_held_out(task, file, rejections):
            if budget <= 0 or used >= limit:
                break
            budget -= size
            used += size
            yield text


def _not_held_out(task: PrepareTask, file: SourceFile, rejections: Rejections) -> Iterator[tuple[str, int]]:
    def is_left_out(text: str | Iterable[str], location: str) -> bool:
        held_out = is_held_out(text, task.seed, task.validation_fraction)
        if held_out:
            rejections.add(_HELD_OUT, location)
        return held_out

    for documents in file.documents(task.text_field, rejections):
        if documents.long is not None:
            # The document is read twice, once for its hash and once for its text: it is never held in memory.
            if not is_left_out(documents.long.parts(), f"{documents.file}:{documents.lines[0]}"):
                yield from ((part, len(part.encode("utf-8"))) for part in documents.long.parts())
            continue
        for text, size, line in zip(documents.texts, documents.sizes, documents.lines, strict=True):
            if not is_left_out(text, f"{documents.file}:{line}"):
                yield text, size
