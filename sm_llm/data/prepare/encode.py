"""Text to token ids in bulk: the fast encoder where it proves equal to the reference one, else the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from sm_llm.data.describe import read_json
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]

_TRICKY = (
    " ",
    "\n\n\n",
    "a" * 500,
    "é中文 \U0001f600" * 20,
    "\ufeffx",
    "e\u0301" * 30,
    "1234567890" * 20,
    "\t\t  x  \r\n y",
    "=" * 300,
    "ﬁ ﬂ ½ can't WE'LL",
    "\u200d\u200b\u00a0x",
)
_SAMPLE_DOCUMENTS = 48
# Of the first batch.
_SAMPLE_CHARACTERS = 200_000
# Of each later batch.
_PART_CHARACTERS = 20_000
# Characters by which the place of the sample moves from batch to batch; a prime, so that no size of batch fixes it.
_STRIDE = 1_000_003


class EncoderMismatch(Exception):
    """The fast encoder gave other ids than the reference: everything it encoded is in doubt."""


class Encoder(Protocol):
    """Encodes documents without adding special tokens."""

    name: str

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        """Ids of all documents one after another, int32 [n], and where each begins, int64 [documents + 1]."""


class Tokenizer:
    """A Hugging Face tokenizer folder: its vocabulary, its end token and its reference encoder."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self.folder = folder
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f"{folder}: no tokenizer.json here. Save one with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        try:
            self._reference = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a file it does not understand
            raise DataError(f"{file}: not a tokenizer this version of tokenizers can read ({error})") from error
        # Settings saved with the file would cut or fill documents in silence.
        self._reference.no_truncation()
        self._reference.no_padding()
        self.vocabulary: dict[str, int] = self._reference.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocabulary.values()) + 1
        self.end_token, self.end_id = self._end()

    def _end(self) -> tuple[str, int]:
        token = end_token(self.folder)
        if token is None or token not in self.vocabulary:
            raise DataError(
                f"{self.folder}: the tokenizer names no end token of its vocabulary (eos_token is {token!r}); "
                "documents could not be distinguished. Set eos_token in tokenizer_config.json"
            )
        return token, self.vocabulary[token]

    def reference(self) -> Encoder:
        """The encoder of the ``tokenizers`` library."""
        return _Reference(self._reference)

    def fast(self) -> Encoder | None:
        """A fast encoder for the same file, or None if there is none that takes it. Its ids are not checked yet."""
        try:
            return _Fast(self.folder / "tokenizer.json")
        except Exception:  # not installed, or a part of this tokenizer is not supported: both mean "use the other"
            return None


class CheckedEncoder:
    """A fast encoder watched by the reference.

    The first batch is compared on a sample and on strings known to trip encoders up (``special``, a special token,
    among them), each later batch on one document; of a document too long for the sample, both encode a part.
    ``EncoderMismatch`` as soon as one id differs.
    """

    def __init__(self, fast: Encoder, reference: Encoder, special: str) -> None:
        self.name = fast.name
        self._tricky = [*_TRICKY, f"x{special}y {special}\n{special}"]
        self._fast = fast
        self._reference = reference
        self._batches = 0

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        ids, offsets = self._fast.encode(texts)
        if self._batches == 0:
            tricky = self._tricky
            _compare(self._fast.encode(tricky), self._reference.encode(tricky), range(len(tricky)))
        chosen, part = _spread(texts) if self._batches == 0 else _one(texts, self._batches)
        _compare((ids, offsets), self._reference.encode([texts[i] for i in chosen]), chosen)
        if part:
            _compare(self._fast.encode([part]), self._reference.encode([part]), [0])
        self._batches += 1
        return ids, offsets


def choose_encoder(tokenizer: Tokenizer, *, trust_fast: bool = True) -> Encoder:
    """The fast encoder under the watch of the reference where there is one, else the reference."""
    fast = tokenizer.fast() if trust_fast else None
    return tokenizer.reference() if fast is None else CheckedEncoder(fast, tokenizer.reference(), tokenizer.end_token)


def end_token(folder: Path) -> str | None:
    """``eos_token`` of a tokenizer folder, or None if its files name none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token = read_json(folder / name).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return None


class _Reference:
    name = "tokenizers"

    def __init__(self, tokenizer: Any) -> None:
        # encode_batch_fast (tokenizers 0.20) leaves out character offsets, which nobody needs here.
        self._encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        parts = [np.array(encoding.ids, np.int32) for encoding in self._encode(texts, add_special_tokens=False)]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        # The empty array, because concatenate refuses an empty list.
        return np.concatenate([np.empty(0, np.int32), *parts]), offsets


class _Fast:
    name = "fastokens"

    def __init__(self, file: Path) -> None:
        # The compiled class itself: the package's front wraps it for transformers.
        from fastokens import _native

        self._tokenizer = _native.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        ids, offsets = self._tokenizer.encode_batch_flat(texts, False)
        # Buffers of uint32 and uint64; no vocabulary reaches half of either range, so signed views are the same.
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)


def _spread(texts: list[str]) -> tuple[list[int], str]:
    """Indices of documents spread over the batch, and the beginning of one that is too long for what is left."""
    chosen: list[int] = []
    left = _SAMPLE_CHARACTERS
    for index in range(0, len(texts), max(len(texts) // _SAMPLE_DOCUMENTS, 1))[:_SAMPLE_DOCUMENTS]:
        if len(texts[index]) > left:
            return chosen, texts[index][:left]
        left -= len(texts[index])
        chosen.append(index)
    return chosen, ""


def _one(texts: list[str], turn: int) -> tuple[list[int], str]:
    """The index of one document, or a part of it if it is long.

    It is chosen by its characters: beside a piece of a long text stands the one character before it.
    """
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    if not texts or not ends[-1]:
        return [], ""
    position = turn * _STRIDE % int(ends[-1])
    index = int(np.searchsorted(ends, position, side="right"))
    text = texts[index]
    if len(text) <= _PART_CHARACTERS:
        return [index], ""
    begin = min(position - (int(ends[index]) - len(text)), len(text) - _PART_CHARACTERS)
    return [], text[begin : begin + _PART_CHARACTERS]


def _compare(found: tuple[Ids, Offsets], reference: tuple[Ids, Offsets], documents: Sequence[int]) -> None:
    (ids, offsets), (expected, bounds) = found, reference
    for number, document in enumerate(documents):
        left = ids[offsets[document] : offsets[document + 1]]
        right = expected[bounds[number] : bounds[number + 1]]
        if not np.array_equal(left, right):
            raise EncoderMismatch(f"document {document} of a batch")
