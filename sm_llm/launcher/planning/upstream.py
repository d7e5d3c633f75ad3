"""What a plan may know of tokenizers, and of rows that an earlier step has yet to write, without loading either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.data.describe import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.spec.tasks import PrepareTask


@dataclass(frozen=True)
class Upstream:
    """Facts of a prepare step that has not run yet, by its specification."""

    seq_length: int
    vocab_size: int | None
    has_validation: bool

    @classmethod
    def of(cls, task: PrepareTask) -> Upstream:
        """A given tokenizer's vocabulary is not known here: the step itself checks its ids."""
        vocabulary = None if task.tokenizer else task.train_tokenizer.vocab_size
        return cls(task.seq_length, vocabulary, task.validation_fraction > 0)


def tokenizer_vocabulary(folder: Path) -> int | None:
    """One more than the largest token id of ``tokenizer.json``; None where the folder has no such file.

    Raises ``DataError`` if the file is not JSON.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = read_json(path)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    # A BPE vocabulary maps token -> id; a unigram one is a list whose positions are the ids.
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in tokenizer.get("added_tokens") or [])
    return max([*ids, *added], default=-1) + 1
