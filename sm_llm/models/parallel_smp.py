"""Which degrees of SMP v2 a model allows (Developer Guide, pages on its tensor, context and expert parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue
from sm_llm.models.config import misread_by_transformers_444
from sm_llm.models.families.registry import family

if TYPE_CHECKING:
    from sm_llm.models.families.family import Config

TENSOR = ("llama", "mistral", "mixtral", "gpt_neox")
CONTEXT = ("llama", "mistral", "gpt_neox")
EXPERT = ("mixtral",)
FP8 = ("llama", "mixtral", "gpt_neox")
_WHERE = "task.parallelism"


def smp_issues(config: Config, *, tensor: int, context: int, expert: int, fp8: bool) -> list[Issue]:
    """Why SMP v2 cannot train a canonical ``config`` with these degrees."""
    kind = family(config).model_type
    wanted = [
        ("tensor_parallel_degree", tensor, tensor > 1, TENSOR),
        ("context_parallel_degree", context, context > 1, CONTEXT),
        ("expert_parallel_degree", expert, expert > 1, EXPERT),
        ("fp8", fp8, fp8, FP8),
    ]
    issues = [
        Issue(
            "smp-family-unsupported",
            f"{_WHERE}.{name}",
            f"SMP v2 has none for {kind} models",
            seen,
            f"It has for {', '.join(families)}",
        )
        for name, seen, is_used, families in wanted
        if is_used and kind not in families
    ]
    if config.get("sliding_window") and (context > 1 or fp8):
        name = "context_parallel_degree" if context > 1 else "fp8"
        issues.append(
            Issue(
                "smp-sliding-window-unsupported",
                f"{_WHERE}.{name}",
                "SMP v2 has none for models with a sliding window",
                config["sliding_window"],
            )
        )
    experts = config.get("num_local_experts") or expert
    if kind in EXPERT and experts % expert:
        fits = ", ".join(str(it) for it in range(1, experts + 1) if experts % it == 0)
        problem = f"does not divide the model's experts: {experts} / {expert} leaves {experts % expert}"
        issues.append(
            Issue(
                "smp-expert-degree-does-not-divide-experts",
                f"{_WHERE}.expert_parallel_degree",
                problem,
                expert,
                f"Use one of {fits}",
            )
        )
    for reason in misread_by_transformers_444(config):
        issues.append(
            Issue(
                "smp-model-unsupported",
                "task.model",
                f"{reason}, and SMP's image has no other",
                kind,
                "Use strategy fsdp",
            )
        )
    return [*issues, *_division_issues(config, f"{_WHERE}.tensor_parallel_degree", tensor)]


def _division_issues(config: Config, path: str, degree: int) -> list[Issue]:
    """Heads of both kinds and inner channels that a tensor-parallel degree does not divide."""
    heads = int(config["num_attention_heads"])
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "intermediate_size": int(config["intermediate_size"]),
    }
    wrong = [f"{name} {size} / {degree} leaves {size % degree}" for name, size in sizes.items() if size % degree]
    if not wrong:
        return []
    fits = ", ".join(str(it) for it in range(1, min(sizes.values()) + 1) if not any(n % it for n in sizes.values()))
    return [
        Issue(
            "smp-tensor-degree-does-not-divide-model",
            path,
            f"does not divide the model: {'; '.join(wrong)}",
            degree,
            f"Use one of {fits}",
        )
    ]
