"""Jobs of strategy nxd on the contract double; ``torchrun … nxd_configurations.py FOLDER``.

Every process runs every configuration; rank 0 writes results.json, with the calls that the double has recorded.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from run_configurations import Harness
from worker_jobs import MODEL, result_folder, train_task

from sm_llm.convert.api import convert
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.publication.manifest import encode
from sm_llm.storage.uri import open_store

STEPS = 6
LEAN = {"checkpoint": {"every_steps": STEPS}, "validation": {"every_steps": STEPS}}
MAX_NORM = 0.5
SHORT = {"max_steps": STEPS, "global_batch_size": 4, "optim": {"max_grad_norm": MAX_NORM}}
"""Enough for a warm-up and a save on the way."""
THREE = {"max_steps": 3, "optim": {"max_grad_norm": MAX_NORM, "schedule_steps": STEPS}}
"""The first three of these steps."""
UNTIED = {"preset": "tiny", "config": {**MODEL, "tie_word_embeddings": False}}
TIED = {"preset": "tiny", "config": {**MODEL, "tie_word_embeddings": True}}
NXD = {"strategy": "nxd", "tensor_parallel_degree": 2, "flash_attention": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "linear": {"fuse_qkv": False, "sequence_parallel": False, "activation_checkpointing": "none"},
    "real": {"meta_device_initialization": False, "zero1": False, "activation_checkpointing": "full"},
    "data": {"tensor_parallel_degree": 1},
    "copied": {"tensor_parallel_degree": 1, "zero1": False},
}
"""Of two processes."""
WIDE_LAYOUTS: dict[str, dict[str, Any]] = {
    "heads": {"tensor_parallel_degree": 4},
    "heads-linear": {"tensor_parallel_degree": 4, "fuse_qkv": False, "zero1": False},
    "both": {},
    "pipeline": {"pipeline_parallel_degree": 2},
    "stages": {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 2, "fuse_qkv": False, "zero1": False},
}
"""Of four: two key/value heads for four ranks, or two data-parallel parts."""


def task(**changes: Any) -> dict[str, Any]:
    parallelism = {**NXD, **changes.pop("parallelism", {})}
    changes.setdefault("model", UNTIED)
    return train_task(**{"micro_batch_size": 1, "parallelism": parallelism, **SHORT, **changes})


class NxdHarness(Harness):
    """Every job is a process's own in truth: the library makes its groups once in each."""

    def run(self, name: str, task: dict[str, Any], **how: Any) -> None:
        contract = import_module("neuronx_distributed.contract")
        state = import_module("neuronx_distributed.parallel_layers.parallel_state")
        contract.calls.clear()
        super().run(name, task, **how)
        state.destroy_model_parallel()
        seen = [[call, {key: str(value) for key, value in options.items()}] for call, options in contract.calls]
        self.results.setdefault("calls", {})[name] = seen


def two(harness: Harness) -> None:
    for name, options in LAYOUTS.items():
        harness.run(name, task(parallelism=options, **LEAN))
    saves = {"checkpoint": {"every_steps": 3, "verify_state": True}}
    harness.run("broken", task(**saves), break_at=5)
    harness.run("broken", task(**saves), attempt=2)
    harness.run("left", task(checkpoint={"every_steps": 3}), break_at=4)
    harness.run("left", task(parallelism={"tensor_parallel_degree": 1}), attempt=2, fails=True)
    harness.run("three", task(**THREE))
    harness.run("broken-copied", task(parallelism=LAYOUTS["copied"], **saves), break_at=5)
    harness.run("broken-copied", task(parallelism=LAYOUTS["copied"], **saves), attempt=2)
    harness.run("hostile", task(checkpoint={"every_steps": 3}), break_at=4)
    if dist.get_rank() == 0:
        make_hostile(harness.folder / "hostile")
    dist.barrier()
    harness.run("hostile", task(checkpoint={"every_steps": 3}), attempt=2, fails=True)
    harness.run("tied", task(model=TIED, **LEAN))
    start = {"pretrained": str(result_folder(harness.folder / "tensor"))}
    harness.run("pretrained", task(start=start, model={"preset": None, "config": {}}, max_steps=2, **LEAN))
    if dist.get_rank() == 0:
        convert(start["pretrained"], harness.folder / "shards", to="nxd", tensor_parallel_degree=4, qkv="linear")
    dist.barrier()
    fields = {"model": {"preset": None, "config": {}}, "max_steps": 2, **LEAN}
    harness.run("from-shards", task(start={"pretrained": str(harness.folder / "shards")}, **fields))
    write_tokenizer(harness.folder / "tokenizer")
    prompt = {"sample_prompt": "ab", "sample_tokens": 3}
    tokenizer = str(harness.folder / "tokenizer")
    harness.run("sampled", task(tokenizer=tokenizer, logging=prompt, max_steps=2, **LEAN))


class Marker:
    """What an unrestricted unpickler would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def make_hostile(run: Path) -> None:
    """Put a program into the checkpoint of somebody who may also write its commit."""
    store = open_store(run)
    commit = publication.find_newest(store).commit
    assert commit is not None
    files = {it.path: it for it in commit.files}
    # Those of both processes: a process that fails alone would leave the other one waiting.
    for path in [it for it in files if re.fullmatch(r"step_3/optim/[a-z0-9_]+\.pt", it)]:
        file = run / commit.save.data_prefix / path
        torch.save({"step": Marker(run / "RAN")}, file)
        changed = {"size": file.stat().st_size, "crc64nvme": crc64_file(file)}
        files[path] = files[path].model_copy(update=changed)
    changed_commit = commit.model_copy(update={"files": tuple(files.values())})
    (run / commit.save.slot.commit_key).write_bytes(encode(changed_commit))


def write_tokenizer(folder: Path) -> None:
    """Letters as tokens. Rank 0 writes it."""
    if dist.get_rank() == 0:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Split

        coder = Tokenizer(WordLevel({chr(33 + number): number for number in range(256)}, unk_token="!"))
        coder.pre_tokenizer = Split("", "isolated")
        folder.mkdir()
        coder.save(str(folder / "tokenizer.json"))
    dist.barrier()


def four(harness: Harness) -> None:
    for name, options in WIDE_LAYOUTS.items():
        harness.run(name, task(parallelism=options, **LEAN))
    os.environ["NXD_DOUBLE_PLATFORM"] = "trn2"
    harness.run("heads-trn2", task(parallelism=WIDE_LAYOUTS["heads"], **LEAN))
    del os.environ["NXD_DOUBLE_PLATFORM"]
    harness.run("bf16", task(precision={"compute": "bf16"}, **LEAN))
    saves = {"checkpoint": {"every_steps": 3, "verify_state": True}, "precision": {"compute": "bf16"}}
    harness.run("broken", task(**saves), break_at=5)
    harness.run("broken", task(**saves), attempt=2)
    harness.run("left", task(**saves), break_at=4)
    harness.run("three", task(**THREE, precision={"compute": "bf16"}))


def use_double() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures" / "nxd_double"))


def run_all(folder: Path) -> None:
    use_double()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    harness = NxdHarness(folder)
    if harness.world == 2:
        two(harness)
    else:
        four(harness)
    harness.close()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
