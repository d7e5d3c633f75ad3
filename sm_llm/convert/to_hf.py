"""Writes a Hugging Face folder from shards: safetensors files, each tensor joined piece by piece from its ranks."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sm_llm.convert.files.appended_file import AppendedFile
from sm_llm.convert.files.views import FORMATS, Raw, Slice, chunks, same, whole, zeros
from sm_llm.convert.hf_source import SOURCE, mapped
from sm_llm.convert.mapping_rules import HEAD, gaps, parts_by_source, primary_and_copies
from sm_llm.convert.work import PARTIAL, Unit
from sm_llm.errors import ConversionError, ConversionRefused, Issue
from sm_llm.models.safetensors_folder import SINGLE_FILE, read_header
from sm_llm.storage.checksum import Crc64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.convert.files.views import View
    from sm_llm.convert.mapping_rules import Part, ShardPlan, ShardTensor
    from sm_llm.convert.nxd_source import Shards
    from sm_llm.convert.work import Result

FILE_BYTES = 4 << 30
"""A safetensors file holds no more, unless one tensor is larger."""
_SMALL_FILE_BYTES, _FILES_AT_ONCE = 256 << 20, 8
"""A large model makes at least eight files, so that several workers have something to do until the end."""
_SHOWN = 4


class Tensors(Protocol):
    """Where whole tensors come from."""

    def dtype(self, name: str) -> str:
        """The number format of a tensor."""

    def size(self, name: str) -> int:
        """Bytes of a tensor."""

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor, a piece at a time; a piece is valid until the next one is asked for."""


class Joined:
    """The tensors of a model as the shards hold them, checked: all there, in the shapes that the plan makes."""

    def __init__(self, plan: ShardPlan, shards: Shards, *, has_manifest: bool = False) -> None:
        """``has_manifest``: the order of heads is known, so copies that differ are damage."""
        self._plan, self._shards, self._has_manifest = plan, shards, has_manifest
        tensors = {tp: plan.rank(tp, plan.everything()) for tp in range(plan.degrees.tensor)}
        if issues := [*_name_issues(plan, tensors[0], shards), *self._shape_issues(tensors)]:
            raise ConversionRefused(issues)
        # A tied head may be missing in the shards.
        present = {tp: [it for it in held if it.name in shards.stages] for tp, held in tensors.items()}
        self._parts = parts_by_source(present)
        for name, shape in plan.shapes.items():
            primary = primary_and_copies(self._parts[name])[0]
            # The plan itself covers every source: a gap is an error in this program, not in the shards.
            assert not list(gaps(primary, shape[primary[0].tensor.axis])), name

    def dtype(self, name: str) -> str:
        """The number format of a source tensor."""
        return self._view(self._parts[name][0]).dtype

    def size(self, name: str) -> int:
        """Bytes of a source tensor."""
        return math.prod(self._plan.shapes[name]) * FORMATS[self.dtype(name)].width

    def copied(self) -> tuple[str, ...]:
        """Source tensors of which several ranks hold the same part."""
        return tuple(name for name in self._plan.shapes if primary_and_copies(self._parts[name])[1])

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of a source tensor, a piece at a time. Raises ``ConversionError`` if copies of it differ."""
        # Before the first piece: of copies that differ nothing may be written.
        self.check_copies(name)
        primary, _ = primary_and_copies(self._parts[name])
        return chunks([self._cut(it) for it in primary], primary[0].tensor.axis)

    def check_copies(self, name: str) -> None:
        """Raise ``ConversionError`` if ranks that hold the same part of a source tensor hold other values."""
        for first, other in primary_and_copies(self._parts[name])[1]:
            if not same(self._cut(first).array(), self._cut(other).array()):
                raise ConversionError([self._unequal(name, first, other)])

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Raw:
        """``[offsets, offsets + sizes)`` of a source tensor, in elements as they are in the files (``dtype``)."""
        primary, _ = primary_and_copies(self._parts[name])
        axis = primary[0].tensor.axis
        first, last = offsets[axis], offsets[axis] + sizes[axis]
        pieces = []
        for part in primary:
            begin, end = max(first, part.begin), min(last, part.end)
            if begin < end:
                held = Slice(self._view(part), axis, part.at + begin - part.begin, part.at + end - part.begin).array()
                others = [slice(o, o + s) for o, s in zip(offsets, sizes, strict=True)]
                # Along this axis ``held`` is cut already.
                others[axis] = slice(None)
                pieces.append(held[tuple(others)])
        return np.concatenate(pieces, axis=axis) if pieces else zeros(sizes, self.dtype(name))

    def _view(self, part: Part) -> View:
        return self._shards.views[part.rank, self._shards.stages[part.tensor.name]][part.tensor.name]

    def _cut(self, part: Part) -> Slice:
        return Slice(self._view(part), part.tensor.axis, part.at, part.at + part.end - part.begin)

    def _unequal(self, name: str, first: Part, other: Part) -> Issue:
        pair = f"{first.tensor.name} of tp rank {first.rank} and {other.tensor.name} of tp rank {other.rank}"
        problem = f"{pair} must be copies of the same part of {name}, and they differ"
        if first.tensor.name != other.tensor.name:
            remedy = "Set tie_word_embeddings: false in the config.json beside the shards to keep both"
        # With the wrong layout, different heads are taken for copies of one.
        elif not self._has_manifest and self._plan.degrees.kv_multiplier > 1 and ("k_proj" in name or "v_proj" in name):
            layout = self._plan.degrees.layout
            remedy = f"Give the layout they were written in: --layout {'trn2' if layout == 'trn1' else 'trn1'}"
        else:
            remedy = "Copy the checkpoint again: files of its ranks are damaged, exchanged or of several checkpoints"
        return Issue("shard-copies-differ", SOURCE, problem, remedy=remedy)

    def _shape_issues(self, tensors: Mapping[int, Sequence[ShardTensor]]) -> Iterator[Issue]:
        wrong = []
        formats: dict[str, set[str]] = {}
        for tp, held in tensors.items():
            for tensor in held:
                stage = self._shards.stages.get(tensor.name)
                view = None if stage is None else self._shards.views[tp, stage].get(tensor.name)
                # A tensor that is missing has its own issue.
                if view is None:
                    continue
                formats.setdefault(tensor.name, set()).add(view.dtype)
                if view.shape != tensor.shape:
                    wrong.append((tp, tensor, view))
        if wrong:
            yield self._wrong_shape(wrong)
        if mixed := [name for name, found in formats.items() if len(found) > 1]:
            yield Issue(
                "shard-dtypes-differ", SOURCE, f"ranks differ in the number format of {', '.join(mixed[:_SHOWN])}"
            )

    def _wrong_shape(self, wrong: Sequence[tuple[int, ShardTensor, View]]) -> Issue:
        tp, tensor, view = wrong[0]
        degrees = self._plan.degrees
        made = f"the config makes it {list(tensor.shape)} with tp {degrees.tensor}"
        problem = f"{tensor.name} of tp rank {tp} has shape {list(view.shape)}, {made}"
        whole = next((math.prod(self._plan.shapes[it.source]) for it in tensor.pieces if it.source), 0)
        held = math.prod(view.shape)
        # Only a cut along its own axis can come from another degree; anything else is another tensor.
        others = [it[: tensor.axis] + it[tensor.axis + 1 :] for it in (view.shape, tensor.shape)]
        is_cut = len(tensor.pieces) == 1 and len(view.shape) == len(tensor.shape) and others[0] == others[1]
        if is_cut and held and whole % held == 0 and whole // held != degrees.tensor:
            problem += f"; it is 1/{whole // held} of the whole, so these may be files of tp {whole // held}"
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        remedy = "Give the config.json that these shards were made with (--config), and copy all ranks"
        return Issue("shard-shape-mismatch", SOURCE, problem + more, remedy=remedy)


def _name_issues(plan: ShardPlan, tensors: Sequence[ShardTensor], shards: Shards) -> Iterator[Issue]:
    wanted = {it.name for it in tensors}
    missing, extra = sorted(wanted - shards.stages.keys()), sorted(shards.stages.keys() - wanted)
    if plan.is_tied and missing == [HEAD]:
        missing = []  # a tied head that nobody wrote is the embedding
    if missing:
        problem = f"lacks {_some(missing)}, which the model of this config has"
        yield Issue(
            "shards-lack-tensors",
            SOURCE,
            problem,
            remedy="Copy the whole checkpoint, or give its own config.json (--config)",
        )
    if extra:
        problem = f"holds {_some(extra)}, which the model of this config does not have"
        yield Issue(
            "shards-hold-unknown-tensors",
            SOURCE,
            problem,
            remedy="Give the config.json that these shards were made with (--config)",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def hf_units(plan: ShardPlan, joined: Tensors, destination: Path) -> list[Unit]:
    """One unit for each safetensors file, tensors in model order; the same files however many workers there are."""
    whole = sum(joined.size(name) for name in plan.shapes)
    file_bytes = min(FILE_BYTES, max(_SMALL_FILE_BYTES, -(-whole // _FILES_AT_ONCE)))
    groups: list[list[str]] = [[]]
    filled = 0
    for name in plan.shapes:
        size = joined.size(name)
        # No tensor is divided over files: one that is larger has a file of its own.
        if filled and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    units = []
    for number, names in enumerate(groups, start=1):
        file = SINGLE_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shapes = {name: plan.shapes[name] for name in names}
        write = partial(_write_safetensors, destination / file, shapes, joined)
        size = sum(joined.size(it) for it in names)
        units.append(Unit(file, file, size, write, partial(_held, destination / file)))
    return units


def index_json(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The index of several safetensors files; None for a single one."""
    if len(results) == 1:
        return None
    weights = {name: file for file, it in sorted(results.items()) for name in it["tensors"]}
    # Without the headers of the files: the index counts bytes of tensors.
    total = sum(it["bytes"] for it in results.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2) + "\n"


def _header(shapes: Mapping[str, tuple[int, ...]], joined: Tensors) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + joined.size(name)
        entries[name] = {"dtype": joined.dtype(name), "shape": list(shape), "data_offsets": [position, end]}
        position = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    # The format wants the header's length to be a multiple of 8, filled up with blanks.
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], joined: Tensors, count: Callable[[int], None]
) -> Result:
    partial_path = path.with_name(path.name + PARTIAL)
    # It is created exclusively, and an interrupted process may have left one.
    partial_path.unlink(missing_ok=True)
    checksums, total = {}, 0
    file = AppendedFile(partial_path)
    try:
        file.write(_header(shapes, joined))
        for name in shapes:
            crc = Crc64()
            for piece in joined.chunks(name):
                crc.update(piece)
                file.write(piece)
                count(len(piece))
                total += len(piece)
            checksums[name] = crc.hexdigest()
        file.close()
    except BaseException:
        file.abort()
        partial_path.unlink(missing_ok=True)
        raise
    # Not flushed here: ``run_units`` flushes all files once, before the manifest is written.
    partial_path.replace(path)
    return {"bytes": total, "tensors": checksums}


def _held(path: Path) -> dict[str, Iterator[memoryview]]:
    """The tensors of a safetensors file that is there already. Raises ``OSError`` or ``ValueError``."""
    return {name: chunks([whole(mapped(it))], 0) for name, it in read_header(path).items()}
