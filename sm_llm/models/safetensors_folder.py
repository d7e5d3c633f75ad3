"""The tensors of a folder of safetensors files, from the headers and the index alone: no torch, no weights read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.file_names import name_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARDS = "model"
"""Folder of the shards for neuronx-distributed in a converted model, as its trainer expects it below a tag."""
START = "task.start.pretrained"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What belongs to a Hugging Face tokenizer folder."""

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_AGAIN = "Fetch the file again, or name another folder of weights"
_REWRITE = "Fetch the whole folder again, or write it anew with save_pretrained"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: its format (``F32``, ``BF16``, ...), its shape and its bytes ``[begin, end)`` there."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[Issue]]:
    """Name -> tensor of a Hugging Face model folder, and every issue of its files and its index.

    The index decides which files belong to the model, whatever their names. A tensor whose file is damaged is absent.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.is_file():
        return _indexed(folder, index)
    if single.is_file():
        tensors, issues = _read([single])
        return tensors.get(single, {}), issues
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    problem = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE} (weights found: {', '.join(found[:5]) or 'none'})"
    remedy = "Save the model with save_pretrained (safetensors), or name another folder. Pickled weights (.bin, .pt)"
    return {}, [Issue("weights-not-found", START, problem, remedy=f"{remedy} are not read")]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ``OSError``, or ``ValueError`` with what is wrong with the file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        # The length of the header comes from the file: it is compared with the file's size before anything is
        # allocated.
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"is not a whole safetensors file: {size:,} bytes, a header of {length:,} bytes announced")
        try:
            # Without the hook json would keep the last of two entries of one name.
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            tensors = {name: _stored(path, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"has a damaged header ({_short(error)})") from None
    _check_layout(tensors, 8 + length, size)
    return tensors


def _stored(path: Path, data: int, entry: Mapping[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"offsets {begin}, {end} and shape {list(shape)} must be whole numbers")
    return StoredTensor(path, str(entry["dtype"]), shape, data + begin, data + end)


def _check_layout(tensors: Mapping[str, StoredTensor], data: int, size: int) -> None:
    """The tensors must fill the file from the header to its end, without gaps and without overlap."""
    position = data
    # A header may list its tensors in any order.
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        # A format that is not known here has no width to compare; whether it is one of weights is checked with the
        # config.
        width = _BYTES.get(entry.dtype)
        if entry.begin != position or (width and entry.end - entry.begin != width * math.prod(entry.shape)):
            raise ValueError(f"has a damaged header: the bytes of {name} do not fit its shape and place")
        position = entry.end
    if size < position:
        raise ValueError(f"is truncated: {size:,} of {position:,} bytes")
    if size > position:
        raise ValueError(f"has {size - position:,} trailing bytes that belong to no tensor")


def _read(files: Sequence[Path]) -> tuple[dict[Path, dict[str, StoredTensor]], list[Issue]]:
    found, issues = {}, []
    for path in files:
        try:
            found[path] = read_header(path)
        except FileNotFoundError:
            issues.append(
                Issue("weights-file-missing", START, f"{path} is missing, but {INDEX_FILE} names it", remedy=_REWRITE)
            )
        except (OSError, ValueError) as error:
            issues.append(Issue("weights-file-unreadable", START, f"{path} {_short(error)}", remedy=_AGAIN))
    return found, issues


def _indexed(folder: Path, index: Path) -> tuple[dict[str, StoredTensor], list[Issue]]:
    try:
        names, total = _read_index(index)
    except (OSError, OverflowError, ValueError, RecursionError) as error:
        return {}, [
            Issue("weights-index-invalid", START, f"{index} is not a usable index ({_short(error)})", remedy=_REWRITE)
        ]
    # Before any file is opened: the names come with the weights and may lead anywhere.
    outside = {name: issue for name in sorted(set(names.values())) if (issue := name_problem(name))}
    if outside:
        remedy = "Put the files beside the index and correct the names there, or fetch the whole folder again"
        problem = f"{index} names files outside of its folder, or by names that no file has"
        return {}, [
            Issue("weights-index-names-outside", START, f"{problem}: {issue}", name, remedy)
            for name, issue in outside.items()
        ]
    shards = {name: folder / name for name in dict.fromkeys(names.values())}
    held, issues = _read(list(shards.values()))
    issues += _ambiguous(folder, index, set(shards))
    issues += _misplaced(index, names, {name: held[path] for name, path in shards.items() if path in held})
    tensors = {name: held[shards[file]][name] for name, file in names.items() if name in held.get(shards[file], {})}
    # What a shard holds beyond the index is not read either: the caller judges it like any tensor without a place.
    extra = {name: entry for part in held.values() for name, entry in part.items() if name not in names}
    sizes = [entry.end - entry.begin for part in held.values() for entry in part.values()]
    # Only of files that are all sound: anything missing has its own issue, and would change the sum.
    if not issues and total is not None and not _is_total(total, sizes):
        problem = f"{index}: metadata.total_size is {total:,}, the files hold {sum(sizes):,} bytes of tensors"
        issues.append(Issue("weights-size-mismatch", START, problem, remedy=_REWRITE))
    return {**extra, **tensors}, issues


def _is_total(total: int, sizes: Sequence[int]) -> bool:
    """Whether an index speaks of these tensors. Converters copy its total from another format, where buffers have other
    sizes and a tied head counts beside its embedding, the largest tensor."""
    beyond = total - sum(sizes)
    return min(abs(beyond), abs(beyond - max(sizes, default=0))) <= sum(sizes) // 100


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError("it has no weight_map")
    if wrong := [name for name, file in names.items() if not isinstance(file, str) or not file]:
        raise ValueError(f"it names no file for {wrong[0]}")
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be a mapping, got {str(metadata)[:80]!r}")
    total = metadata.get("total_size")
    # Some writers give a float.
    if total is not None and (isinstance(total, bool) or not isinstance(total, int | float)):
        raise ValueError(f"metadata.total_size must be a number, got {total!r}")
    return names, None if total is None else int(total)


def _ambiguous(folder: Path, index: Path, named: set[str]) -> Iterator[Issue]:
    if (folder / SINGLE_FILE).is_file() and SINGLE_FILE not in named:
        problem = f"{folder} holds {SINGLE_FILE} beside {index.name}, which does not name it: two sets of weights"
        yield Issue(
            "weights-ambiguous", START, problem, remedy="Remove the one that is not meant, or name another folder"
        )


def _misplaced(
    index: Path, names: Mapping[str, str], held: Mapping[str, Mapping[str, StoredTensor]]
) -> Iterator[Issue]:
    """Tensors that are not in the file that the index names, or in several files."""
    for name, file in names.items():
        shards = [shard for shard, part in held.items() if name in part]
        if len(shards) > 1:
            yield Issue(
                "weights-tensor-repeated", START, f"{name} is in several files: {', '.join(shards)}", remedy=_REWRITE
            )
        # A file that could not be read has its own issue.
        elif file in held and shards != [file]:
            elsewhere = f"; it is in {shards[0]}" if shards else ""
            problem = f"{index.parent / file} does not hold {name}, which {index.name} places there{elsewhere}"
            yield Issue("weights-tensor-misplaced", START, problem, remedy=_REWRITE)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _short(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return f"cannot be read: {error}" if isinstance(error, OSError) else str(error)
