"""Computes a model's logits from its Hugging Face tensors and from its shards, as each rank of NxD would, in float64.

Rotary scaling and sliding windows are left out: the prompt is short, and both sides compute the same positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from sm_llm.convert.files.views import CHUNK_BYTES, to_float
from sm_llm.convert.layout import decoder, heads_of
from sm_llm.convert.mapping_rules import EMBEDDING, HEAD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.convert.files.views import View
    from sm_llm.convert.layout import Heads
    from sm_llm.convert.mapping_rules import ShardPlan
    from sm_llm.convert.nxd_source import Shards
    from sm_llm.models.families.family import Config

Array = npt.NDArray[np.float64]
_PROMPT = 12


class Sides(Protocol):
    """One way to hold a model: ``ranks`` parts, whose results add up or stand beside each other."""

    ranks: int

    def embed(self, rank: int, ids: npt.NDArray[np.int64]) -> Array: ...
    def norm(self, name: str) -> Array: ...
    def bias(self, name: str) -> Array | None: ...
    def qkv(self, layer: int, rank: int, x: Array) -> tuple[Array, Array, Array]: ...
    def gate_up(self, layer: int, rank: int, x: Array) -> tuple[Array, Array]: ...
    def product(self, name: str, rank: int, x: Array) -> Array: ...
    def head(self, rank: int, x: Array) -> Array: ...


def prompt(vocabulary: int) -> npt.NDArray[np.int64]:
    """A few token ids, spread over the vocabulary so that every rank's rows are read."""
    return np.unique(np.linspace(0, vocabulary - 1, _PROMPT).astype(np.int64))[::-1].copy()


def product(view: View, x: Array, begin: int = 0, end: int | None = None) -> Array:
    """``x`` times rows ``[begin, end)`` of a matrix, transposed, a few rows at a time."""
    rows = view.array()[begin:end]
    block = max(1, CHUNK_BYTES // (8 * view.shape[1]))
    # Only a block of rows at a time is converted to float64, which takes up to four times the stored bytes.
    return np.concatenate([x @ to_float(rows[it : it + block], view.dtype).T for it in range(0, len(rows), block)], 1)


def vector(view: View, begin: int = 0, end: int | None = None) -> Array:
    """Elements of a vector as numbers."""
    return to_float(view.array()[begin:end], view.dtype)


class Whole:
    """A model as Hugging Face holds it."""

    ranks = 1

    def __init__(self, views: Mapping[str, View]) -> None:
        self._views = views

    def embed(self, rank: int, ids: npt.NDArray[np.int64]) -> Array:
        return to_float(self._views[EMBEDDING].array()[ids], self._views[EMBEDDING].dtype)

    def norm(self, name: str) -> Array:
        return vector(self._views[name])

    def bias(self, name: str) -> Array | None:
        return vector(self._views[name]) if name in self._views else None

    def qkv(self, layer: int, rank: int, x: Array) -> tuple[Array, Array, Array]:
        q, k, v = (self._linear(f"model.layers.{layer}.self_attn.{it}_proj", x) for it in "qkv")
        return q, k, v

    def gate_up(self, layer: int, rank: int, x: Array) -> tuple[Array, Array]:
        gate, up = (self._linear(f"model.layers.{layer}.mlp.{it}_proj", x) for it in ("gate", "up"))
        return gate, up

    def product(self, name: str, rank: int, x: Array) -> Array:
        return product(self._views[name], x)

    def head(self, rank: int, x: Array) -> Array:
        return product(self._views.get(HEAD, self._views[EMBEDDING]), x)

    def _linear(self, name: str, x: Array) -> Array:
        result = product(self._views[f"{name}.weight"], x)
        bias = self.bias(f"{name}.bias")
        return result if bias is None else result + bias


class Sharded:
    """A model as the ranks of NxD hold it, read by the names of its parallel layers alone."""

    def __init__(self, shards: Shards, heads: Heads, tensor: int) -> None:
        self.ranks = tensor
        self._shards = shards
        # With more ranks than key/value heads, each rank holds a copy of one.
        self._sizes = [heads.size * heads.query // tensor] + [heads.size * max(1, heads.kv // tensor)] * 2

    def embed(self, rank: int, ids: npt.NDArray[np.int64]) -> Array:
        view = self._view(rank, EMBEDDING)
        local = ids - rank * view.shape[0]
        held = (local >= 0) & (local < view.shape[0])
        rows = to_float(view.array()[np.where(held, local, 0)], view.dtype)
        # Ids of other ranks give zeros, because the results of the ranks are added.
        return np.where(held[:, None], rows, 0.0)

    def norm(self, name: str) -> Array:
        return vector(self._view(0, name))

    def bias(self, name: str) -> Array | None:
        return vector(self._view(0, name)) if name in self._shards.stages else None

    def qkv(self, layer: int, rank: int, x: Array) -> tuple[Array, Array, Array]:
        prefix = f"model.layers.{layer}.self_attn."
        bounds = np.cumsum([0, *self._sizes])
        found = []
        for index, letter in enumerate("qkv"):
            # By the names that NxD's layers have, not by the plan: a wrong plan must show in the logits.
            own = {f"{prefix}qkv_proj.weight_{letter}", f"{prefix}{letter}_proj.weight"} & self._shards.stages.keys()
            if own:
                (name,) = own
                found.append(self._linear(rank, name, x, 0, None))
            else:
                joined = {f"{prefix}qkv_proj.weight_qkv", f"{prefix}qkv_proj.weight"} & self._shards.stages.keys()
                (name,) = joined
                found.append(self._linear(rank, name, x, int(bounds[index]), int(bounds[index + 1])))
        return found[0], found[1], found[2]

    def gate_up(self, layer: int, rank: int, x: Array) -> tuple[Array, Array]:
        name = f"model.layers.{layer}.mlp.gate_up_proj.weight"
        half = self._view(rank, name).shape[0] // 2
        return self._linear(rank, name, x, 0, half), self._linear(rank, name, x, half, 2 * half)

    def product(self, name: str, rank: int, x: Array) -> Array:
        return product(self._view(rank, name), x)

    def head(self, rank: int, x: Array) -> Array:
        return product(self._view(rank, HEAD if HEAD in self._shards.stages else EMBEDDING), x)

    def _linear(self, rank: int, name: str, x: Array, begin: int, end: int | None) -> Array:
        result = product(self._view(rank, name), x, begin, end)
        # ``weight_q`` has ``bias_q`` beside it.
        head, _, last = name.rpartition("weight")
        bias = f"{head}bias{last}"
        return result + vector(self._view(rank, bias), begin, end) if bias in self._shards.stages else result

    def _view(self, rank: int, name: str) -> View:
        return self._shards.views[rank, self._shards.stages[name]][name]


def logits(config: Config, model: Sides, ids: npt.NDArray[np.int64]) -> Array:
    """[tokens, vocabulary] of one forward pass over ``ids`` [tokens]; a padded vocabulary is trimmed."""
    kind, heads = decoder(config), heads_of(config)
    epsilon = float(kind.value(config, "rms_norm_eps"))
    angles = _angles(config, heads.size, len(ids))
    x = _sum(model.embed(rank, ids) for rank in range(model.ranks))
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}."
        h = _rms(x, model.norm(f"{prefix}input_layernorm.weight"), epsilon)
        scales = tuple(model.norm(f"{prefix}self_attn.{it}.weight") for it in kind.head_norms)
        x = x + _attention(model, layer, h, angles, heads.size, scales, epsilon)
        h = _rms(x, model.norm(f"{prefix}post_attention_layernorm.weight"), epsilon)
        x = x + _mlp(model, layer, h)
    x = _rms(x, model.norm("model.norm.weight"), epsilon)
    found = np.concatenate([model.head(rank, x) for rank in range(model.ranks)], axis=1)
    return found[:, : kind.vocab_size(config)]


def _attention(
    model: Sides, layer: int, x: Array, angles: Array, size: int, scales: tuple[Array, ...], epsilon: float
) -> Array:
    name = f"model.layers.{layer}.self_attn.o_proj"
    parts = []
    for rank in range(model.ranks):
        q, k, v = (_heads(it, size) for it in model.qkv(layer, rank, x))
        if scales:
            q, k = _rms(q, scales[0], epsilon), _rms(k, scales[1], epsilon)
        mixed = _attend(_rotate(q, angles), _rotate(k, angles), v)
        parts.append(model.product(f"{name}.weight", rank, mixed))
    # Row-parallel: the ranks' products are parts of one sum, and the bias is added once.
    return _with_bias(_sum(parts), model.bias(f"{name}.bias"))


def _mlp(model: Sides, layer: int, x: Array) -> Array:
    name = f"model.layers.{layer}.mlp.down_proj"
    parts = []
    for rank in range(model.ranks):
        gate, up = model.gate_up(layer, rank, x)
        parts.append(model.product(f"{name}.weight", rank, gate / (1 + np.exp(-gate)) * up))
    # Row-parallel, as in the attention.
    return _with_bias(_sum(parts), model.bias(f"{name}.bias"))


def _sum(parts: Any) -> Array:
    found: Array = np.sum(list(parts), axis=0)
    return found


def _with_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def _rms(x: Array, scale: Array, epsilon: float) -> Array:
    found: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale
    return found


def _heads(x: Array, size: int) -> Array:
    """[tokens, heads x size] -> [heads, tokens, size]."""
    return x.reshape(len(x), -1, size).transpose(1, 0, 2)


def _angles(config: Config, size: int, length: int) -> Array:
    theta = float(config["rope_parameters"]["rope_theta"])
    frequencies = theta ** (-np.arange(0, size, 2) / size)
    # Both halves of a head turn by the same angles, as in transformers (``rotate_half``).
    found: Array = np.arange(length)[:, None] * np.concatenate([frequencies, frequencies])[None]
    return found


def _rotate(x: Array, angles: Array) -> Array:
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    found: Array = x * np.cos(angles) + turned * np.sin(angles)
    return found


def _attend(q: Array, k: Array, v: Array) -> Array:
    """Causal attention; consecutive query heads share a key/value head. Returns [tokens, heads x size]."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ v
    found: Array = mixed.transpose(1, 0, 2).reshape(q.shape[1], -1)
    return found


def difference(plan: ShardPlan, config: Config, views: Mapping[str, View], shards: Shards) -> float:
    """Largest difference between the logits of the whole model and of its shards, relative to the largest logit."""
    ids = prompt(plan.vocabulary)
    whole = logits(config, Whole(views), ids)
    parts = logits(config, Sharded(shards, heads_of(config), plan.degrees.tensor), ids)
    return float(np.abs(whole - parts).max() / max(1e-30, np.abs(whole).max()))
