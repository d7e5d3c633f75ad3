"""Which files of a folder are meant: include and exclude patterns, and one weight format where there are several."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from sm_llm.errors import StorageRefused
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sm_llm.storage.base import StoredObject

# The names that transformers' save_pretrained gives.
_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# The same weights as repositories of the hub also hold them: PyTorch, Meta's own, TensorFlow, Flax and Rust.
_OTHER_WEIGHTS = re.compile(
    r"pytorch_model(-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json|consolidated.*\.(pth|pt|safetensors)"
    r"|tf_model.*\.h5|flax_model.*\.msgpack|rust_model\.ot|model\.ckpt.*"
)


@dataclass(frozen=True)
class LeftOut:
    """Files that are not copied, and why: a pattern, or another format of weights that are there already."""

    reason: str
    files: int
    size: int


@dataclass(frozen=True)
class Selection:
    """Patterns for paths relative to a folder, with "/".

    ``original`` or ``original/`` means a file or folder of that name at any depth (with a "/" inside: from the top),
    ``.pth`` every name that ends so, and anything with ``*``, ``?`` or ``[`` is a glob of the whole path or, without
    a "/", of the name. With ``include`` only what it matches is taken; ``exclude`` wins.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    one_weight_format: bool = True
    """Of a Hugging Face folder with safetensors take these, and not the same weights in other formats."""

    def apply(self, items: Sequence[StoredObject]) -> tuple[list[StoredObject], list[LeftOut]]:
        """The items that are meant, and what was left out for which reason.

        Raises ``StorageError`` if nothing is left, or if an ``include`` matches nothing: it is a slip.
        """
        for pattern in self.include:
            if not any(matches(pattern, it.key) for it in items):
                raise StorageRefused(
                    f"include: {pattern!r} matches none of {counted(len(items), 'file')}. {_examples(items)}"
                )
        kept, left_out = list(items), []
        if self.include:
            named = {it.key for it in kept if any(matches(pattern, it.key) for pattern in self.include)}
            kept, out = _without(kept, {it.key for it in kept} - named, "not included")
            left_out += [out] if out.files else []
        for pattern in self.exclude:
            kept, out = _without(kept, {it.key for it in kept if matches(pattern, it.key)}, f"exclude {pattern}")
            left_out.append(out)  # one that matches nothing too: its zero is worth seeing
        if self.one_weight_format:
            kept, out = _without(kept, other_weight_formats(it.key for it in kept), "other formats of the weights")
            left_out += [out] if out.files else []
        if not kept:
            raise StorageRefused("include and exclude leave nothing to copy")
        return kept, left_out


def matches(pattern: str, path: str) -> bool:
    """Whether ``pattern`` (folder, suffix or glob form) means ``path``."""
    name = path.rpartition("/")[2]
    if any(character in pattern for character in "*?["):
        return fnmatchcase(path, pattern) or ("/" not in pattern and fnmatchcase(name, pattern))
    plain = pattern.strip("/")
    if "/" in plain:
        return path == plain or path.startswith(f"{plain}/")
    return plain in path.split("/") or (plain.startswith(".") and name.endswith(plain))


def other_weight_formats(paths: Iterable[str]) -> set[str]:
    """Paths of weights that lie, as safetensors, in the same model folder too.

    Only names that Hugging Face and the model's makers use for whole models are known here, and only beside a
    ``config.json``: nothing else is ever taken for a duplicate.
    """
    folders: dict[str, set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, set()).add(name)
    models = {
        folder
        for folder, names in folders.items()
        if "config.json" in names and any(_SAFETENSORS.fullmatch(name) for name in names)
    }
    found: set[str] = set()
    for folder, names in folders.items():
        prefix = f"{folder}/" if folder else ""
        parent, _, last = folder.rpartition("/")
        if folder in models:
            found |= {prefix + name for name in names if _OTHER_WEIGHTS.fullmatch(name)}
        elif last == "original" and parent in models:
            found |= {prefix + name for name in names}
    return found


def _without(items: Sequence[StoredObject], out: set[str], reason: str) -> tuple[list[StoredObject], LeftOut]:
    gone = [it for it in items if it.key in out]
    return [it for it in items if it.key not in out], LeftOut(reason, len(gone), sum(it.size for it in gone))


def _examples(items: Sequence[StoredObject]) -> str:
    return "There are, for example: " + ", ".join(repr(it.key) for it in items[:3])
