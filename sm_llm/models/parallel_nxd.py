"""Which degrees of neuronx-distributed a model allows, and how often its key/value heads are copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue
from sm_llm.models.families.registry import family

if TYPE_CHECKING:
    from sm_llm.models.families.family import Config

FAMILIES = ("llama",)
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
    if kind not in FAMILIES:
        return [
            Issue(
                "nxd-family-unsupported",
                f"{_WHERE}.strategy",
                f"has no support for {kind} models",
                "nxd",
                f"It has for {', '.join(FAMILIES)}",
            )
        ]
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
        problem = f"pipeline x virtual = {stages} parts of {layers} layers"
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
    problem = f"{heads} key/value heads x {multiplier} must be the tensor-parallel degree of {tensor}"
    if needed == 1:
        problem = f"the tensor-parallel degree of {tensor} divides the {heads} key/value heads: nothing is copied"
    return [
        Issue("nxd-kv-multiplier-does-not-fit", multiplier_path, problem, multiplier, f"Use {needed}, or leave it out")
    ]


def kv_copies(heads: int, tensor: int) -> int:
    """How often each key/value head is stored: m = max(1, T / K)."""
    return max(1, tensor // heads)
