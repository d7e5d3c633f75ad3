"""Encoding: equal to Hugging Face on every document, and never trusting the fast encoder."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data.prepare.encode import CheckedEncoder, EncoderMismatch, Tokenizer, choose_encoder
from sm_llm.data.prepare.train_tokenizer import train_tokenizer
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.data.prepare import encode

NASTY = ["", " ", "\n\n\n", "a" * 5000, "é中文 😀" * 50, "<|endoftext|>", "x<|endoftext|>y", "\ufeffx", "e\u0301" * 30,
         "1234567890" * 100, "\t\t  x  \r\n y", "===" * 2000, "ﬁ ﬂ ½", "can't WE'LL", "\u200d", "\x00\x01"]  # fmt: skip


def split(encoded: tuple[Any, Any]) -> list[list[int]]:
    ids, offsets = encoded
    assert ids.dtype == np.int32
    return [part.tolist() for part in np.split(ids, offsets[1:-1])]


def test_ids_equal_those_of_transformers(tokenizer: Path, texts: list[str]) -> None:
    from transformers import AutoTokenizer

    documents = [*texts, *NASTY]
    reference = AutoTokenizer.from_pretrained(tokenizer)
    expected = reference(documents, add_special_tokens=False)["input_ids"]
    ours = Tokenizer(tokenizer)
    assert split(ours.reference().encode(documents)) == expected
    fast = choose_encoder(ours)
    assert fast.name == "fastokens"
    assert split(fast.encode(documents)) == expected
    assert reference.eos_token_id == ours.end_id
    assert len(reference) == ours.vocab_size


def test_the_trained_tokenizer_gives_every_text_back(tokenizer: Path, texts: list[str]) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer)
    for text in [*texts[:50], *NASTY]:
        assert reference.decode(reference(text)["input_ids"]) == text


def test_training_twice_gives_the_same_files(tmp_path: Path, texts: list[str], tokenizer: Path) -> None:
    size = train_tokenizer(iter(texts), tmp_path, 400, "<|endoftext|>")
    assert size == 400
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in tokenizer.iterdir()}


class Lying:
    """A fast encoder that errs from a certain batch on."""

    name = "lying"

    def __init__(self, honest: encode.Encoder, batches: int) -> None:
        self._honest = honest
        self._left = batches

    def encode(self, texts: list[str]) -> tuple[Any, Any]:
        ids, offsets = self._honest.encode(texts)
        self._left -= 1
        return (ids if self._left >= 0 else ids + 1), offsets


@pytest.mark.parametrize("batches", [0, 1, 2, 4])
def test_wrong_ids_are_caught_in_the_batch_they_appear_in(tokenizer: Path, texts: list[str], batches: int) -> None:
    reference = Tokenizer(tokenizer).reference()
    encoder = CheckedEncoder(Lying(reference, batches), reference, "<|endoftext|>")
    good = max(batches - 1, 0)  # the first batch asks the encoder twice
    for _ in range(good):
        encoder.encode(texts[:20])
    with pytest.raises(EncoderMismatch):
        encoder.encode(texts[:20])


class Seeing:
    """The honest encoder; counts the characters that it is given."""

    name = "seeing"

    def __init__(self, honest: encode.Encoder) -> None:
        self._honest = honest
        self.characters = 0

    def encode(self, texts: list[str]) -> tuple[Any, Any]:
        self.characters += sum(map(len, texts))
        return self._honest.encode(texts)


@pytest.mark.parametrize("beside", [1, 3], ids=["alone", "with-short-ones"])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_long_documents_are_compared_by_a_part(tokenizer: Path, batches: int, beside: int) -> None:
    reference = Tokenizer(tokenizer).reference()
    documents = ["the cat sat on a mat " * 15_000, *["a"] * (beside - 1)]
    # The first batch asks the fast encoder three times, each later one twice: it errs in the part.
    encoder = CheckedEncoder(Lying(reference, 2 * batches), reference, "<|endoftext|>")
    for _ in range(batches - 1):
        encoder.encode(documents)
    with pytest.raises(EncoderMismatch):
        encoder.encode(documents)
    seeing = Seeing(reference)
    CheckedEncoder(reference, seeing, "<|endoftext|>").encode(documents)
    assert 200_000 <= seeing.characters < 205_000


def test_a_tokenizer_the_fast_encoder_refuses_falls_back(tokenizer: Path, tmp_path: Path, texts: list[str]) -> None:
    folder = shutil.copytree(tokenizer, tmp_path / "nfkc")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "NFKC"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    ours = Tokenizer(folder)
    encoder = choose_encoder(ours)
    if encoder.name == "fastokens":  # a later release may take it; then it must be right
        assert split(encoder.encode(NASTY)) == split(ours.reference().encode(NASTY))
    else:
        assert ours.fast() is None
    assert split(encoder.encode(["ﬁ"])) == split(ours.reference().encode(["fi"]))


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_cut_documents(tokenizer: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend

    folder = shutil.copytree(tokenizer, tmp_path / "cut")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_id=0, pad_token="<|endoftext|>")
    backend.save(str(folder / "tokenizer.json"))
    long = ["the cat sat on a mat and paid for tea", "a"]
    expected = split(Tokenizer(tokenizer).reference().encode(long))
    assert len(expected[0]) > 4
    assert split(Tokenizer(folder).reference().encode(long)) == expected
    assert split(choose_encoder(Tokenizer(folder)).encode(long)) == expected


def test_DT07_a_template_that_adds_begin_tokens_adds_none_here(tokenizer: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    folder = shutil.copytree(tokenizer, tmp_path / "bos")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<s>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    backend.save(str(folder / "tokenizer.json"))
    ours = Tokenizer(folder)
    for encoder in (ours.reference(), choose_encoder(ours)):
        assert begin not in encoder.encode(["the cat", "sat"])[0]
        assert encoder.encode(["<s>the cat"])[0].tolist().count(begin) == 1
    assert ours.vocab_size == 401


@pytest.mark.parametrize("form", ["<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_token_is_found_in_every_form(tokenizer: Path, tmp_path: Path, form: Any, file: str) -> None:
    shutil.copy(tokenizer / "tokenizer.json", tmp_path)
    (tmp_path / file).write_text(json.dumps({"eos_token": form}))
    assert Tokenizer(tmp_path).end_id == 0


def test_unusable_tokenizers_state_what_to_do(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer\.json here.*save_pretrained"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)
    shutil.copy(tokenizer / "tokenizer.json", tmp_path)
    with pytest.raises(DataError, match=r"eos_token is None.*Set eos_token"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match="eos_token is '</s>'"):
        Tokenizer(tmp_path)
