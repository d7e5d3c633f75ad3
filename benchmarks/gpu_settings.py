"""What gpu_train.py measures: settings, and suites of them that one command on a GPU machine runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RATE = 1e-4
OURS, BARE, BEFORE, TORCHTITAN = "ours", "bare", "before", "torchtitan"
"""Subjects: the worker's own loop, what one would write without it, the worker of another checkout, torchtitan."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    preset: str
    seq_length: int
    batch: int
    """Sequences of a step on each GPU."""
    gpus: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    compile: bool | str = True
    parallelism: dict[str, Any] = field(default_factory=dict)
    compute: str = "bf16"
    micro_batch_size: int | str | None = None
    """None: all of ``batch`` at once."""
    reduce: str = "fp32"
    moments: str = "master"

    def task(self, rows: str | None = None) -> dict[str, Any]:
        """It trains on the packed ``rows`` of a folder, or on random tokens."""
        synthetic = {"format": "synthetic", "seq_length": self.seq_length, "rows": 4096}
        return {
            "kind": "train",
            "model": {"preset": self.preset, "config": self.config},
            "data": synthetic if rows is None else {"format": "rows", "train": rows, "seq_length": self.seq_length},
            "micro_batch_size": self.micro_batch_size or self.batch,
            "global_batch_size": self.gpus * self.batch,
            "max_steps": 1_000_000,
            "optim": {"learning_rate": RATE, "schedule": "constant"},
            "precision": {
                "compute": self.compute,
                "compile": self.compile,
                "reduce": self.reduce,
                "moments": self.moments,
            },
            "parallelism": {**NOTHING, **self.parallelism},
            "checkpoint": {"every_steps": 1_000_000, "keep_last": 1},
            "logging": {"every_steps": 1_000_000},
        }


NOTHING = {"activation_checkpointing": "none", "reshard_after_forward": True}
AUTO = dict.fromkeys(NOTHING, "auto")
UNTIED = {"tie_word_embeddings": False}
KEPT = {"reshard_after_forward": False}
BUDGET = {"activation_checkpointing": "budget"}
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
NCCL = {"copy_engine_collectives": False}
SETTINGS = {
    "tiny": Setting("tiny", 128, 2, compile=False, compute="fp32"),
    "1b": Setting("llama-3.2-1b", 4096, 4, config=UNTIED),
    "1b-tied": Setting("llama-3.2-1b", 4096, 4),
    "1b-fp8": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, compute="fp8"),
    "1b-budget": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, parallelism=BUDGET),
    "1b-full": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, parallelism=FULL),
    "1b-1": Setting("llama-3.2-1b", 4096, 1, config=UNTIED),
    "1b-16": Setting("llama-3.2-1b", 4096, 16, config=UNTIED),
    "1b-8": Setting("llama-3.2-1b", 4096, 8, config=UNTIED),
    "1b-8-budget": Setting("llama-3.2-1b", 4096, 8, config=UNTIED, parallelism=BUDGET),
    "1b-16-budget-fp8": Setting("llama-3.2-1b", 4096, 16, config=UNTIED, parallelism=BUDGET, compute="fp8"),
    "1b-32k": Setting("llama-3.2-1b", 32768, 1, config=UNTIED),
    "3b": Setting("llama-3.2-3b", 8192, 1),
    "qwen3-0.6b": Setting("qwen3-0.6b", 8192, 4),
    "mistral-8-layers": Setting("mistral-7b", 8192, 2, config={"num_hidden_layers": 8}),
    "mixtral-2-layers": Setting("mixtral-8x7b", 4096, 2, config={"num_hidden_layers": 2}),
    "1b-moments-bf16": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, moments="bf16"),
    "1b-eager": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, compile=False),
    "1b-selective": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, parallelism=SELECTIVE),
    "1b-auto": Setting("llama-3.2-1b", 4096, 4, 1, UNTIED, "auto", AUTO, micro_batch_size="auto"),
    "1b-auto-16": Setting("llama-3.2-1b", 4096, 16, 1, UNTIED, "auto", AUTO, micro_batch_size="auto"),
    "qwen3-8b-8-layers": Setting("qwen3-8b", 8192, 2, config={"num_hidden_layers": 8}),
    "8b-auto": Setting("llama-3.1-8b", 8192, 1, 2, {}, "auto", AUTO, micro_batch_size="auto"),
    "8b-auto-2": Setting("llama-3.1-8b", 8192, 2, 2, {}, "auto", AUTO, micro_batch_size="auto"),
    "8b-auto-fp8-2": Setting("llama-3.1-8b", 8192, 2, 2, {}, "auto", AUTO, "fp8", "auto"),
    "qwen3-8b": Setting("qwen3-8b", 8192, 1, 2),
    "mistral-7b": Setting("mistral-7b", 8192, 1, 2),
    "8b-auto-32k": Setting("llama-3.1-8b", 32768, 1, 4, {}, "auto", AUTO, micro_batch_size="auto"),
    "8b-2": Setting("llama-3.1-8b", 8192, 2, 2),
    "8b-kept-2-budget": Setting("llama-3.1-8b", 8192, 2, 2, parallelism={**KEPT, **BUDGET}),
    "8b-kept-fp8": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=KEPT, compute="fp8"),
    "8b-kept-fp8-2": Setting("llama-3.1-8b", 8192, 2, 2, parallelism=KEPT, compute="fp8"),
    "8b-fp8-2": Setting("llama-3.1-8b", 8192, 2, 2, compute="fp8"),
    "8b-kept-reduce-bf16": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=KEPT, reduce="bf16"),
    "8b-nccl": Setting("llama-3.1-8b", 8192, 2, 2, {}, "auto", {**AUTO, **NCCL}, micro_batch_size="auto"),
    "8b-nccl-fp8": Setting("llama-3.1-8b", 8192, 2, 2, {}, "auto", {**AUTO, **NCCL}, "fp8", "auto"),
    "8b-nccl-selective": Setting("llama-3.1-8b", 8192, 1, 2, parallelism={**SELECTIVE, **NCCL}),
    "8b-moments-bf16": Setting("llama-3.1-8b", 8192, 2, 2, {}, "auto", AUTO, micro_batch_size="auto", moments="bf16"),
    "8b-tp": Setting("llama-3.1-8b", 8192, 1, 2, parallelism={"tensor_parallel_degree": 2}),
    "8b-tp-eager": Setting("llama-3.1-8b", 8192, 1, 2, parallelism={"tensor_parallel_degree": 2}, compile=False),
    "8b-async-tp": Setting(
        "llama-3.1-8b", 8192, 1, 2, parallelism={"tensor_parallel_degree": 2, "async_tensor_parallel": True}
    ),
    "8b-full-4": Setting("llama-3.1-8b", 8192, 4, 2, parallelism=FULL),
    "8b-accumulated": Setting("llama-3.1-8b", 8192, 2, 2, micro_batch_size=1),
    "8b-budget": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=BUDGET),
    "8b": Setting("llama-3.1-8b", 8192, 1, 2),
    "8b-kept": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=KEPT),
    "8b-selective": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=SELECTIVE),
    "8b-selective-2": Setting("llama-3.1-8b", 8192, 2, 2, parallelism=SELECTIVE),
}


@dataclass(frozen=True)
class Suite:
    """Turns that belong together, those of most worth first: (setting, subject)."""

    about: str
    gpus: int
    turns: tuple[tuple[str, str], ...]
    rounds: int = 1


PEAKS = (
    *("1b-16", "mixtral-2-layers", "qwen3-8b-8-layers", "mistral-8-layers", "qwen3-0.6b"),
    *("1b-1", "1b-selective", "1b-full", "1b-budget"),
)
"""Beside those of the other suites."""
SUITES = {
    "1b": Suite(
        "Llama 3.2 1B on one GPU beside torchtitan, bf16 and fp8",
        1,
        (("1b", OURS), ("1b", TORCHTITAN), ("1b-fp8", OURS), ("1b-fp8", TORCHTITAN)),
        3,
    ),
    "8b": Suite(
        "Llama 3.1 8B on two GPUs beside torchtitan: chosen settings, the same settings, each side's best, fp8",
        2,
        (
            *(("8b-auto-2", OURS), ("8b-selective", TORCHTITAN), ("8b-kept", TORCHTITAN), ("8b-auto-fp8-2", OURS)),
            *(("8b-fp8-2", TORCHTITAN), ("8b-selective", OURS), ("8b-moments-bf16", OURS), ("8b-auto", OURS)),
        ),
        3,
    ),
    "best": Suite(
        "8B, each side's best, in bf16",
        2,
        (("8b-auto-2", OURS), ("8b-kept", TORCHTITAN), ("8b-moments-bf16", OURS)),
        3,
    ),
    "fp8": Suite("8B, each side's best, in fp8", 2, (("8b-auto-fp8-2", OURS), ("8b-fp8-2", TORCHTITAN)), 3),
    "copies": Suite(
        "8B with copy engines and with NCCL",
        2,
        (
            *(("8b-selective", OURS), ("8b-nccl-selective", OURS), ("8b-auto-2", OURS), ("8b-nccl", OURS)),
            *(("8b-auto-fp8-2", OURS), ("8b-nccl-fp8", OURS)),
        ),
    ),
    "tensor": Suite("8B with split matrices", 2, (("8b-async-tp", OURS), ("8b-tp", OURS), ("8b-tp-eager", OURS))),
    "families": Suite(
        "Mistral 7B and Qwen3 8B on two GPUs", 2, (("qwen3-8b", OURS), ("mistral-7b", OURS), ("8b-kept-2-budget", OURS))
    ),
    "peaks": Suite(
        "predicted and measured peaks on one GPU, all families",
        1,
        tuple((name, OURS) for name in PEAKS),
    ),
    "long": Suite("32k tokens of Llama 3.1 8B on four GPUs", 4, (("8b-auto-32k", OURS),)),
    "tiny": Suite("tries it out without a GPU", 1, (("tiny", OURS), ("tiny", BARE)), 2),
}


@dataclass(frozen=True)
class Ratio:
    """Ours over another subject's tokens/s, and the least that it should be."""

    about: str
    ours: str
    other: tuple[str, str]
    bar: float


RATIOS = (
    Ratio("1B bf16", "1b", ("1b", TORCHTITAN), 1.10),
    Ratio("1B fp8", "1b-fp8", ("1b-fp8", TORCHTITAN), 1.12),
    Ratio("8B chosen / torchtitan's default", "8b-auto-2", ("8b-selective", TORCHTITAN), 1.18),
    Ratio("8B best / best, bf16", "8b-auto-2", ("8b-kept", TORCHTITAN), 1.10),
    Ratio("8B best / best, bf16, with moments in bf16", "8b-moments-bf16", ("8b-kept", TORCHTITAN), 1.10),
    Ratio("8B same settings (selective)", "8b-selective", ("8b-selective", TORCHTITAN), 1.03),
    Ratio("8B best / best, fp8", "8b-auto-fp8-2", ("8b-fp8-2", TORCHTITAN), 1.05),
    Ratio("tiny / bare", "tiny", ("tiny", BARE), 0.0),
)
