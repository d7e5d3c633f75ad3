"""CV04, CV19: conversions stay within a few MiB of memory, whatever the model's size and however many workers write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm_llm.models.config import normalise
from sm_llm.models.families.table import family

pytestmark = pytest.mark.integration
WORKERS = 8
BUDGET = WORKERS * (4 << 20) + (16 << 20)
"""Bytes: a buffer or two of 1 MiB per worker, and the interpreter's own."""

MEASURED = """
import json, sys, threading
import sm_llm, sm_llm.convert.api
from sm_llm.storage.checksum import crc64_bytes

def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return 1024 * int(next(it for it in lines if it.startswith("Anonymous:")).split()[1])

crc64_bytes(b"")
before = peak = anonymous()
calls = 0
def progress(done, total):
    global calls, peak
    calls += 1
    if calls % 16 == 0:
        peak = max(peak, anonymous())
given = json.loads(sys.argv[1])
sm_llm.convert(given.pop("source"), given.pop("destination"), progress=progress, **given)
assert not {"torch", "transformers"} & set(sys.modules)
print(peak - before)
"""


def measured(**given: Any) -> int:
    argv = [
        sys.executable,
        "-c",
        MEASURED,
        json.dumps({name: str(it) if isinstance(it, Path) else it for name, it in given.items()}),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def sparse_model(folder: Path) -> int:
    """A model of zeros that take no room: 0.26 GB, its largest tensor 131 MB; returns its bytes."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 32}
    config = normalise(
        {"model_type": "llama", **sizes, "num_key_value_heads": 8, "vocab_size": 32_000, "tie_word_embeddings": True}
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, location = {}, 0
    for name, it in family(config).tensors(config).items():
        header[name] = {"dtype": "BF16", "shape": list(it.shape), "data_offsets": [location, location + 2 * it.size]}
        location += 2 * it.size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + location)
    return location


def test_CV04_CV19_memory_is_a_buffer_per_worker(tmp_path: Path) -> None:
    size = sparse_model(tmp_path / "source")
    assert size > 4 * BUDGET
    given = {"to": "nxd", "tensor_parallel_degree": 16, "kv_size_multiplier": 2, "workers": WORKERS}
    assert measured(source=tmp_path / "source", destination=tmp_path / "shards", **given) < BUDGET
    assert measured(source=tmp_path / "shards", destination=tmp_path / "back", to="hf", workers=WORKERS) < BUDGET
