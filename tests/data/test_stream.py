"""Streamed text: disjoint per rank, without end, and resumed to the token, leg after leg."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sm_llm.data.loader import Batches, open_source
from sm_llm.data.source import Source, StreamSource
from sm_llm.data.text_blocks import StreamPosition, TextBlocks, open_dataset
from sm_llm.errors import DataError
from sm_llm.spec.training import StreamData

Write = Callable[[Path, list[Any]], Path]
DOCUMENTS = 300


@pytest.fixture
def data(tmp_path: Path, texts: list[str], write_jsonl: Write) -> StreamData:
    """Three files of 100, 150 and 50 documents, some of them empty."""
    bounds = [0, 100, 250, DOCUMENTS]
    for number in range(3):
        rows: list[Any] = [{"text": text} for text in texts[bounds[number] : bounds[number + 1]]]
        write_jsonl(tmp_path / f"{number}.jsonl", [*rows, {"text": ""}, {"text": None}])
    return StreamData(dataset="json", data_files=str(tmp_path / "*.jsonl"), seq_length=32, shuffle_buffer=70)


def batches(data: StreamData, tokenizer: Path, rank: int = 0, degree: int = 1, state: Any = None) -> Batches:
    source = open_source(data, "train", 400, 5, str(tokenizer))
    assert isinstance(source, StreamSource)
    return Batches(source, micro_batch_size=2, accumulation_steps=2, rank=rank, degree=degree, state=state)


def steps(data: StreamData, tokenizer: Path, count: int, **where: Any) -> tuple[list[int], dict[str, Any]]:
    """All ids of ``count`` steps, and the state behind them as it comes back from JSON."""
    with batches(data, tokenizer, **where) as stream:
        ids = [int(i) for _ in range(count) for batch in next(stream) for i in batch.input_ids.ravel()]
        return ids, json.loads(json.dumps(stream.state()))


def documents(data: StreamData, rank: int, degree: int, epochs: int = 1, size: int = 64) -> list[str]:
    found: list[str] = []
    for block in TextBlocks(open_dataset(data, "train", rank, degree), "text", size).read(StreamPosition()):
        if block.position.epoch == epochs:
            return found
        found.extend(block.texts)
    raise AssertionError("a stream never ends")


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_DT15_ranks_share_the_documents_whatever_the_files(data: StreamData, texts: list[str], degree: int) -> None:
    parts = [documents(data, rank, degree) for rank in range(degree)]
    assert all(parts)
    assert sorted(text for part in parts for text in part) == sorted(texts)


def test_DT15_every_rank_continues_for_ever(data: StreamData, tokenizer: Path) -> None:
    """Ranks have 150, 100 and 50 documents; none stops while another trains."""
    ids = [steps(data, tokenizer, 60, rank=rank, degree=3)[0] for rank in range(3)]
    assert [len(part) for part in ids] == [60 * 4 * 32] * 3
    assert ids[0] != ids[1] != ids[2]


@pytest.mark.parametrize("shuffle", [True, False])
def test_CK25_three_legs_equal_an_unbroken_run(data: StreamData, tokenizer: Path, shuffle: bool) -> None:
    data = data.model_copy(update={"shuffle": shuffle})
    for rank, degree in ((0, 1), (1, 2)):
        whole, _ = steps(data, tokenizer, 450, rank=rank, degree=degree)
        legs: list[int] = []
        state: Any = None
        locations = []
        for count in (13, 40, 1, 266, 130):
            ids, state = steps(data, tokenizer, count, rank=rank, degree=degree, state=state)
            legs += ids
            locations.append((state["place"]["epoch"], state["place"]["documents"], state["emitted"], state["skip"]))
        assert legs == whole
        assert locations == sorted(locations)
        assert len(set(locations)) == 5
        assert locations[-1][0] > 0  # crossed an epoch


def test_CK25_parquet_resumes_inside_row_groups(
    data: StreamData, tokenizer: Path, tmp_path: Path, texts: list[str]
) -> None:
    for number in range(2):
        part = pa.table({"text": texts[number * 150 : number * 150 + 150], "n": list(range(150))})
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=40)
    data = data.model_copy(update={"dataset": "parquet", "data_files": str(tmp_path / "*.parquet")})
    for rank, degree in ((0, 1), (1, 3)):
        whole, _ = steps(data, tokenizer, 120, rank=rank, degree=degree)
        legs: list[int] = []
        state: Any = None
        for count in (5, 50, 1, 64):
            ids, state = steps(data, tokenizer, count, rank=rank, degree=degree, state=state)
            legs += ids
        assert legs == whole


class NoState:
    """datasets before 2.20: no position of its own."""

    def __init__(self, dataset: Any) -> None:
        self._inner = dataset

    def __iter__(self) -> Any:
        return iter(self._inner)


class FrozenState(NoState):
    """datasets 5.0: reads on from a loaded state, but reports the same state ever after."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._frozen: Any = None

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state)
        self._frozen = state

    def state_dict(self) -> Any:
        return self._frozen or self._inner.state_dict()


@pytest.mark.parametrize("library", [NoState, FrozenState])
def test_CK25_a_library_without_a_sound_position_is_counted_instead(
    data: StreamData, tokenizer: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = steps(data, tokenizer, 60)
    monkeypatch.setattr("sm_llm.data.stream.open_dataset", lambda *arguments: library(open_dataset(*arguments)))
    legs: list[int] = []
    state: Any = None
    for count in (13, 7, 20, 20):
        ids, state = steps(data, tokenizer, count, state=state)
        legs += ids
    assert legs == whole


def test_the_position_is_small_and_belongs_to_the_step_handed_out(data: StreamData, tokenizer: Path) -> None:
    with batches(data, tokenizer) as stream:
        states = []
        for _ in range(20):
            next(stream)
            states.append(json.dumps(stream.state()))
    assert len(set(states)) == 20
    assert max(map(len, states)) < 2000
    resumed, _ = steps(data, tokenizer, 3, state=json.loads(states[9]))
    whole, _ = steps(data, tokenizer, 13)
    assert resumed == whole[10 * 4 * 32 :]


def test_shuffling_permutes_documents_and_differs_by_epoch_and_seed(data: StreamData, tokenizer: Path) -> None:
    def leg(seed: int, shuffle: bool = True) -> list[int]:
        source = open_source(data.model_copy(update={"shuffle": shuffle}), "train", 400, seed, str(tokenizer))
        with Batches(source, micro_batch_size=1, accumulation_steps=1, rank=0, degree=1) as stream:
            return [int(i) for _ in range(600) for i in next(stream)[0].input_ids.ravel()]

    plain, one, two = leg(0, shuffle=False), leg(0), leg(1)
    assert one == leg(0)
    assert plain != one != two
    assert plain[:200] != one[:200]


def test_rows_are_the_documents_with_end_tokens(data: StreamData, tokenizer: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(tokenizer / "tokenizer.json"))
    expected = [i for text in texts for i in [*backend.encode(text, add_special_tokens=False).ids, 0]]
    ids, _ = steps(data.model_copy(update={"shuffle": False}), tokenizer, 120)
    assert ids == [*expected, *expected][: len(ids)]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"degree": 3}, "degree was 2, is 3"),
        ({"rank": 1}, "rank was 0, is 1"),
        ({"seq_length": 64}, "seq_length was 32, is 64"),
        ({"shuffle_buffer": 71}, "shuffle_buffer was 70, is 71"),
    ],
)
def test_a_position_of_another_stream_is_refused(
    data: StreamData, tokenizer: Path, change: dict[str, Any], reported: str
) -> None:
    _, state = steps(data, tokenizer, 2, rank=0, degree=2)
    where = {"rank": 0, "degree": 2, **{key: change[key] for key in change if key in ("rank", "degree")}}
    fields = {key: change[key] for key in change if key not in where}
    with pytest.raises(DataError, match=f"belongs to another stream .*{reported}"):
        steps(data.model_copy(update=fields), tokenizer, 1, **where, state=state)


def test_validation_rows_are_the_first_of_the_split_on_every_rank(data: StreamData, tokenizer: Path) -> None:
    wanted = data.model_copy(update={"validation_split": "train", "validation_rows": 7})
    source = open_source(wanted, "validation", 400, 5, str(tokenizer))
    assert isinstance(source, Source)
    plain, _ = steps(data.model_copy(update={"shuffle": False}), tokenizer, 2)
    assert source.count == 7
    assert source.rows(np.arange(7)).input_ids.ravel().tolist() == plain[: 7 * 32]
    assert open_source(data, "validation", 400, 5, str(tokenizer)) is None
    everything = open_source(wanted.model_copy(update={"validation_rows": 10**6}), "validation", 400, 5, str(tokenizer))
    assert everything is not None
    assert 100 < everything.count < 10**6
    with pytest.raises(DataError, match="one row needs 1000000"):
        open_source(wanted.model_copy(update={"seq_length": 10**6}), "validation", 400, 5, str(tokenizer))


def test_faults_of_a_stream_are_data_errors(
    data: StreamData, tokenizer: Path, tmp_path: Path, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="needs the folder of a tokenizer"):
        open_source(data, "train", 400, 5)
    with pytest.raises(DataError, match="has 400 tokens, the model's vocabulary 300"):
        open_source(data, "train", 300, 5, str(tokenizer))
    with pytest.raises(DataError, match=r"no field 'body' in the stream; fields found: text"):
        steps(data.model_copy(update={"text_field": "body"}), tokenizer, 1)
    with pytest.raises(DataError, match="cannot open 'json', split 'test'"):
        steps(data.model_copy(update={"split": "test"}), tokenizer, 1)
    with pytest.raises(DataError, match="cannot open 'json'"):
        steps(data.model_copy(update={"data_files": str(tmp_path / "no*.jsonl")}), tokenizer, 1)
    write_jsonl(tmp_path / "empty.json", [{"text": ""}] * 3)
    with pytest.raises(DataError, match="holds no document with text"):
        steps(data.model_copy(update={"data_files": str(tmp_path / "empty.json")}), tokenizer, 1)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=r"pip install 'sm_llm\[stream\]'"):
            steps(data, tokenizer, 1)
    (tmp_path / "broken.json").write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(DataError, match="the stream broke off after"):
        steps(data.model_copy(update={"data_files": str(tmp_path / "broken.json")}), tokenizer, 100)


def test_a_stream_from_the_hub_is_opened_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract double of ``load_dataset``: which repository and which commit it is asked for."""
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, **more: Any) -> Any:
        asked.append((name, config, more["revision"], more["streaming"]))
        raise ValueError("enough")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for dataset in ("hf://datasets/org/texts@" + "0a" * 20, "org/texts"):
        data = StreamData(dataset=dataset, config_name="en", seq_length=8)
        with pytest.raises(DataError, match="enough"):
            open_dataset(data, "train", 0, 1)
    assert asked == [("org/texts", "en", "0a" * 20, True), ("org/texts", "en", None, True)]
