"""Run as a program under any stack: what it reads from prepared data, as one JSON line on standard output.

Standard input: ``{"out": folder of prepare, "json": folder of line files, "text": glob, "texts": […],
"scratch": folder, "legs": steps of each leg of a stream}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow
import tokenizers
import transformers

from sm_llm.data.loader import Batches, evaluation_batches, open_source
from sm_llm.spec.training import JsonRowsData, RowsData, StreamData


def stream(job: dict[str, Any], legs: list[int]) -> list[Any]:
    data = StreamData(dataset="json", data_files=job["text"], seq_length=16, shuffle_buffer=70)
    source = open_source(data, "train", 400, 0, f"{job['out']}/tokenizer")
    found: list[Any] = []
    state: Any = None
    for count in legs:
        numbers = {"micro_batch_size": 2, "accumulation_steps": 1, "rank": 1, "degree": 2}
        with Batches(source, **numbers, state=state) as batches:
            found += [next(batches)[0].input_ids.tolist() for _ in range(count)]
            state = json.loads(json.dumps(batches.state()))
    return found


def main(job: dict[str, Any]) -> dict[str, Any]:
    out = Path(job["out"])
    split = datasets.load_from_disk(str(out / "train"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out / "tokenizer"))
    rows = RowsData(train=str(out / "train"), validation=str(out / "validation"), seq_length=16)
    validation = open_source(rows, "validation", 400, 0)
    assert validation is not None
    train = open_source(rows, "train", 400, 0)
    lines = open_source(JsonRowsData(train=job["json"], seq_length=4), "train", 400, 0, scratch=Path(job["scratch"]))
    numbers = {"micro_batch_size": 2, "accumulation_steps": 2, "rank": 1, "degree": 2, "total_steps": 40}
    libraries = (datasets, numpy, pyarrow, tokenizers, transformers)
    return {
        "versions": {library.__name__: library.__version__ for library in libraries},
        "rows": {name: split[:][name] for name in split.column_names},
        "split": str(split.split),
        "ids": tokenizer(job["texts"], add_special_tokens=False)["input_ids"],
        "end": tokenizer.eos_token_id,
        "batches": [b.input_ids.tolist() for step in Batches(train, **numbers) for b in step],
        "validation": [batch.labels.tolist() for batch in evaluation_batches(validation, 2, 0, 1)],
        "lines": [b.labels.tolist() for step in Batches(lines, **numbers) for b in step],
        "stream": stream(job, job["legs"]),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
