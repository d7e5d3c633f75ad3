"""Writes the shards of a Hugging Face model, one rank's file at a time."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING

from sm_llm.convert.files.torch_file import read_torch_file
from sm_llm.convert.files.torch_writer import (
    Plain,
    TorchFile,
    info_pickle,
    reference_pickle,
    state_pickle,
    tensor_pickle,
)
from sm_llm.convert.files.views import Slice, chunks, whole, zeros
from sm_llm.convert.hf_source import SOURCE
from sm_llm.convert.mapping_rules import EMBEDDING
from sm_llm.convert.nxd_source import read_rank
from sm_llm.convert.work import PARTIAL, SHARDS, Unit, checksum
from sm_llm.errors import Issue
from sm_llm.storage.checksum import Crc64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.convert.files.views import Raw, View
    from sm_llm.convert.mapping_rules import ShardPlan, ShardTensor
    from sm_llm.convert.work import Result


def nxd_units(plan: ShardPlan, views: Mapping[str, View], destination: Path, *, xser: bool) -> list[Unit]:
    """For each pipeline rank a checksum of each of its sources, then the file of each tensor-parallel rank."""
    units = []
    for pp in range(plan.degrees.pipeline):
        sources = plan.stage(pp)
        for name in sources:
            # A tied head has no source of its own.
            if name in views:
                units.append(Unit(f"source {name}", "", views[name].size, partial(_source_checksum, views[name], name)))
        for tp in range(plan.degrees.tensor):
            tensors = plan.rank(tp, sources)
            file = f"{SHARDS}/dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
            size = sum(_plain(it, views).size for it in tensors)
            write = partial(_write_xser if xser else _write_inline, destination / file, tensors, views)
            units.append(Unit(file, file, size, write, partial(_held, destination / file)))
    return units


def _source_checksum(view: View, name: str, count: Callable[[int], None]) -> Result:
    found = checksum(_counted(chunks([whole(view)], 0), count))
    return {"tensors": {name: found}}


def _counted(pieces: Iterator[memoryview], count: Callable[[int], None]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        count(len(piece))


def _held(path: Path) -> dict[str, Iterator[memoryview]]:
    """The tensors of a rank's file that is there already."""
    views, kind = read_rank(path)
    if kind == "xser":
        # NxD needs it, and our own reader does not: it is read only to find out whether it is whole.
        read_torch_file(_info_path(path))
    return {name: chunks([whole(view)], 0) for name, view in views.items()}


def _info_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.info.pt")


def shard_chunks(tensor: ShardTensor, views: Mapping[str, View]) -> Iterator[memoryview]:
    """The bytes of one tensor of a rank, cut from its sources."""
    dtype = _plain(tensor, views).dtype
    parts: list[Slice | Raw] = []
    for piece in tensor.pieces:
        if piece.source:
            parts.append(Slice(views[piece.source], tensor.axis, piece.begin, piece.end, keep=True))
        else:
            parts.append(zeros((piece.length, *tensor.shape[1:]), dtype))
    return chunks(parts, tensor.axis)


def mixed_formats(plan: ShardPlan, views: Mapping[str, View]) -> list[Issue]:
    """Tensors that a rank holds as one, but whose sources differ in their number format."""
    issues = []
    for tensor in plan.rank(0, plan.everything()):
        formats = {piece.source: views[piece.source].dtype for piece in tensor.pieces if piece.source}
        if len(set(formats.values())) > 1:
            problem = f"{tensor.name} joins {', '.join(f'{name} ({dtype})' for name, dtype in formats.items())}"
            issues.append(Issue("joined-dtypes-differ", SOURCE, problem, remedy="Save the model in one number format"))
    return issues


def _plain(tensor: ShardTensor, views: Mapping[str, View]) -> Plain:
    # A rank whose rows are all padding has no source; it takes the format that the others have: that of the head, or of
    # the token table where the head is tied.
    padding = tensor.name if tensor.name in views else EMBEDDING
    source = next((piece.source for piece in tensor.pieces if piece.source), padding)
    return Plain(views[source].dtype, tensor.shape)


def _write_tensor(
    file: TorchFile, key: int, tensor: ShardTensor, views: Mapping[str, View], count: Callable[[int], None]
) -> str:
    crc = Crc64()

    def seen(piece: memoryview) -> None:
        crc.update(piece)
        count(len(piece))

    file.tensor(key, _plain(tensor, views).size, shard_chunks(tensor, views), seen)
    return crc.hexdigest()


def _write_inline(
    path: Path, tensors: Sequence[ShardTensor], views: Mapping[str, View], count: Callable[[int], None]
) -> Result:
    """All tensors of a rank in one file."""
    partial_path = path.with_name(path.name + PARTIAL)
    # ``TorchFile`` creates its file exclusively, and an interrupted process may have left one.
    partial_path.unlink(missing_ok=True)
    file = TorchFile(partial_path, path.stem, state_pickle([(it.name, _plain(it, views)) for it in tensors]))
    try:
        checksums = {it.name: _write_tensor(file, key, it, views, count) for key, it in enumerate(tensors)}
        size = file.close()
    except BaseException:
        file.abort()
        partial_path.unlink(missing_ok=True)
        raise
    partial_path.replace(path)
    return {"bytes": size, "tensors": checksums}


def _write_xser(
    path: Path, tensors: Sequence[ShardTensor], views: Mapping[str, View], count: Callable[[int], None]
) -> Result:
    """Each tensor of a rank in a file of its own, then ``.info.pt``, then the file of references."""
    folder = path.with_name(f"{path.name}.tensors")
    partial_folder = folder.with_name(folder.name + PARTIAL)
    # Within a rank nothing is continued: what an interrupted process left is written again.
    for it in (folder, partial_folder):
        shutil.rmtree(it, ignore_errors=True)
    partial_folder.mkdir()
    checksums: dict[str, str] = {}
    total = 0
    for tid, tensor in enumerate(tensors):
        name = f"tensor_{tid}"
        file = TorchFile(partial_folder / f"{name}.pt", name, tensor_pickle(_plain(tensor, views)))
        try:
            checksums[tensor.name] = _write_tensor(file, 0, tensor, views, count)
            total += file.close()
        except BaseException:
            file.abort()
            shutil.rmtree(partial_folder, ignore_errors=True)
            raise
    partial_folder.rename(folder)
    total += _write_small(_info_path(path), info_pickle([_plain(it, views) for it in tensors]))
    # The file of references comes last: its name marks the rank as written.
    size = _write_small(path, reference_pickle([it.name for it in tensors]))
    return {"bytes": total + size, "tensors": checksums}


def _write_small(path: Path, pickle: bytes) -> int:
    partial_path = path.with_name(path.name + PARTIAL)
    partial_path.unlink(missing_ok=True)
    file = TorchFile(partial_path, path.name.removesuffix(".pt"), pickle)
    size = file.close()
    partial_path.replace(path)
    return size
