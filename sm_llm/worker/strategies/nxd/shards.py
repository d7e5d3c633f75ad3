"""One rank's tensors: filled from the slices they are made of, and brought together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sm_llm.convert.layout import NxdDegrees
from sm_llm.convert.mapping_rules import HEAD, ShardPlan, parts_by_source, primary_and_copies
from sm_llm.errors import CheckpointError
from sm_llm.models.families.table import family
from sm_llm.models.parallel import kv_copies, kv_heads
from sm_llm.worker.training.optim import is_decayed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Literal

    from sm_llm.convert.mapping_rules import Part, ShardTensor
    from sm_llm.spec.parallelism.nxd import NxdSpec
    from sm_llm.spec.training import OptimSpec
    from sm_llm.worker.strategies.weights import WeightReader

# Of key/value heads NxD keeps a copy on each rank that needs it.
_COPIED = (".self_attn.k_proj.", ".self_attn.v_proj.")


class RankShards:
    """What a tensor- and pipeline-parallel rank holds of a model, by the names of NxD's layers."""

    def __init__(
        self, config: Mapping[str, Any], spec: NxdSpec, layout: Literal["trn1", "trn2"], tensor_rank: int, stage: int
    ) -> None:
        self._copies = kv_copies(kv_heads(config), spec.tensor_parallel_degree)
        form: Literal["fused", "linear"] = "fused" if spec.fuse_qkv else "linear"
        degrees = NxdDegrees(
            spec.tensor_parallel_degree,
            spec.pipeline_parallel_degree,
            spec.virtual_pipeline_degree,
            self._copies,
            form,
            layout,
        )
        self._facts = family(config).tensors(config)
        self._plan = ShardPlan(dict(config), degrees)
        self._tensor_rank = tensor_rank
        self.tensors: dict[str, ShardTensor] = {it.name: it for it in self._held_by(tensor_rank, stage)}
        if self._plan.is_tied and spec.pipeline_parallel_degree == 1:
            del self.tensors[HEAD]  # the token table is its parameter

    @property
    def degrees(self) -> NxdDegrees:
        """How the model is cut."""
        return self._plan.degrees

    def _held_by(self, tensor_rank: int, stage: int) -> list[ShardTensor]:
        return self._plan.rank(tensor_rank, self._plan.stage(stage))

    def fill(self, name: str, parameter: torch.Tensor, weights: WeightReader) -> None:
        """Give a parameter its values. Raises ``CheckpointError`` for one that is not the model's."""
        held = self.tensors.get(name)
        if held is None or held.shape != tuple(parameter.shape):
            shape = "is not among its shards" if held is None else f"is {list(held.shape)} there"
            raise CheckpointError(f"{name} {list(parameter.shape)} of NxD's layers {shape}")
        parts = [self._read(held, number, weights) for number in range(len(held.pieces))]
        parameter.copy_(torch.cat(parts, dim=held.axis))

    def _read(self, held: ShardTensor, number: int, weights: WeightReader) -> torch.Tensor:
        piece = held.pieces[number]
        shape = self._facts[piece.source].shape
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[held.axis], sizes[held.axis] = piece.begin, piece.length
        return weights.read(piece.source, tuple(offsets), tuple(sizes))

    def is_decayed(self, name: str, optim: OptimSpec) -> bool:
        """Whether weight decay pulls at a tensor."""
        return is_decayed(self._facts[self.tensors[name].pieces[0].source], optim)

    def shares(self, name: str) -> list[tuple[int, float]]:
        """Runs of rows of a tensor, and what an element of each counts in sums over all ranks."""
        held, found = self.tensors[name], []
        for piece in held.pieces:
            is_whole = piece.length == self._facts[piece.source].shape[held.axis]
            # A tensor that is not split is on every tensor-parallel rank.
            share = 1 / self._plan.degrees.tensor if is_whole else 1.0
            if any(it in piece.source for it in _COPIED):
                share = 1 / self._copies
            found.append((piece.length if held.axis == 0 else held.shape[0], share))
        return found

    def whole_tensors(
        self, own: Mapping[str, torch.Tensor], group: Any, ranks: Mapping[tuple[int, int], int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every source tensor, whole on global rank 0, elsewhere empty. A collective over ``group``, on the host.

        ``ranks`` gives the global rank of a tensor-parallel rank and a stage; others hold the same.
        """
        for stage in range(self._plan.degrees.pipeline):
            names = [it for it in self._plan.stage(stage) if it in self._facts]
            held = {rank: self._plan.rank(rank, names) for rank in range(self._plan.degrees.tensor)}
            by_source = parts_by_source(held)
            for name in names:
                parts, _ = primary_and_copies(by_source[name])
                # One tensor at a time: rank 0 never holds more of the model than that.
                slices = [self._brought(name, it, own, ranks[it.rank, stage], group) for it in parts]
                yield name, torch.cat(slices, dim=parts[0].tensor.axis) if dist.get_rank() == 0 else torch.empty(0)

    def _brought(self, name: str, part: Part, own: Mapping[str, torch.Tensor], owner: int, group: Any) -> torch.Tensor:
        """A slice of a source tensor on rank 0, from the rank that owns it."""
        axis, length, rank = part.tensor.axis, part.end - part.begin, dist.get_rank()
        if rank == owner:
            held = own[part.tensor.name].narrow(axis, part.at, length).cpu().contiguous()
            if rank:
                dist.send(held, dst=0, group=group)
            return held
        # Every process comes to each tensor; only owner and rank 0 exchange a slice.
        sizes = list(self._facts[name].shape)
        sizes[axis] = length
        held = torch.empty(sizes if rank == 0 else 0, dtype=next(iter(own.values())).dtype)
        if rank == 0:
            dist.recv(held, src=owner, group=group)
        return held
