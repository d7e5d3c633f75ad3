"""Which slices of which source tensors make each tensor of a rank, and the way back: one rule for both directions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.convert.layout import (
    decoder,
    heads_of,
    kv_range,
    padded_vocabulary,
    query_range,
    stage_layers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sm_llm.convert.layout import NxdDegrees
    from sm_llm.models.families.family import Config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_QUERY_KEY_VALUE = {f"self_attn.{letter}_proj": letter for letter in "qkv"}


@dataclass(frozen=True)
class SourceSlice:
    """Rows or columns ``[begin, end)`` of a source tensor; zeros where ``source`` is empty."""

    source: str
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Rows or columns."""
        return self.end - self.begin


@dataclass(frozen=True)
class ShardTensor:
    """One tensor in the file of a rank: its pieces, joined along ``axis`` (0 rows, 1 columns)."""

    name: str
    axis: int
    shape: tuple[int, ...]
    pieces: tuple[SourceSlice, ...]


@dataclass(frozen=True)
class Part:
    """Where ``[begin, end)`` of a source tensor is in the shards: from ``at`` on along the axis of a rank's tensor."""

    rank: int
    tensor: ShardTensor
    at: int
    begin: int
    end: int


class ShardPlan:
    """The shards of one model under one set of degrees. Pure: it reads no file."""

    def __init__(self, config: Config, degrees: NxdDegrees) -> None:
        kind = decoder(config)
        self.degrees = degrees
        # Source tensor -> its shape, in model order; a tied head is absent.
        self.shapes: dict[str, tuple[int, ...]] = {name: it.shape for name, it in kind.tensors(config).items()}
        self.is_tied = HEAD not in self.shapes
        self._heads = heads_of(config)
        self._stages = stage_layers(int(config["num_hidden_layers"]), degrees)
        self.vocabulary = self.shapes[EMBEDDING][0]
        self.padded_vocabulary = padded_vocabulary(self.vocabulary, degrees.tensor)

    def stage(self, pipeline_rank: int) -> list[str]:
        """Sources of one pipeline rank in model order; a tied head appears under its own name."""
        layers = set(self._stages[pipeline_rank])
        names = [name for name in self.shapes if (match := _LAYER.fullmatch(name)) and int(match[1]) in layers]
        first = [EMBEDDING] if pipeline_rank == 0 else []
        last = ["model.norm.weight", HEAD] if pipeline_rank == self.degrees.pipeline - 1 else []
        return [*first, *names, *last]

    def everything(self) -> list[str]:
        """Sources of all stages, a tied head included."""
        return [*self.shapes, *([HEAD] if self.is_tied else [])]

    def rank(self, rank: int, sources: Iterable[str]) -> list[ShardTensor]:
        """The tensors of tensor-parallel ``rank`` made of ``sources``, in the order in which NxD writes them."""
        now: list[ShardTensor] = []
        joined: dict[str, list[ShardTensor]] = {}
        for source in sources:
            target, tensor = self._of_rank(source, rank)
            if target:
                joined.setdefault(target, []).append(tensor)
                # Joined gate and up stand where the last of the two does; joined query, key and value come after all
                # others.
                if source.partition(".mlp.up_proj.")[1]:
                    now.append(_join(target, joined.pop(target)))
            else:
                now.append(tensor)
        return [*now, *(_join(name, parts) for name, parts in joined.items())]

    def _of_rank(self, source: str, rank: int) -> tuple[str, ShardTensor]:
        """The rank's part of one source, and the name of the tensor it is a part of ("" for one of its own)."""
        if source in (EMBEDDING, HEAD):
            return "", self._rows(source, self._vocabulary_pieces(source, rank))
        match = _LAYER.fullmatch(source)
        if match is None:
            return "", self._whole(source)
        layer, module, kind = f"model.layers.{match[1]}.", match[2], match[3]
        if module in _QUERY_KEY_VALUE:
            return self._attention(source, layer, _QUERY_KEY_VALUE[module], kind, rank)
        if module in ("mlp.gate_proj", "mlp.up_proj"):
            begin, end = self._share(self.shapes[source][0], rank)
            return f"{layer}mlp.gate_up_proj.{kind}", self._rows(source, (SourceSlice(source, begin, end),))
        if module in ("self_attn.o_proj", "mlp.down_proj") and kind == "weight":
            return "", self._columns(source, module, rank)
        # Norms are whole on every rank; so are biases of row-parallel layers, which are added once behind the sum.
        return "", self._whole(source)

    def _attention(self, source: str, layer: str, letter: str, kind: str, rank: int) -> tuple[str, ShardTensor]:
        begin, end = (query_range if letter == "q" else kv_range)(self._heads, self.degrees, rank)
        piece = SourceSlice(source, begin * self._heads.size, end * self._heads.size)
        form, prefix = self.degrees.qkv, f"{layer}self_attn.qkv_proj."
        if form == "linear":
            return "", self._rows(source, (piece,), f"{prefix}{kind}_{letter}")
        joined = {"fused": f"{prefix}{kind}_qkv", "coalesced": f"{prefix}{kind}", "split": ""}[form]
        return joined, self._rows(source, (piece,))

    def _columns(self, source: str, module: str, rank: int) -> ShardTensor:
        if module == "self_attn.o_proj":
            first, last = query_range(self._heads, self.degrees, rank)
            begin, end = first * self._heads.size, last * self._heads.size
        else:
            begin, end = self._share(self.shapes[source][1], rank)
        return ShardTensor(source, 1, (self.shapes[source][0], end - begin), (SourceSlice(source, begin, end),))

    def _rows(self, source: str, pieces: tuple[SourceSlice, ...], name: str = "") -> ShardTensor:
        # A tied head has no shape of its own.
        rest = self.shapes[EMBEDDING if source == HEAD and self.is_tied else source][1:]
        return ShardTensor(name or source, 0, (sum(it.length for it in pieces), *rest), pieces)

    def _whole(self, source: str) -> ShardTensor:
        shape = self.shapes[source]
        return ShardTensor(source, 0, shape, (SourceSlice(source, 0, shape[0]),))

    def _vocabulary_pieces(self, source: str, rank: int) -> tuple[SourceSlice, ...]:
        """A rank's rows of the token table or the head; rows beyond the vocabulary are zeros."""
        begin, end = self._share(self.padded_vocabulary, rank)
        held = EMBEDDING if source == HEAD and self.is_tied else source
        # The last ranks may begin beyond the vocabulary: then all their rows are zeros.
        real = SourceSlice(held, min(begin, self.vocabulary), min(end, self.vocabulary))
        zeros = SourceSlice("", 0, end - begin - real.length)
        return tuple(it for it in (real, zeros) if it.length)

    def _share(self, size: int, rank: int) -> tuple[int, int]:
        part = size // self.degrees.tensor
        return rank * part, (rank + 1) * part


def _join(name: str, parts: list[ShardTensor]) -> ShardTensor:
    rows = sum(it.shape[0] for it in parts)
    return ShardTensor(name, 0, (rows, *parts[0].shape[1:]), tuple(piece for it in parts for piece in it.pieces))


def parts_by_source(tensors: Mapping[int, Iterable[ShardTensor]]) -> dict[str, list[Part]]:
    """The inverse of a plan: source -> where its rows or columns are, for the tensors of each tensor-parallel rank."""
    found: dict[str, list[Part]] = {}
    for rank, held in tensors.items():
        for tensor in held:
            at = 0
            for piece in tensor.pieces:
                if piece.source:
                    found.setdefault(piece.source, []).append(Part(rank, tensor, at, piece.begin, piece.end))
                at += piece.length
    return found


def primary_and_copies(parts: Iterable[Part]) -> tuple[list[Part], list[tuple[Part, Part]]]:
    """Parts that make up a source without overlap, in order, and each further copy with the part it must equal."""
    primary: dict[tuple[int, int], Part] = {}
    copies = []
    # Within a range by rank: the lowest rank's part is the one that the others are compared with.
    for part in sorted(parts, key=lambda it: (it.begin, it.rank)):
        if (first := primary.setdefault((part.begin, part.end), part)) is not part:
            copies.append((first, part))
    return list(primary.values()), copies


def gaps(parts: Iterable[Part], length: int) -> Iterator[tuple[int, int]]:
    """Ranges of a source that no part covers, or that two cover, along its axis; nothing for a sound plan."""
    position = 0
    for part in parts:
        if part.begin != position:
            yield min(position, part.begin), max(position, part.begin)
        position = part.end
    if position != length:
        yield min(position, length), max(position, length)
