"""Events read back bit for bit, whatever happened to their writer."""

from __future__ import annotations

import json
import math
import struct
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm_llm.runs.events.events import (
    EXACT,
    AttemptEnded,
    DataPrepared,
    EventWriter,
    Notice,
    Step,
    Throughput,
    Validation,
    decode,
    encode,
    event_files,
    newest_per_step,
    read_events,
    read_file,
)
from sm_llm.runs.run_paths import RunPaths

if TYPE_CHECKING:
    from pathlib import Path


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(loss=st.floats(allow_nan=False), norm=st.floats(allow_nan=False), rate=st.floats(0, 1))
def test_floats_come_back_bit_for_bit(loss: float, norm: float, rate: float) -> None:
    event = decode(encode(Step(7, loss, norm, rate, 512), attempt=2, at=1753000000.25))
    read = [event[name] for name in ("loss", "grad_norm", "learning_rate")]
    assert [bits(it) for it in read] == [bits(it) for it in (loss, norm, rate)]
    assert (event["kind"], event["step"], event["tokens"], event["attempt"]) == ("step", 7, 512, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_json_does_not_know_survive_in_any_field(value: float) -> None:
    for event, name in (
        (Step(1, value, 1.0, 0.1, 1), "loss"),
        (Validation(1, 700.0, value, 1), "perplexity"),
        (Throughput(1, 1.0, 1.0, value, 0.1, 0.0, None, 1), "mfu"),
    ):
        line = encode(event, attempt=1, at=0.0)
        assert json.loads(line, parse_constant=pytest.fail)[name] is None
        read = decode(line)[name]
        assert read == value or (math.isnan(read) and math.isnan(value))
    rows = {"rows": 1, "documents": 1, "mean": value}
    account = {"documents": {"used": 1}, "splits": {"train": rows}, "tokenizer": {"vocab_size": 3}}
    account |= {"seq_length": 4, "tokens_in": 5, "tokens_kept": 4}
    found = decode(encode(DataPrepared(account), attempt=1, at=0.0))["account"]
    assert found == {**account, "splits": {"train": {**rows, "mean": None}}}


def test_exact_fields_keep_a_readable_number_beside_the_hexadecimal_one() -> None:
    record = json.loads(encode(Step(1, 0.1 + 0.2, 1.5, 1e-4, 8), attempt=1, at=0.0))
    assert record["loss"] == 0.1 + 0.2
    assert float.fromhex(record["loss_hex"]) == record["loss"]
    assert {f"{name}_hex" for name in EXACT if name in record} <= record.keys()
    assert not any(name.endswith("_hex") for name in decode(json.dumps(record)))


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"kind": "step"', '{"kind":"step","loss":1,"loss_hex":"zz"}', "3"])
def test_what_is_not_an_event_is_reported(line: str) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_a_partial_last_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1-rank0.jsonl"
    writer = EventWriter(path, attempt=1, clock=lambda: 5.0)
    writer.write(Notice("one"))
    half = encode(Notice("zwei ü"), attempt=1, at=5.0).encode() + b"\n"
    with path.open("ab") as stream:
        stream.write(half[:-4])
    first = list(read_file(path))
    assert [event["message"] for _, event in first] == ["one"]
    with path.open("ab") as stream:
        stream.write(half[-4:])
    assert [event["message"] for _, event in read_file(path, first[-1][0])] == ["zwei ü"]


def test_a_partial_line_of_a_killed_writer_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1-launcher.jsonl"
    path.write_bytes(b'{"kind": "notice", "message": "cut o')
    EventWriter(path, attempt=1).write(AttemptEnded("failed", "killed by signal 9"))
    assert [event["kind"] for _, event in read_file(path)] == ["attempt_ended"]


def test_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1-rank0.jsonl"
    good = encode(Notice("good"), attempt=1, at=0.0).encode() + b"\n"
    path.write_bytes(good + b"\xff\xfe garbage\n" + good)
    assert len(list(read_file(path))) == 2


def test_threads_share_a_writer_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1-rank0.jsonl"
    writer = EventWriter(path, attempt=1)
    message = "x" * 5000
    threads = [threading.Thread(target=lambda: [writer.write(Notice(message)) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert [event["message"] for _, event in read_file(path)] == [message] * 200


def test_attempts_are_read_in_numeric_order_and_the_newest_counts(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    losses = {2: {3: 2.3, 4: 2.4}, 10: {4: 10.4, 5: 10.5}, 1: {1: 1.1, 2: 1.2, 3: 1.3}}
    for attempt, steps in losses.items():
        writer = EventWriter(paths.event_file(attempt, "rank0"), attempt)
        for step, loss in steps.items():
            writer.write(Step(step, loss, 1.0, 0.1, 1))
        writer.close()
    (paths.events / "attempt-x-rank0.jsonl").write_text("not ours")
    assert [(attempt, writer) for attempt, writer, _ in event_files(paths.events)] == [
        (1, "rank0"),
        (2, "rank0"),
        (10, "rank0"),
    ]
    assert [event["attempt"] for event in read_events(paths.events)] == [1, 1, 1, 2, 2, 10, 10]
    newest = newest_per_step(read_events(paths.events), "step")
    assert {it["step"]: it["loss"] for it in newest} == {1: 1.1, 2: 1.2, 3: 2.3, 4: 10.4, 5: 10.5}
    # The order in which they are read does not matter.
    backwards = newest_per_step(reversed(list(read_events(paths.events))), "step")
    assert [it["loss"] for it in backwards] == [it["loss"] for it in newest]


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none")) == []
