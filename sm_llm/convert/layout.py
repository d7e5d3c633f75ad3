"""How neuronx-distributed divides a model: heads, vocabulary and layers per rank, and which degrees a model allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from sm_llm.errors import ConversionRefused, Issue
from sm_llm.models.families.gated import GatedDecoder
from sm_llm.models.families.table import known_family
from sm_llm.models.parallel import copy_issues, kv_copies
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from sm_llm.models.families.family import Config

Qkv = Literal["split", "linear", "fused", "coalesced"]
Layout = Literal["trn1", "trn2"]
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Families with RMSNorm, a gated MLP and grouped queries: what NxD's parallel layers compute."""

TENSOR, PIPELINE = "tensor_parallel_degree (--tp)", "pipeline_parallel_degree (--pp)"
VIRTUAL, MULTIPLIER = "virtual_pipeline_degree (--virtual-pp)", "kv_size_multiplier (--kv-multiplier)"
QKV, LAYOUT = "qkv (--qkv)", "layout (--layout)"
_MOST_RANKS = 1024


@dataclass(frozen=True)
class NxdDegrees:
    """How shards are cut and stored; valid for a model once ``resolve`` returned it.

    ``kv_multiplier`` counts the copies of each key/value head. ``qkv`` names the form of query, key and value,
    ``layout`` the order of heads where key/value heads are copied.
    """

    tensor: int
    pipeline: int = 1
    virtual: int = 1
    kv_multiplier: int = 1
    qkv: Qkv = "fused"
    layout: Layout = "trn1"


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and channels of a head."""

    query: int
    kv: int
    size: int


def decoder(config: Config) -> GatedDecoder:
    """The family of a canonical config. Raises ``ConversionRefused`` for one whose layers NxD's shards do not have."""
    kind = known_family(str(config.get("model_type")))
    if not isinstance(kind, GatedDecoder) or kind.model_type not in MODEL_TYPES:
        remedy = f"Supported: {', '.join(MODEL_TYPES)}"
        issue = Issue(
            "family-without-nxd-layout",
            "model_type",
            "has no layout for neuronx-distributed",
            config.get("model_type"),
            remedy,
        )
        raise ConversionRefused([issue])
    return kind


def heads_of(config: Config) -> Heads:
    """The heads of a canonical config."""
    kind = decoder(config)
    return Heads(int(config["num_attention_heads"]), kind.kv_heads(config), kind.head_dim(config))


def query_range(heads: Heads, degrees: NxdDegrees, rank: int) -> tuple[int, int]:
    """First query head of a tensor-parallel rank, and the one after its last.

    Where key/value heads are copied, the queries follow their key/value head: on trn1 rank r holds head r mod K.
    """
    count = heads.query // degrees.tensor
    if degrees.kv_multiplier > 1 and degrees.layout == "trn1":
        # Ranks r, r + K, r + 2K, ... share a key/value head, and each has an equal part of its queries.
        first = (rank % heads.kv) * (heads.query // heads.kv) + (rank // heads.kv) * count
    else:
        first = rank * count
    return first, first + count


def kv_range(heads: Heads, degrees: NxdDegrees, rank: int) -> tuple[int, int]:
    """First key/value head of a tensor-parallel rank, and the one after its last."""
    if degrees.kv_multiplier > 1:
        # With copies T = K x m: each rank holds exactly one key/value head.
        head = rank % heads.kv if degrees.layout == "trn1" else rank // degrees.kv_multiplier
        return head, head + 1
    count = heads.kv // degrees.tensor
    return rank * count, (rank + 1) * count


def padded_vocabulary(size: int, tensor: int) -> int:
    """Rows of the token table once ``tensor`` ranks hold equal parts of it."""
    return -(-size // tensor) * tensor


def stage_layers(layers: int, degrees: NxdDegrees) -> list[list[int]]:
    """Layers of each pipeline rank. The last parts get one more where the division leaves a remainder.

    Part s of pipeline x virtual parts is on rank s mod pipeline.
    """
    parts = degrees.pipeline * degrees.virtual
    short, more = divmod(layers, parts)
    stages: list[list[int]] = [[] for _ in range(degrees.pipeline)]
    first = 0
    for part in range(parts):
        # As NxD divides them: other bounds would put layers on ranks that do not expect them.
        count = short + (part >= parts - more)
        stages[part % degrees.pipeline] += range(first, first + count)
        first += count
    return stages


def resolve(
    config: Config,
    *,
    tensor: int,
    pipeline: int = 1,
    virtual: int = 1,
    kv_multiplier: int | None = None,
    qkv: str = "fused",
    layout: str = "trn1",
) -> NxdDegrees:
    """Checked degrees for a canonical ``config``; ``kv_multiplier`` None derives it.

    Raises ``ConversionRefused`` with every issue, its arithmetic and the values that work.
    """
    counts = {TENSOR: tensor, PIPELINE: pipeline, VIRTUAL: virtual, MULTIPLIER: kv_multiplier}
    issues = [issue for path, value in counts.items() if (issue := _count_issue(path, value))]
    issues += _choice_issues(QKV, qkv, get_args(Qkv)) + _choice_issues(LAYOUT, layout, get_args(Layout))
    heads = heads_of(config)
    # What follows computes with these values, so a wrong one is reported alone.
    if issues:
        raise ConversionRefused(issues)
    issues = [*_tensor_issues(config, heads, tensor), *_qkv_issues(heads, tensor, qkv)]
    # Copies follow from the degree: with a wrong one their issue would only repeat it.
    if not issues:
        issues += copy_issues(heads.kv, tensor, kv_multiplier, tensor_path=TENSOR, multiplier_path=MULTIPLIER)
    issues += _stage_issues(int(config["num_hidden_layers"]), pipeline, virtual)
    if issues:
        raise ConversionRefused(issues)
    # A multiplier that was given equals the derived one: ``copy_issues`` refused any other.
    form, order = cast("Qkv", qkv), cast("Layout", layout)
    return NxdDegrees(tensor, pipeline, virtual, kv_copies(heads.kv, tensor), form, order)


def fitting_degrees(config: Config) -> list[int]:
    """Tensor-parallel degrees that a model allows: T divides heads and inner width, and K x m = T or T divides K."""
    heads = heads_of(config)
    # No degree above the number of query heads: a rank without a head has nothing to compute.
    return [it for it in range(1, min(heads.query, _MOST_RANKS) + 1) if not _remainders(config, heads, it)]


def _count_issue(path: str, value: int | None) -> Issue | None:
    if value is None and path == MULTIPLIER:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_536:
        return None
    return Issue("layout-count-invalid", path, "must be a whole number from 1 to 65,536", value)


def _choice_issues(path: str, value: str, choices: tuple[str, ...]) -> list[Issue]:
    return (
        []
        if value in choices
        else [Issue("layout-choice-invalid", path, f"must be one of {', '.join(choices)}", value)]
    )


def _remainders(config: Config, heads: Heads, tensor: int) -> list[str]:
    """What does not divide by ``tensor``, each with its arithmetic."""
    sizes = {"num_attention_heads": heads.query, "intermediate_size": int(config["intermediate_size"])}
    wrong = [f"{name} {size} / {tensor} leaves {size % tensor}" for name, size in sizes.items() if size % tensor]
    if heads.kv % tensor and tensor % heads.kv:
        wrong.append(f"{heads.kv} key/value heads: {tensor} neither divides them nor is a multiple K x m of them")
    return wrong


def _tensor_issues(config: Config, heads: Heads, tensor: int) -> list[Issue]:
    if wrong := _remainders(config, heads, tensor):
        fits = ", ".join(map(str, fitting_degrees(config)))
        return [
            Issue(
                "layout-tensor-degree-indivisible",
                TENSOR,
                f"does not divide the model: {'; '.join(wrong)}",
                tensor,
                f"Use one of {fits}",
            )
        ]
    return []


def _qkv_issues(heads: Heads, tensor: int, qkv: str) -> list[Issue]:
    copies = kv_copies(heads.kv, tensor)
    if qkv == "coalesced" and heads.query != heads.kv:
        problem = f"needs as many query heads as key/value heads, the model has {heads.query} and {heads.kv}"
        return [Issue("qkv-needs-equal-heads", QKV, problem, qkv, "Use linear or fused")]
    if qkv == "split" and copies > 1:
        problem = (
            f"cannot copy key/value heads, and {counted(heads.kv, 'head')} x {copies} = {tensor} ranks need copies"
        )
        return [
            Issue("qkv-cannot-copy-heads", QKV, problem, qkv, f"Use linear or fused, or a degree of at most {heads.kv}")
        ]
    return []


def _stage_issues(layers: int, pipeline: int, virtual: int) -> list[Issue]:
    parts = pipeline * virtual
    if parts <= layers:
        return []
    problem = f"{counted(pipeline, 'stage')} x {virtual} virtual = {parts} parts of {counted(layers, 'layer')}"
    if virtual > layers:
        return [
            Issue("layout-virtual-degree-too-large", VIRTUAL, problem, virtual, f"Use at most {layers}, with 1 stage")
        ]
    return [Issue("layout-pipeline-degree-too-large", PIPELINE, problem, pipeline, f"Use at most {layers // virtual}")]
