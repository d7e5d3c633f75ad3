"""Which parallel degrees a model's own numbers allow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sm_llm.errors import Issue
from sm_llm.models.families.registry import family

if TYPE_CHECKING:
    from sm_llm.models.families.family import Config

TENSOR_PARALLEL = ("llama", "mistral", "qwen2")
"""Families whose matrices the fsdp strategy can split."""
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary scalings that depend on the longest position of a forward pass, which differs where a sequence is split."""


def parallel_issues(config: Config, *, tensor: int, context: int) -> list[Issue]:
    """Why the fsdp strategy cannot train a canonical ``config`` with these degrees, with the degrees that work."""
    issues = _tensor_issues(config, tensor) if tensor > 1 else []
    scaling = config["rope_parameters"]["rope_type"]
    if context > 1 and scaling in _LENGTH_DEPENDENT:
        problem = f"{scaling} rope scaling depends on the longest position of a process, which context parallelism cuts"
        issues.append(
            Issue(
                "context-parallel-rope-unsupported",
                "task.parallelism.context_parallel_degree",
                problem,
                context,
                "Use 1",
            )
        )
    return issues


def _tensor_issues(config: Config, degree: int) -> list[Issue]:
    path, kind = "task.parallelism.tensor_parallel_degree", family(config)
    if kind.model_type not in TENSOR_PARALLEL:
        problem = f"fsdp has no tensor parallelism for {kind.model_type} models"
        return [
            Issue(
                "tensor-parallel-family-unsupported",
                path,
                problem,
                degree,
                f"It has for {', '.join(TENSOR_PARALLEL)}; use 1",
            )
        ]
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = {name: int(config[name]) for name in names}
    wrong = [f"{name} {size} / {degree} leaves {size % degree}" for name, size in sizes.items() if size % degree]
    if not wrong:
        return []
    common = math.gcd(*sizes.values())
    fits = ", ".join(str(value) for value in range(1, common + 1) if common % value == 0)
    return [
        Issue(
            "tensor-degree-does-not-divide-model",
            path,
            f"does not divide the model: {'; '.join(wrong)}",
            degree,
            f"Use one of {fits}",
        )
    ]
