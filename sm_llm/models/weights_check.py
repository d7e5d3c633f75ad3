"""Whether the weights in a folder are those of a config: names, shapes and number formats, from the headers alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.models.families.table import family
from sm_llm.models.safetensors_folder import SHARDS, START, StoredTensor, stored_tensors
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.models.families.family import Config, Tensor

FORMATS = ("F64", "F32", "F16", "BF16")
"""Number formats of weights that are trained on."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ADAPTER = re.compile(r"\.(?:lora_|adapter_)|^base_model\.")
_CHUNK = 1 << 24
_SHOWN = 4
# Format -> the type of numpy with as many bytes, and the bits of its exponent: all of them are set in NaN and infinity.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


@dataclass(frozen=True)
class CheckedWeights:
    """What a folder holds: the tensors that the model reads, the buffers that it computes itself, and all issues."""

    tensors: Mapping[str, StoredTensor]
    unread: tuple[str, ...]
    issues: tuple[Issue, ...]


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds a model cut for neuronx-distributed (``convert`` to nxd), and no other weights."""
    return (folder / SHARDS).is_dir() and not any(folder.glob("*.safetensors"))


def check_weights(folder: Path, config: Config) -> CheckedWeights:
    """Compare the safetensors files of ``folder`` with a canonical ``config``: every tensor of the model must be there
    in its shape and as floats, and nothing may be left over but buffers that the model computes itself."""
    kind = family(config)
    return compare_weights(folder, kind.tensors(config), tied=kind.tied_head(config), buffers=kind.buffers)


def compare_weights(
    folder: Path, tensors: Mapping[str, Tensor], *, tied: tuple[str, str] | None = None, buffers: str = r"(?!)"
) -> CheckedWeights:
    """The same for tensors given by name. ``tied`` is (output head, embedding) where the head is the embedding;
    ``buffers`` is a pattern of names."""
    stored, damage = stored_tensors(folder)
    return compare_stored(folder, stored, damage, tensors, tied=tied, buffers=buffers)


def compare_stored(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    damage: Sequence[Issue],
    tensors: Mapping[str, Tensor],
    *,
    tied: tuple[str, str] | None,
    buffers: str,
) -> CheckedWeights:
    """The same for tensors that were found already; ``damage`` is what was wrong with their files."""
    issues = [*_adapters(folder), *damage]
    unread = tuple(name for name in stored if name not in tensors and re.search(buffers, name))
    extra = [name for name in stored if name not in tensors and name not in unread]
    # A head beside a tied embedding is not left over; it must only be the same matrix.
    if tied is not None and tied[0] in extra:
        extra.remove(tied[0])
        issues += _head_issues(stored, *tied)
    # The tensors of a damaged file are absent, and would be reported as missing a second time.
    if not damage:
        issues += _missing(folder, tensors, stored, extra)
    issues += _unused(folder, tensors, stored, extra)
    issues += _shapes(tensors, stored)
    issues += _formats(tensors, stored)
    return CheckedWeights({name: stored[name] for name in tensors if name in stored}, unread, tuple(issues))


def unread_warning(names: Sequence[str]) -> Issue:
    """What to report of buffers in the files."""
    message = (
        f"the files hold {counted(len(names), 'buffer')} that the model computes; they are not read: {_some(names)}"
    )
    return warning("weights-buffers-not-read", START, message)


def not_finite(tensors: Mapping[str, StoredTensor], most_bytes: int) -> Iterator[Issue]:
    """Tensors with NaN or infinity in them, which no training recovers from.

    All of them are read, so only where they take at most ``most_bytes`` together: larger ones the worker refuses when
    it reads them.
    """
    known = {name: it for name, it in tensors.items() if it.dtype in _EXPONENTS}
    if sum(it.end - it.begin for it in known.values()) > most_bytes:
        return
    wrong = [name for name, it in known.items() if _has_not_finite(it)]
    for file in dict.fromkeys(known[name].file for name in wrong):
        names = [name for name in wrong if known[name].file == file]
        remedy = "Name weights that were saved before the training diverged, or fetch them again"
        problem = f"{file}: {_some(names)}: values that are NaN or infinite"
        yield Issue("weights-not-finite", START, problem, remedy=remedy)


def _has_not_finite(tensor: StoredTensor) -> bool:
    import numpy as np

    kind, exponent = _EXPONENTS[tensor.dtype]
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        rest = tensor.end - tensor.begin
        while rest:
            bits = np.frombuffer(stream.read(min(_CHUNK, rest)), dtype=kind)
            if not bits.size:
                return False  # the file was cut meanwhile
            if bool(((bits & exponent) == exponent).any()):
                return True
            rest -= bits.nbytes
    return False


def _adapters(folder: Path) -> Iterator[Issue]:
    found = [name for name in ("adapter_config.json", "adapter_model.safetensors") if (folder / name).is_file()]
    if found:
        remedy = "Merge it into its model first (merge_and_unload of peft), or name a folder without it"
        yield Issue(
            "weights-are-an-adapter", START, f"{folder / found[0]} is an adapter, which is not read", remedy=remedy
        )


def _head_issues(stored: Mapping[str, StoredTensor], head: str, embedding: str) -> Iterator[Issue]:
    """A head beside a config that ties it to the embedding: a copy is harmless, another matrix would be lost."""
    if embedding in stored and _same(stored[head], stored[embedding]):
        return
    difference = f"which differs from {embedding}" if embedding in stored else f"and no {embedding}"
    problem = f"{stored[head].file} holds {head}, {difference}, but the config ties the two"
    remedy = (
        "Set tie_word_embeddings: false in the config.json beside the weights, to train this head; "
        f"or remove {head} from the file, to train {embedding} as the head"
    )
    yield Issue("weights-tied-differ", START, problem, remedy=remedy)


def _same(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    # The bytes and not the numbers: the only tensors that are read here, a piece at a time.
    with first.file.open("rb") as left, second.file.open("rb") as right:
        left.seek(first.begin)
        right.seek(second.begin)
        rest = first.end - first.begin
        while rest:
            step = min(_CHUNK, rest)
            if left.read(step) != right.read(step):
                return False
            rest -= step
    return True


def _missing(
    folder: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], extra: Sequence[str]
) -> Iterator[Issue]:
    absent = [name for name in tensors if name not in stored]
    if absent:
        problem = f"{folder} lacks {_some(absent)}, which the model needs{_depth(tensors, stored)}"
        remedy = "Give the config that these weights were saved with, or fetch the complete weights"
        yield Issue("weights-lack-tensors", START, problem + _renamed(absent[0], extra), remedy=remedy)


def _unused(
    folder: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], extra: Sequence[str]
) -> Iterator[Issue]:
    for file in dict.fromkeys(stored[name].file for name in extra):
        names = [name for name in extra if stored[name].file == file]
        remedy = "Give the config that these weights were saved with, or write the file without these tensors"
        if any(_ADAPTER.search(name) for name in names):
            remedy = "Merge the adapter into its model first (merge_and_unload of peft), or name a folder without it"
        problem = f"{file} holds {_some(names)}, which the model of this config does not have{_depth(tensors, stored)}"
        yield Issue("weights-hold-unknown-tensors", START, problem, remedy=remedy)


def _shapes(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> Iterator[Issue]:
    wrong = [name for name, tensor in tensors.items() if name in stored and stored[name].shape != tensor.shape]
    # A wrong config makes nearly every shape wrong.
    for name in wrong[:_SHOWN]:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN and name == wrong[_SHOWN - 1] else ""
        problem = f"{stored[name].file}: {name} has shape {list(stored[name].shape)}, the config makes it "
        remedy = "Give the config that these weights were saved with, or name weights of this config"
        yield Issue("weights-shape-mismatch", START, f"{problem}{list(tensors[name].shape)}{more}", remedy=remedy)


def _formats(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> Iterator[Issue]:
    wrong = [name for name in tensors if name in stored and stored[name].dtype not in FORMATS]
    for dtype in dict.fromkeys(stored[name].dtype for name in wrong):
        names = [name for name in wrong if stored[name].dtype == dtype]
        file = stored[names[0]].file
        problem = f"{file}: {_some(names)} is stored as {dtype}; weights must be one of {', '.join(FORMATS)}"
        remedy = "Name the original weights, or convert these to bf16 or fp32 with the tool that quantised them"
        yield Issue("weights-dtype-unsupported", START, problem, remedy=remedy)


def _depth(tensors: Iterable[str], stored: Iterable[str]) -> str:
    """Where the number of layers differs, that is the cause to name."""
    wanted, found = _layers(tensors), _layers(stored)
    # Thousands of missing names would not show it.
    return "" if wanted == found else f" (the config has {wanted} layers, the weights have {found})"


def _layers(names: Iterable[str]) -> int:
    return max((int(match[1]) + 1 for name in names if (match := _LAYER.search(name))), default=0)


def _renamed(absent: str, extra: Sequence[str]) -> str:
    """Names that a wrapper has put a prefix to, or a model without its head has taken one from."""
    other = next((name for name in extra if name.endswith(f".{absent}") or absent.endswith(f".{name}")), None)
    return "" if other is None else f"; {other} may be {absent} under another prefix"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
