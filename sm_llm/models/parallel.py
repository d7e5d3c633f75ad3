"""Degrees that a model allows, by the rules of each strategy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.models.config import misread_by_transformers_444
from sm_llm.models.families.table import family
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sm_llm.models.families.family import Config


TENSOR_PARALLEL = ("llama", "mistral", "qwen2")
"""Families whose matrices the fsdp strategy can split."""
# Rotary scalings that depend on the longest position of a forward pass, which differs where a sequence is split.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


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
    # A degree divides all sizes exactly where it divides their greatest common divisor.
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


NXD_FAMILIES = ("llama",)
"""What NxD's converter and its training classes agree on; models of other names but the same shape included."""
_WHERE = "task.parallelism"
_TENSOR, _KV = f"{_WHERE}.tensor_parallel_degree", f"{_WHERE}.kv_size_multiplier"


def kv_heads(config: Config) -> int:
    """Key/value heads of a canonical config."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def nxd_issues(config: Config, *, tensor: int, pipeline: int, virtual: int, multiplier: int | None) -> list[Issue]:
    """Why NxD cannot train a canonical ``config``: T divides heads, vocabulary and widths, and K x m = T where m > 1.

    Sources: NxD's parallel layers and ``modules/qkv_linear.py``; optimum-neuron's rule m = max(1, T / K).
    """
    kind = family(config).model_type
    if kind not in NXD_FAMILIES:
        return [
            Issue(
                "nxd-family-unsupported",
                f"{_WHERE}.strategy",
                f"has no support for {kind} models",
                "nxd",
                f"It has for {', '.join(NXD_FAMILIES)}",
            )
        ]
    # Key/value heads are not among them: they may be copied (``copy_issues``).
    names = ("num_attention_heads", "vocab_size", "intermediate_size")
    wrong = [
        f"{name} {size} / {tensor} leaves {size % tensor}" for name in names if (size := int(config[name])) % tensor
    ]
    issues = (
        [
            Issue(
                "nxd-tensor-degree-does-not-divide-model",
                _TENSOR,
                f"does not divide the model: {'; '.join(wrong)}",
                tensor,
            )
        ]
        if wrong
        else []
    )
    issues += copy_issues(kv_heads(config), tensor, multiplier)
    stages, layers = pipeline * virtual, int(config["num_hidden_layers"])
    if stages > layers:
        problem = f"pipeline x virtual = {stages} parts of {counted(layers, 'layer')}"
        issues.append(
            Issue(
                "nxd-pipeline-degree-too-large",
                f"{_WHERE}.pipeline_parallel_degree",
                problem,
                pipeline,
                f"Use at most {layers // virtual}",
            )
        )
    issues += _layer_issues(config, pipeline)
    # NxD computes the channels of a head itself: other ones do not fit its layers.
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if config.get("head_dim") not in (None, hidden // heads):
        problem = (
            f"NxD takes head_dim for hidden_size / heads = {hidden // heads}, this model's is {config['head_dim']}"
        )
        issues.append(Issue("nxd-head-size-unsupported", "task.model", problem, config["head_dim"]))
    return issues


def _layer_issues(config: Config, pipeline: int) -> list[Issue]:
    """Parts of a Llama that the layers of the strategy do not have."""
    kinds = {
        "attention_bias": (bool(config.get("attention_bias")), "biases of attention"),
        "mlp_bias": (bool(config.get("mlp_bias")), "biases of the feed-forward block"),
        "attention_dropout": (bool(config.get("attention_dropout")), "dropout"),
        "hidden_act": (config.get("hidden_act", "silu") != "silu", "an activation other than silu"),
        "tie_word_embeddings": (
            bool(config.get("tie_word_embeddings")) and pipeline > 1,
            "a table that the first and the last of several stages share",
        ),
    }
    remedy, path = "Use strategy fsdp", "task.model.config"
    return [
        Issue("nxd-layer-unsupported", f"{path}.{name}", f"nxd has no {what}", config[name], remedy)
        for name, (is_there, what) in kinds.items()
        if is_there
    ]


def copy_issues(
    heads: int, tensor: int, multiplier: int | None, *, tensor_path: str = _TENSOR, multiplier_path: str = _KV
) -> list[Issue]:
    """K x m must be T where heads are copied; without copies T divides K. Paths name the settings in the issues."""
    if tensor % heads and heads % tensor:
        problem = f"neither divides the model's {heads} key/value heads nor is a multiple of them"
        fits = [it for it in range(1, 65) if it % heads == 0 or heads % it == 0]
        return [
            Issue(
                "nxd-tensor-degree-does-not-fit-heads",
                tensor_path,
                problem,
                tensor,
                f"Use one of {', '.join(map(str, fits))}",
            )
        ]
    needed = kv_copies(heads, tensor)
    if multiplier is None or multiplier == needed:
        return []
    problem = f"{counted(heads, 'key/value head')} x {multiplier} must be the tensor-parallel degree of {tensor}"
    if needed == 1:
        problem = (
            f"the tensor-parallel degree of {tensor} divides the {counted(heads, 'key/value head')}: nothing is copied"
        )
    return [
        Issue("nxd-kv-multiplier-does-not-fit", multiplier_path, problem, multiplier, f"Use {needed}, or leave it out")
    ]


def kv_copies(heads: int, tensor: int) -> int:
    """How often each key/value head is stored: m = max(1, T / K)."""
    return max(1, tensor // heads)


TENSOR = ("llama", "mistral", "mixtral", "gpt_neox")
CONTEXT = ("llama", "mistral", "gpt_neox")
EXPERT = ("mixtral",)
FP8 = ("llama", "mixtral", "gpt_neox")


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


def _fsdp(config: Config, options: Mapping[str, Any]) -> list[Issue]:
    return parallel_issues(config, tensor=options["tensor_parallel_degree"], context=options["context_parallel_degree"])


def _smp(config: Config, options: Mapping[str, Any]) -> list[Issue]:
    return smp_issues(
        config,
        tensor=options["tensor_parallel_degree"],
        context=options["context_parallel_degree"],
        expert=options["expert_parallel_degree"],
        fp8=options["fp8"],
    )


def _nxd(config: Config, options: Mapping[str, Any]) -> list[Issue]:
    return nxd_issues(
        config,
        tensor=options["tensor_parallel_degree"],
        pipeline=options["pipeline_parallel_degree"],
        virtual=options["virtual_pipeline_degree"],
        multiplier=options["kv_size_multiplier"],
    )


# Strategy -> its rules; one without a row trains every family.
_RULES: Mapping[str, Callable[[Config, Mapping[str, Any]], list[Issue]]] = {"fsdp": _fsdp, "smp": _smp, "nxd": _nxd}


def model_issues(config: Config, strategy: str, options: Mapping[str, Any]) -> list[Issue]:
    """Why a strategy with these ``options`` (the fields of its class) cannot train a canonical ``config``."""
    rules = _RULES.get(strategy)
    return [] if rules is None else rules(config, options)
