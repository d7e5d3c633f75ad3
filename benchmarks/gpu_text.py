"""The text that gpu_train.py trains on: Python's standard library, in a tokenizer made of it, for all subjects.

The same tokens for everyone: how fast a GPU multiplies hangs on the numbers, since it lowers its clock to stay within
its power. Random tokens of a whole vocabulary cost a step of 1B 1.6% more than these (docs/benchmarks.md).
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

from sm_llm.data.prepare.prepare_rows import ACCOUNT, prepare
from sm_llm.spec.tasks import PrepareTask

VOCABULARY = 4096
"""Of the tokenizer alone; the models have their own, of 128,256 entries."""
_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>"]


def write_text(folder: Path) -> None:
    """``folder``/data/train.jsonl, a document a line, and ``folder``/tokenizer; whole or not at all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [it.read_text(encoding="utf-8", errors="replace") for it in sources]
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    data, assets = text_data(unfinished), text_tokenizer(unfinished)
    data.mkdir(parents=True)
    assets.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts[:60], trainer)
    tokenizer.save(str(assets / "tokenizer.json"))
    config = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1], "add_bos_token": True}
    (assets / "tokenizer_config.json").write_text(json.dumps(config))
    unfinished.rename(folder)


def text_data(folder: Path) -> Path:
    return folder / "data"


def text_tokenizer(folder: Path) -> Path:
    return folder / "tokenizer"


def text_rows(folder: Path, seq_length: int) -> Path:
    """Packed rows of the text, prepared when they are first asked for."""
    output = folder / f"rows-{seq_length}"
    if not (output / ACCOUNT).exists():
        tokenizer = str(text_tokenizer(folder))
        task = PrepareTask(sources=[str(text_data(folder))], tokenizer=tokenizer, seq_length=seq_length)
        prepare(task, output, lambda *_: None)
    return output / "train"
