"""Text that is very little or very long: something to validate on, flat memory, and the same ids as in one piece."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from sm_llm.data.prepare import long_text, prepare_rows, readers, tokenizer_choice
from sm_llm.data.prepare.documents import is_held_out
from sm_llm.data.prepare.encode import Ids, Offsets
from sm_llm.data.prepare.encode import Tokenizer as Ours
from sm_llm.data.prepare.long_text import encode_long
from sm_llm.data.rows import RowsFolder
from sm_llm.errors import DataError
from sm_llm.launcher.display.rows_summary import rows_sentence

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., dict[str, Any]]
    Ids_of = Callable[[Path], Any]


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("documents", [1, 2, 5, 30])
@pytest.mark.parametrize("fraction", [0.01, 0.9])
def test_E19_a_small_folder_always_holds_something_out(
    documents: int, fraction: float, tail: str, run_prepare: Run, tmp_path: Path, all_ids: Ids_of
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(documents):
        (folder / f"{number:02d}.txt").write_text(f"the cat sat on mat {number} " * 20)
    account = run_prepare(folder, validation_fraction=fraction, tail=tail)
    splits = account["splits"]
    assert all(split["rows"] > 0 for split in splits.values())
    assert splits["validation"]["documents"] > 0
    assert splits["train"]["documents"] + splits["validation"]["documents"] == documents
    assert account["tokens_in"] == account["tokens_kept"] + sum(account["tokens_dropped"].values())
    if any("held out instead" in notice for notice in account["notices"]):
        whole = run_prepare(folder, output="whole", tail=tail)
        rows = whole["splits"]["train"]["rows"]
        assert splits["validation"]["rows"] == min(rows - 1, max(1, round(fraction * rows)))
        parts = [all_ids(tmp_path / "out" / name) for name in ("train", "validation")]
        assert np.array_equal(np.concatenate(parts), all_ids(tmp_path / "whole" / "train"))
    else:
        assert documents > 1


def test_E19_a_tokenizer_is_trained_although_every_document_would_be_held_out(run_prepare: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on a mat " * 50)
    account = run_prepare(
        tmp_path / "a.txt", validation_fraction=0.99, tokenizer=None, train_tokenizer={"vocab_size": 300}
    )
    assert account["splits"]["validation"]["documents"] == 1


def test_E19_one_row_cannot_be_divided(run_prepare: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat")
    with pytest.raises(
        DataError, match=r"make 0 row of 16, but task\.validation_fraction wants one .* Set task\.tail=pad"
    ):
        run_prepare(tmp_path / "a.txt", validation_fraction=0.1)


def test_E19_the_closing_line_counts_what_is_held_out(run_prepare: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on a mat " * 100)
    reported = rows_sentence(run_prepare(tmp_path / "a.txt", validation_fraction=0.1))
    rows = [len(RowsFolder.open(tmp_path / "out" / name)) for name in ("train", "validation")]
    assert reported == f"{rows[0]} rows of 16 tokens to train on, {rows[1]} rows (1 document) held out for validation"
    assert "none held out for validation" in rows_sentence(run_prepare(tmp_path / "a.txt"))


class Encoder:
    """Any tokenizer of the library as an encoder, with the largest text it has been given."""

    name = "any"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        self.longest = max(self.longest, *map(len, texts))
        parts = [np.array(it.ids, np.int32) for it in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        return np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64)


def trained(kind: str, texts: list[str]) -> Encoder:
    """GPT-2's and Llama 3's way to split, one that splits at blanks, and Llama 2's, which splits nothing."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if kind == "llama2" else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "llama3":
        pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        from tokenizers import Regex

        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Replace("▁", " ")
        alphabet = []
    special = ["<unk>"] if kind == "llama2" else []
    sample = [line for text in texts for line in text.splitlines()] if kind == "llama2" else texts
    tokenizer.train_from_iterator(
        sample,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    return Encoder(tokenizer)


def written(seed: int, characters: int, *, lines: bool = True) -> str:
    words = ["cat", "sat", "naïve", "1,234.50", "don't", "你好。", "🙂", "—", "\t", "  ", "x" * 30, "=" * 12]
    ends = [" ", " ", " ", "\n", "\n\n", ".\n", ". \n ", "\r\n"] if lines else [" ", "  ", ", "]
    draw = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < characters:
        parts += [draw.choice(words), draw.choice(ends)]
    return "".join(parts)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2"])
@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_long_text_has_the_ids_of_the_whole(
    kind: str, lines: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "PIECE", 1000)
    monkeypatch.setattr(long_text, "_CONTEXT", 100)
    text = written(seed, 20_000, lines=lines)
    encoder = trained(kind, [text])
    whole = encoder.encode([text])[0]
    encoder.longest = 0
    draw = random.Random(seed)
    parts, rest = [], text
    while rest:
        size = draw.randrange(1, 1500)
        parts.append(rest[:size])
        rest = rest[size:]
    found = list(encode_long(encoder, parts))
    assert np.array_equal(np.concatenate(found), whole)
    assert encoder.longest < 5000


def test_a_text_without_a_place_to_cut_is_encoded_as_a_whole(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PIECE", 1000)
    text = "x" * 10_000
    encoder = Ours(tokenizer).reference()
    assert np.array_equal(np.concatenate(list(encode_long(encoder, [text]))), encoder.encode([text])[0])
    assert list(encode_long(encoder, [])) == []


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_file_read_in_parts_gives_the_rows_of_one_read_at_once(
    fraction: float, run_prepare: Run, tmp_path: Path, all_ids: Ids_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_bytes(
            b"\xef\xbb\xbf" * (number == 2) + written(number, 9000 + number).encode()
        )
    (folder / "blank.txt").write_text(" \n" * 5000)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 2000)
    fields: dict[str, Any] = {"validation_fraction": fraction, "seed": 4}
    whole = run_prepare(folder, output="whole", **fields)
    for module, name, value in (
        (readers, "LONG_BYTES", 5000),
        (readers, "_PART_CHARACTERS", 700),
        (long_text, "PIECE", 1000),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(prepare_rows, "LONG_BYTES", 5000)
    parts = run_prepare(folder, **fields)
    assert parts == whole
    assert parts["documents"]["rejected"] == {"empty": 1, "not_utf8": 1}
    for split in whole["splits"]:
        assert np.array_equal(all_ids(tmp_path / "out" / split), all_ids(tmp_path / "whole" / split))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.99])
def test_a_tokenizer_is_trained_on_files_read_in_parts(
    fraction: float, run_prepare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the documents that are not held out, or of all where none would be left."""
    monkeypatch.setattr(readers, "LONG_BYTES", 500)
    monkeypatch.setattr(readers, "_PART_CHARACTERS", 300)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(written(number, 200 if number == 3 else 3000))
    seen: list[str] = []
    real = tokenizer_choice.train_tokenizer

    def spy(texts: Any, *rest: Any) -> int:
        seen.extend(texts)
        return real(iter(seen), *rest)

    monkeypatch.setattr(tokenizer_choice, "train_tokenizer", spy)
    fields: dict[str, Any] = {
        "tokenizer": None,
        "train_tokenizer": {"vocab_size": 300},
        "validation_fraction": fraction,
    }
    run_prepare(folder, **fields)
    texts = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    kept = [text for text in texts if not is_held_out(text, 0, fraction)]
    assert "".join(seen) == "".join(kept or texts)


MEASURE = """
import re, sys
from pathlib import Path
from sm_llm.data.prepare.prepare_rows import prepare
from sm_llm.spec.tasks import PrepareTask
task = PrepareTask(sources=[sys.argv[1]], seq_length=512, tokenizer=sys.argv[2], validation_fraction=0.3)
prepare(task, Path(sys.argv[3]), lambda _: None)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
"""The peak of this program alone: what getrusage counts begins with the memory of the process that started it."""


@pytest.mark.integration
def test_memory_is_flat_for_one_long_text_file(tmp_path: Path, tokenizer: Path) -> None:
    """Peak memory in processes of their own. In one piece the longer text takes several hundred MB more."""
    line = "the cat sat on a mat and the owners paid 1,234.50 for tea\n"
    peaks = []
    for megabytes in (9, 45):
        file = tmp_path / f"{megabytes}.txt"
        file.write_text(line * (megabytes * 1_000_000 // len(line)))
        command = [sys.executable, "-c", MEASURE, str(file), str(tokenizer), str(tmp_path / f"out-{megabytes}")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(int(done.stdout) / 1000)
    assert peaks[1] - peaks[0] < 60, f"peaks in MB: {peaks}"
