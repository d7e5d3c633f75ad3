"""Jobs with every product of degrees and every family; ``torchrun … parallel_configurations.py FOLDER``."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from peer_memory import PeerMemory
from worker_jobs import train_task

from sm_llm.worker.strategies.fsdp import peer_copies

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAN = {"max_steps": 6, "checkpoint": {"every_steps": 6}, "validation": {"every_steps": 6}}
"""These jobs are about their steps."""
RESHARDED = {**LEAN, "checkpoint": {"every_steps": 2}}
"""The same steps, continued with other degrees."""

DEGREES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "copies": {"sharding": "none"},
        "tp2": {"tensor_parallel_degree": 2},
        "cp2": {"context_parallel_degree": 2},
    },
    4: {
        "fsdp4": {},
        "hybrid": {"sharding": "hybrid", "hybrid_shard_degree": 2},
        "copies": {"sharding": "none"},
        "tp2-fsdp2": {"tensor_parallel_degree": 2},
        "tp2-fsdp2-whole": {"tensor_parallel_degree": 2, "sequence_parallel": False},
        "tp2-copies": {"tensor_parallel_degree": 2, "sharding": "none"},
        "cp2-fsdp2": {"context_parallel_degree": 2},
        "cp4": {"context_parallel_degree": 4},
        "tp2-cp2": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
        "offload": {
            "offload_optimizer": True,
            "offload_activations": True,
            "activation_checkpointing": "full",
            "reshard_after_forward": 2,
        },
        "selective": {"activation_checkpointing": "selective"},
        "every-nth": {"activation_checkpointing": "every_nth"},
    },
}

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 12},
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 3},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "scaled": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


SPLIT: dict[str, dict[str, Any]] = {
    "qwen2": {"tensor_parallel_degree": 2},
    "scaled": {"tensor_parallel_degree": 2},
}
"""Families other than that of ``DEGREES`` with what they can be split by, on two processes."""
ROUNDED: dict[str, Any] = {**LEAN, "precision": {"compute": "bf16"}}
PADDED_2 = ("cp2", "tp2")
PADDED_4 = ("hybrid", "tp2-fsdp2", "cp2-fsdp2")
"""Of ``DEGREES``, those whose processes share rows, and on four those in which several have rows of their own."""
COPIED_4 = ("hybrid", "tp2-fsdp2", "cp2-fsdp2")
"""Of ``DEGREES``, those that copy engines serve as well."""
SPLIT_4: dict[str, dict[str, Any]] = {
    "mistral": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
    "qwen3": {"context_parallel_degree": 4},
    "scaled": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
}
"""The same on four."""


def family_task(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A short job of a family; its config is written below ``folder``."""
    location = folder / "configs" / name
    if not dist.is_initialized() or dist.get_rank() == 0:
        location.mkdir(parents=True, exist_ok=True)
        (location / "config.json").write_text(json.dumps({**SMALL, **FAMILIES[name]}))
    if dist.is_initialized():
        dist.barrier()
    return train_task(
        model={"preset": None, "path": str(location), "config": {}}, **{**LEAN, "max_steps": 4}, **changes
    )


@contextmanager
def copied(harness: Any) -> Iterator[PeerMemory]:
    """Jobs inside move parameters and gradients as on GPUs that read one another's memory, here by mapped files."""
    folder = Path(tempfile.mkdtemp(dir=harness.folder)) if dist.get_rank() == 0 else None
    found = [folder]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    memory = PeerMemory(Path(found[0]))
    with patch.object(peer_copies, "symmetric", memory), patch.object(peer_copies, "_obstacle", _none):
        yield memory


def _none(*_: Any, **__: Any) -> str:
    return ""


def rounded(harness: Any, *others: str) -> None:
    """bf16, with gradients converted to fp32 before they travel, and after; ``others`` are of ``DEGREES``."""
    tasks = {"kept": {"reshard_after_forward": False}, **{name: DEGREES[harness.world][name] for name in others}}
    for name, degrees in tasks.items():
        harness.run(f"rounded-{name}", train_task(**ROUNDED, parallelism=degrees))
        with copied(harness) as memory:
            # The test jobs are deterministic, which keeps to a library where it is not asked for copies.
            asked = {**degrees, "copy_engine_collectives": True}
            harness.run(f"copied-{name}", train_task(**ROUNDED, parallelism=asked))
        harness.results[f"copies-{name}"] = memory.copies


def padded(harness: Any, name: str, degrees: dict[str, Any]) -> None:
    """Rows of different lengths, so that processes count different numbers of labels; ``name`` is of ``degrees``."""
    rows = str(harness.folder.parent / "padded")
    data = {"format": "json_rows", "seq_length": 32, "train": rows, "shuffle": True}
    harness.run(f"padded-{name}", train_task(data=data, max_steps=4, parallelism=degrees))


def resharded(harness: Any, degrees: dict[str, Any]) -> None:
    """Saved by plain FSDP, continued with other degrees, and back."""
    task = train_task(**RESHARDED)
    harness.run("resharded", task, break_at=3)
    harness.run("resharded", {**task, "parallelism": degrees}, attempt=2, break_at=5)
    if dist.get_rank() == 0:
        shutil.copytree(harness.folder / "resharded", harness.folder / "for-others" / "resharded")
    dist.barrier()
    harness.run("resharded", task, attempt=3)


def empty_shards(harness: Any) -> None:
    """More processes than a parameter has rows: q_norm and k_norm have two."""
    location = harness.folder / "configs" / "narrow"
    if dist.get_rank() == 0:
        location.mkdir(parents=True)
        narrow = {**SMALL, **FAMILIES["qwen3"], "head_dim": 2}
        (location / "config.json").write_text(json.dumps(narrow))
    dist.barrier()
    task = train_task(
        model={"preset": None, "path": str(location), "config": {}}, max_steps=5, checkpoint={"every_steps": 3}
    )
    harness.run("narrow", task)
    harness.run("narrow-broken", task, break_at=5)
    harness.run("narrow-broken", task, attempt=2)


def one(harness: Any) -> None:
    """What the others are compared with, and what four processes have left in ``FOLDER/resharded``."""
    padded(harness, "alone", {})
    for name in FAMILIES:
        harness.run(f"family-{name}", family_task(harness.folder, name))
    harness.run("resharded", train_task(**RESHARDED), attempt=3)


def two(harness: Any) -> None:
    harness.run("base", train_task(**LEAN))
    for name in FAMILIES:
        harness.run(f"family-{name}", family_task(harness.folder, name))
    for name, degrees in SPLIT.items():
        harness.run(f"split-{name}", family_task(harness.folder, name, parallelism=degrees))
    for name, degrees in DEGREES[2].items():
        harness.run(name, train_task(parallelism=degrees, **LEAN))
    for name in PADDED_2:
        padded(harness, name, DEGREES[2][name])
    resharded(harness, {"tensor_parallel_degree": 2})
    rounded(harness)


def four(harness: Any) -> None:
    for name, degrees in DEGREES[4].items():
        harness.run(name, train_task(parallelism=degrees, **LEAN))
    for name in PADDED_4:
        padded(harness, name, DEGREES[4][name])
    resharded(harness, {"tensor_parallel_degree": 2})
    empty_shards(harness)
    rounded(harness, *COPIED_4)
    harness.run("family-mixtral", family_task(harness.folder, "mixtral"))
    for name, degrees in SPLIT_4.items():
        harness.run(f"split-{name}", family_task(harness.folder, name, parallelism=degrees))


def run_all(folder: Path) -> None:
    from run_configurations import Harness

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    harness = Harness(folder)
    {1: one, 2: two, 4: four}[harness.world](harness)
    harness.close()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
