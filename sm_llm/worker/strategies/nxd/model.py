"""Llama in the layers of neuronx-distributed, built from a Hugging Face config.

Names are those of NxD's own shards, which ``sm_llm convert`` writes and ``convert.mapping_rules`` derives. Activations
are [sequence, batch, hidden] with sequence parallelism, each tensor-parallel rank with its part of the sequence
between the matrices, and [batch, sequence, hidden] without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sm_llm.models.config import both_spellings
from sm_llm.models.parallel import kv_copies, kv_heads
from sm_llm.worker.strategies.nxd import library
from sm_llm.worker.training.nonfinite_policy import poisoned
from sm_llm.worker.training.token_loss import IGNORED

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Shape:
    """What the layers are made of: a model's numbers and how they are cut."""

    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    vocabulary: int
    layers: int
    eps: float
    tensor: int
    sequence_parallel: bool
    fuse_qkv: bool
    flash_attention: bool
    dtype: torch.dtype

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.hidden // self.query_heads

    @property
    def kv_copies(self) -> int:
        """How often each key/value head is stored."""
        return kv_copies(self.kv_heads, self.tensor)

    def linear(self, **more: Any) -> dict[str, Any]:
        """Options of every matrix."""
        return {"bias": False, "dtype": self.dtype, "sequence_parallel_enabled": self.sequence_parallel, **more}


def shape_of(config: Mapping[str, Any], **how: Any) -> Shape:
    """The shape of a canonical ``config``; ``how`` it is cut and computed."""
    return Shape(
        hidden=int(config["hidden_size"]),
        inner=int(config["intermediate_size"]),
        query_heads=int(config["num_attention_heads"]),
        kv_heads=kv_heads(config),
        vocabulary=int(config["vocab_size"]),
        layers=int(config["num_hidden_layers"]),
        eps=float(config["rms_norm_eps"]),
        **how,
    )


class RmsNorm(torch.nn.Module):
    """Root-mean-square normalisation, computed in fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.eps
        self.weight = torch.nn.Parameter(torch.ones(shape.hidden, dtype=shape.dtype))
        # Each rank sees a part of the sequence then: NxD's optimiser adds up the gradients of what is marked so.
        self.weight.sequence_parallel_enabled = shape.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        whole = hidden.float()
        return self.weight * (whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


class CoreAttention(torch.nn.Module):
    """Causal attention of [batch, heads, sequence, head]; what selective checkpointing computes again."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


class FlashAttention(torch.nn.Module):
    """The same by NxD's kernel, which keeps no scores."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return library.flash_attention(query, key, value)


class Attention(torch.nn.Module):
    """Grouped-query attention with rotary positions; each rank has whole heads."""

    def __init__(self, shape: Shape, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = rotary_embedding(config)
        self.qkv_proj = library.layer("GQAQKVColumnParallelLinear")(
            shape.hidden,
            [shape.query_heads * shape.head, shape.kv_heads * shape.head],
            **shape.linear(gather_output=False, kv_size_multiplier=shape.kv_copies, fuse_qkv=shape.fuse_qkv),
        )
        self.core = FlashAttention() if shape.flash_attention else CoreAttention()
        self.o_proj = library.layer("RowParallelLinear")(
            shape.query_heads * shape.head, shape.hidden, **shape.linear(input_is_parallel=True)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(it) for it in self.qkv_proj(hidden))
        positions = torch.arange(query.shape[2], device=query.device)[None]
        cosine, sine = (it[:, None] for it in self.rotary(value, positions))
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        # Of this rank: key/value heads are copied over ranks where there are fewer of them than ranks.
        group = query.shape[1] // key.shape[1]
        found = self.core(query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
        order = (2, 0, 1, 3) if self.shape.sequence_parallel else (0, 2, 1, 3)
        joined: torch.Tensor = self.o_proj(found.permute(order).flatten(2))
        return joined

    def _heads(self, channels: torch.Tensor) -> torch.Tensor:
        """-> [batch, heads, sequence, head]."""
        order = (1, 2, 0, 3) if self.shape.sequence_parallel else (0, 2, 1, 3)
        heads = channels.reshape(*channels.shape[:2], -1, self.shape.head)
        return heads.permute(order)


def rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [batch, heads, sequence, head], channels i and i + head / 2 being a pair."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def rotary_embedding(config: Mapping[str, Any]) -> torch.nn.Module:
    """transformers' own: (values, positions [1, sequence]) -> cosine and sine [1, sequence, head]."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    left_out = ("model_type", "dtype", "torch_dtype")
    fields = {name: value for name, value in both_spellings(dict(config)).items() if name not in left_out}
    found: torch.nn.Module = LlamaRotaryEmbedding(config=AutoConfig.for_model(config["model_type"], **fields))
    return found


class Mlp(torch.nn.Module):
    """The gated feed-forward block; a rank's gate and up channels are in one matrix, one behind the other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up_proj = library.layer("ColumnParallelLinear")(
            # stride=2: NxD splits gate and up each by itself, so that a rank gets matching channels of both.
            shape.hidden,
            2 * shape.inner,
            **shape.linear(stride=2, gather_output=False),
        )
        self.down_proj = library.layer("RowParallelLinear")(
            shape.inner, shape.hidden, **shape.linear(input_is_parallel=True)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        joined: torch.Tensor = self.down_proj(torch.nn.functional.silu(gate) * up)
        return joined


class DecoderLayer(torch.nn.Module):
    """Attention and feed-forward block, each with its norm before and its input added behind."""

    def __init__(self, shape: Shape, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(shape, config)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape)
        self.post_attention_layernorm = RmsNorm(shape)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = hidden + self.self_attn(self.input_layernorm(hidden))
        return attended + self.mlp(self.post_attention_layernorm(attended))  # type: ignore[no-any-return]


class _WeighedGradient(torch.autograd.Function):
    """The loss as it is; its gradient times ``scale``, and NaN if the loss is not finite."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(poisoned(loss, scale))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None


class LossSum(torch.nn.Module):
    """Sum of the token losses of some rows, from a rank's part of the logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.sequence_parallel = shape.sequence_parallel

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """``targets`` [n, sequence], -100 does not count; ``scale`` [n] equal numbers, which the gradient is scaled by.

        Returns an fp32 scalar.
        """
        rows = logits.transpose(0, 1) if self.sequence_parallel else logits
        counted = targets != IGNORED
        # NxD's cross-entropy writes into its input. Targets that do not count become 0, an index that exists, and their
        # losses are dropped below.
        losses = library.token_losses(rows.float().flatten(0, 1).clone(), (targets * counted).flatten())
        total = (losses * counted.flatten()).sum()
        return _WeighedGradient.apply(total, scale[0])  # type: ignore[no-untyped-call, no-any-return]


class Decoder(torch.nn.Module):
    """Token table, layers and the last norm."""

    def __init__(self, shape: Shape, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = library.layer("ParallelEmbedding")(
            shape.vocabulary, shape.hidden, dtype=shape.dtype, sequence_parallel_enabled=shape.sequence_parallel
        )
        self.layers = torch.nn.ModuleList(DecoderLayer(shape, config) for _ in range(shape.layers))
        self.norm = RmsNorm(shape)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class NxdLlama(torch.nn.Module):
    """The causal language model. Written so that NxD can trace it and cut it between its layers."""

    def __init__(self, shape: Shape, config: Mapping[str, Any], *, tied: bool) -> None:
        super().__init__()
        self.model = Decoder(shape, config)
        self.lm_head = library.layer("ColumnParallelLinear")(
            shape.hidden, shape.vocabulary, **shape.linear(gather_output=False)
        )
        self.loss = LossSum(shape)
        if tied:
            # Both split the vocabulary in the same way, so a rank's parts fit.
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, module in self.named_modules():
            module.own_name = name  # what cuts or wraps a module keeps it

    def forward(
        self, input_ids: torch.Tensor, targets: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the token losses (``LossSum``); without ``targets`` this rank's part of the logits."""
        logits = self.lm_head(self.model(input_ids))
        if targets is None or scale is None:
            return logits  # type: ignore[no-any-return]
        return self.loss(logits, targets, scale)  # type: ignore[no-any-return]
