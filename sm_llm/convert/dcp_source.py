"""Opens a checkpoint of torch.distributed.checkpoint: its metadata as data, and every chunk as a place in a file."""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.contract.dcp_metadata import CLASSES, DTYPES, FUNCTIONS, METADATA_MODULE, SIZE
from sm_llm.convert.files.pickle_check import MOST_BYTES, require_harmless
from sm_llm.convert.files.torch_file import Frozen, read_torch_file
from sm_llm.convert.files.views import FORMATS, Slice, View, chunks, same, whole
from sm_llm.convert.hf_source import SOURCE, clean_names
from sm_llm.convert.mapping_rules import EMBEDDING, HEAD
from sm_llm.errors import ConversionError, ConversionRefused, Issue
from sm_llm.file_names import name_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.convert.mapping_rules import ShardPlan

# The name that torch.distributed.checkpoint gives to its index.
METADATA = ".metadata"
_DTYPES = {it.dtype: name for name, it in FORMATS.items()}
_SHOWN = 4


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor, and the bytes of a file that torch.save wrote of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    begin: int
    length: int


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


class _Unpickler(pickle.Unpickler):
    """Knows DCP's metadata alone, as plain objects of this call."""

    def __init__(self, body: bytes) -> None:
        super().__init__(io.BytesIO(body))
        # Classes of this call alone: what a pickle does to them ends with it.
        self._known: dict[tuple[str, str], Any] = {
            it: type(it[1], (_Plain,), {}) for it in (*CLASSES, (METADATA_MODULE, "BytesStorageMetadata"))
        }
        self._known |= {it: Frozen(lambda *_: None) for it in FUNCTIONS}
        self._known |= {SIZE: Frozen(tuple), ("collections", "OrderedDict"): OrderedDict}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and name in DTYPES:
            # A format that is not one of weights keeps its name, for the error that refuses it.
            return _DTYPES.get(name, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not part of a checkpoint's metadata")


class _Plain:
    """Keeps what a pickle sets."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class DcpTensors:
    """The tensors of a model in a checkpoint, checked against a plan: all there, whole, as floats."""

    def __init__(self, folder: Path, plan: ShardPlan, buffers: str) -> None:
        entries = _read_metadata(folder)
        cleaned, issues = clean_names(entries, SOURCE)
        if issues:
            raise ConversionRefused(issues)
        prefix = _prefix(plan.shapes, cleaned)
        held = {name.removeprefix(prefix): it for name, it in cleaned.items() if name.startswith(prefix)}
        self._entries = {name: held[name] for name in plan.shapes}
        # Optimizer states and counters of the run lie under other names in the same checkpoint.
        extra = [it for it in held if it not in plan.shapes and it.startswith(("model.", "lm_head."))]
        self.unread = tuple(name for name in extra if re.search(buffers, name))
        others = [name for name in extra if name not in self.unread and not (plan.is_tied and name == HEAD)]
        if issues := [*_extra_issues(others), *self._issues(plan.shapes)]:
            raise ConversionRefused(issues)
        if plan.is_tied and HEAD in held and not _equal(held[HEAD], self._entries[EMBEDDING]):
            problem = f"{HEAD} differs from {EMBEDDING}, but the config ties the two"
            raise ConversionRefused(
                [
                    Issue(
                        "dcp-tied-weights-differ",
                        SOURCE,
                        problem,
                        remedy="Set tie_word_embeddings: false in the config",
                    )
                ]
            )

    @property
    def files(self) -> list[Path]:
        """Files that are read."""
        return sorted({chunk.file for it in self._entries.values() for chunk in it.chunks})

    def dtype(self, name: str) -> str:
        """The number format of a tensor."""
        return self._entries[name].dtype

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        it = self._entries[name]
        return math.prod(it.shape) * FORMATS[it.dtype].width

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor, a piece at a time. Raises ``ConversionError`` for a damaged file."""
        it = self._entries[name]
        for row in _rows(it) or ():
            yield from chunks([_whole(it, chunk) for chunk in row], 1 if len(row) > 1 else 0)

    def _issues(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Issue]:
        if missing := [path.name for path in self.files if not path.is_file()]:
            problem = f"{METADATA} names files that are missing: {', '.join(missing[:_SHOWN])}"
            yield Issue("dcp-files-missing", SOURCE, problem, remedy="Copy the whole checkpoint")
        for name, it in self._entries.items():
            if it.shape != shapes[name]:
                problem = f"{name} has shape {list(it.shape)}, the config makes it {list(shapes[name])}"
                yield Issue(
                    "dcp-shape-mismatch", SOURCE, problem, remedy="Give the config that this model was trained with"
                )
            elif it.dtype not in FORMATS:
                yield Issue(
                    "dcp-dtype-unsupported",
                    SOURCE,
                    f"{name} is stored as {it.dtype}; weights must be one of {', '.join(FORMATS)}",
                )
            elif _rows(it) is None:
                yield Issue(
                    "dcp-tensor-incomplete",
                    SOURCE,
                    f"{name} is not cut into rows and columns that make up the whole of it",
                )


def _read_metadata(folder: Path) -> dict[str, _Entry]:
    """Name -> tensor of every entry. Raises ``ConversionError`` for anything but metadata, having run none of it."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            # One byte more than allowed, so that a larger file is refused and never read whole.
            body = file.read(MOST_BYTES + 1)
        # Before the unpickler: one that calls nothing can still be made to hang or to fill the memory.
        require_harmless(body)
        root = _Unpickler(body).load().state
        locations = _locations(folder, root["storage_data"])
        return {
            _text(name): _entry(_text(name), it.state, locations)
            for name, it in root["state_dict_metadata"].items()
            # The other kind of entry is a pickled value and not a tensor.
            if type(it).__name__ == "TensorStorageMetadata"
        }
    except ConversionError:
        raise
    except Exception as error:  # a pickle that is damaged on purpose can raise anything
        remedy = "Copy the whole checkpoint again"
        raise ConversionError(f"{path}: is not the metadata of a checkpoint: {error!r}. {remedy}") from None


def _locations(folder: Path, stored: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]]:
    found = {}
    for index, info in stored.items():
        name, begin, length = (info.state[it] for it in ("relative_path", "offset", "length"))
        if "/" in _text(name) or name_problem(name):
            raise ConversionError(f"{folder / METADATA}: a tensor lies in {name!r}, expected a file beside it")
        if info.state.get("transform_descriptors"):
            raise ConversionError(f"{folder / METADATA}: {name} was written through an extension")
        if not all(type(it) is int and it >= 0 for it in (begin, length)):
            raise ConversionError(f"{folder / METADATA}: a place in {name} is malformed")
        # Values that are not tensors have no offset.
        offsets = index.state.get("offset")
        found[_text(index.state["fqn"]), _numbers(offsets or ())] = (folder / name, begin, length)
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name is a {type(value).__name__}")
    return value


def _entry(name: str, state: Mapping[str, Any], locations: Mapping[Any, tuple[Path, int, int]]) -> _Entry:
    shape = _numbers(state["size"])
    parts = []
    for it in state["chunks"]:
        offsets, sizes = _numbers(it.state["offsets"]), _numbers(it.state["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"{name} has malformed chunks")
        parts.append(_Chunk(offsets, sizes, *locations[name, offsets]))
    return _Entry(str(state["properties"].state[0]), shape, tuple(parts))


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(it) is int and it >= 0 for it in values):
        raise ValueError("a size or place is not made of numbers")
    return values


def _prefix(shapes: Mapping[str, Any], entries: Mapping[str, Any]) -> str:
    """What stands before the names of the model's tensors, such as ``model.`` Raises ``ConversionRefused``."""
    candidates = sorted({name.removesuffix(EMBEDDING) for name in entries if name.endswith(EMBEDDING)})
    # A prefix counts only where the whole model is there under it.
    fitting = [it for it in candidates if all(it + name in entries for name in shapes)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        problem = f"holds several models, under {', '.join(repr(it) for it in fitting)}"
        raise ConversionRefused(
            [Issue("dcp-several-models", SOURCE, problem, remedy="Save the one that is meant by itself")]
        )
    missing = [name for name in shapes if not any(it + name in entries for it in candidates or [""])]
    problem = f"the checkpoint lacks {', '.join(missing[:_SHOWN]) or 'a complete model'}"
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise ConversionRefused(
        [
            Issue(
                "dcp-tensors-missing", SOURCE, problem + more, remedy="Give the config that this model was trained with"
            )
        ]
    )


def _extra_issues(names: Sequence[str]) -> list[Issue]:
    if not names:
        return []
    problem = f"holds {', '.join(names[:_SHOWN])}, which the model of this config does not have"
    return [Issue("dcp-tensors-unknown", SOURCE, problem, remedy="Give the config that this model was trained with")]


def _rows(entry: _Entry) -> list[list[_Chunk]] | None:
    """The chunks as rows of blocks from top to bottom, each from left to right; None if they are no such grid."""
    rows: dict[tuple[int, int], list[_Chunk]] = {}
    # Ranks without rows of a small tensor may store empty chunks.
    for it in sorted((it for it in entry.chunks if all(it.sizes)), key=lambda it: it.offsets):
        rows.setdefault((it.offsets[0], it.sizes[0]), []).append(it)
    position = 0
    for (begin, height), blocks in rows.items():
        if begin != position or not _is_row(entry, blocks):
            return None
        position += height
    return list(rows.values()) if position == entry.shape[0] else None


def _is_row(entry: _Entry, blocks: Sequence[_Chunk]) -> bool:
    if len(entry.shape) == 1:
        return len(blocks) == 1
    position = 0
    for it in blocks:
        if it.offsets[1:] != (position, *([0] * (len(entry.shape) - 2))) or it.sizes[2:] != entry.shape[2:]:
            return False
        position += it.sizes[1]
    return position == entry.shape[1]


def _whole(entry: _Entry, chunk: _Chunk) -> Slice:
    view = read_torch_file(chunk.file, chunk.begin, chunk.length)
    if not isinstance(view, View) or view.shape != chunk.sizes or view.dtype != entry.dtype:
        problem = f"{chunk.file}: byte {chunk.begin} does not hold the tensor that {METADATA} describes"
        raise ConversionError(f"{problem}. Copy the whole checkpoint again")
    return whole(view)


def _equal(first: _Entry, second: _Entry) -> bool:
    """Whether two entries that are cut alike have the same bits."""
    if (first.dtype, first.shape, len(first.chunks)) != (second.dtype, second.shape, len(second.chunks)):
        return False
    return all(
        (a.offsets, a.sizes) == (b.offsets, b.sizes) and same(_whole(first, a).array(), _whole(second, b).array())
        for a, b in zip(_ordered(first), _ordered(second), strict=True)
    )


def _ordered(entry: _Entry) -> list[_Chunk]:
    return sorted(entry.chunks, key=lambda it: it.offsets)
