"""Trains a byte-level BPE tokenizer and writes it as a Hugging Face folder that old and new versions read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sm_llm.data.describe import write_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def train_tokenizer(texts: Iterator[str], folder: Path, vocab_size: int, end_token: str) -> int:
    """Train on ``texts`` and write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Byte-level BPE (Radford et al. 2019): every string can be encoded and decodes to itself. Returns the size of
    the vocabulary, which is smaller than asked where the text has too few pairs to merge.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_token],
        # All 256 bytes, also those that the text does not contain: no later text is unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", _readable_by_all(json.loads(tokenizer.to_str())))
    write_json(folder / "tokenizer_config.json", _config(end_token))
    write_json(folder / "special_tokens_map.json", {"eos_token": end_token})
    return int(tokenizer.get_vocab_size())


def _readable_by_all(content: dict[str, Any]) -> dict[str, Any]:
    """Merges as "left right" strings: tokenizers before 0.20 (transformers 4.44) cannot read pairs.

    No byte-level symbol contains a space, so nothing is lost.
    """
    merges = content["model"]["merges"]
    content["model"]["merges"] = [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]
    return content


def _config(end_token: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_token,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
