"""Opens a Hugging Face folder: its config, and every tensor as a place in a safetensors or .bin file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sm_llm.convert.files.torch_file import OtherTensor, read_torch_file
from sm_llm.convert.files.views import FORMATS, View, contiguous_strides
from sm_llm.convert.layout import decoder
from sm_llm.errors import ConversionError, ConversionRefused, Issue, SpecError
from sm_llm.models.config import normalise, read_config
from sm_llm.models.safetensors_folder import INDEX_FILE, SINGLE_FILE, TOKENIZER_FILES, StoredTensor, stored_tensors
from sm_llm.models.weights_check import compare_stored
from sm_llm.storage.stored_names import path_below
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sm_llm.convert.files.streamed_file import StreamedFile

BIN_INDEX, BIN_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
SOURCE = "SRC"
_SHOWN = 6
BESIDE = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""Files of a model folder beside its weights that a copy needs to be complete."""

# Of torch.compile, FSDP and activation checkpointing; anywhere in a name.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Of DistributedDataParallel; in front.
_LEADING = "module"
_Entry = TypeVar("_Entry")
_ONE = "Save the state dict of the unwrapped model"


@dataclass(frozen=True)
class HfSource:
    """A folder that was checked against its config: all tensors there, in their shapes, as floats."""

    folder: Path
    config: dict[str, Any]
    views: dict[str, View]
    unread: tuple[str, ...]
    """Buffers in the files that the model computes itself."""

    @property
    def files(self) -> list[Path]:
        """Weight files that are read."""
        return sorted({view.file for view in self.views.values()})


def local_folder(address: str | Path, where: str) -> Path:
    """The folder at ``address``. Raises ``ConversionRefused`` for anything else."""
    text = str(address)
    if "://" in text:
        remedy = f"Copy it first: sm-llm {'fetch' if text.startswith('hf:') else 'sync'} {quoted(text)} FOLDER"
        raise ConversionRefused([Issue("source-not-local", where, "must be a folder here or in S3", text, remedy)])
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise ConversionRefused([Issue("source-not-a-folder", where, "must be a folder", text, "Check the path")])
    return folder


def read_model_config(path: Path) -> dict[str, Any]:
    """The canonical config in a folder or file. Raises ``ConversionRefused``, also for a family without a layout."""
    try:
        written = read_config(path, where=SOURCE)
        if "model_type" in written:
            decoder(written)  # the family comes first: other families have other fields
        return normalise(written)
    except SpecError as error:
        # The checks of a config name fields of a job; here they are fields of this file.
        prefix = "task.model.config."
        issues = [replace(it, path=f"{path}: {it.path.removeprefix(prefix)}") for it in error.issues]
        raise ConversionRefused(issues) from None


def open_hf(folder: Path, streamed: Mapping[Path, StreamedFile] | None = None) -> HfSource:
    """The model in ``folder``, of which the bytes of files in ``streamed`` are in S3.

    Raises ``ConversionRefused`` with every issue of config, files, names, shapes and number formats.
    """
    config = read_model_config(folder)
    kind = decoder(config)
    stored, views, damage = _tensors(folder, streamed or {})
    cleaned, collisions = clean_names(stored, SOURCE)
    # Every view is one of the stored tensors, so its collisions are in the list already.
    views = clean_names(views, SOURCE)[0]
    checked = compare_stored(
        folder, cleaned, [*damage, *collisions], kind.tensors(config), tied=kind.tied_head(config), buffers=kind.buffers
    )
    if checked.issues:
        raise ConversionRefused([replace(it, path=SOURCE) for it in checked.issues])
    return HfSource(folder, config, {name: views[name] for name in checked.tensors}, checked.unread)


def _tensors(
    folder: Path, streamed: Mapping[Path, StreamedFile]
) -> tuple[dict[str, StoredTensor], dict[str, View], list[Issue]]:
    """Name -> place in a file, twice: as the checks take it and as it is read."""
    kinds = [(INDEX_FILE, SINGLE_FILE), (BIN_INDEX, BIN_FILE)]
    has_safetensors, has_bin = (any((folder / name).is_file() for name in names) for names in kinds)
    if not has_safetensors and not has_bin:
        names = ", ".join(name for pair in kinds for name in pair)
        found = ", ".join(sorted(it.name for it in folder.iterdir())[:_SHOWN]) or "nothing"
        problem = f"{folder} has no weights of a Hugging Face model ({found}); they must be in one of {names}"
        return (
            {},
            {},
            [
                Issue(
                    "source-without-weights",
                    SOURCE,
                    problem,
                    remedy="Save the model with save_pretrained, or name another folder",
                )
            ],
        )
    # Safetensors come first where a folder has both, as in transformers.
    if not has_safetensors:
        return _bin_tensors(folder)
    stored, issues = stored_tensors(folder)
    # Tensors of other formats have no view: the checks refuse them by what is in ``stored``.
    floats = {name: it for name, it in stored.items() if it.dtype in FORMATS}
    return stored, {name: replace(mapped(it), streamed=streamed.get(it.file)) for name, it in floats.items()}, issues


def mapped(stored: StoredTensor) -> View:
    """A tensor of a safetensors file."""
    return View(stored.file, stored.dtype, stored.shape, contiguous_strides(stored.shape), stored.begin)


def _bin_tensors(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, View], list[Issue]]:
    stored: dict[str, StoredTensor] = {}
    views: dict[str, View] = {}
    issues: list[Issue] = []
    try:
        files = _bin_files(folder)
    except ConversionError as error:
        return {}, {}, list(error.issues) or [Issue("bin-file-list-invalid", SOURCE, str(error))]
    for path in files:
        try:
            held = read_torch_file(path)
        except ConversionError as error:
            # The other files are read all the same, so that one call reports every issue.
            issues.append(Issue("bin-file-unreadable", SOURCE, str(error)))
            continue
        for name, entry in _state(held).items():
            if name in stored:
                issues.append(
                    Issue(
                        "bin-tensor-repeated",
                        SOURCE,
                        f"{name} is in several files: {stored[name].file.name}, {path.name}",
                    )
                )
            stored[name] = _as_stored(path, entry)
            if isinstance(entry, View):
                views[name] = entry
    return stored, views, issues


def _state(held: Any) -> dict[str, View | OtherTensor]:
    # Anything but a dict holds no tensors by name: the checks report all of them as missing.
    if not isinstance(held, dict):
        return {}
    return {str(name): it for name, it in held.items() if isinstance(it, View | OtherTensor)}


def _as_stored(path: Path, entry: View | OtherTensor) -> StoredTensor:
    if isinstance(entry, View):
        return StoredTensor(path, entry.dtype, entry.shape, entry.offset, entry.offset + entry.size)
    return StoredTensor(path, entry.storage, entry.shape, 0, 0)


def _bin_files(folder: Path) -> list[Path]:
    """The files that the index names, or the single one. Raises ``ConversionError``."""
    index, single = folder / BIN_INDEX, folder / BIN_FILE
    if not index.is_file():
        return [single]
    if single.is_file():
        problem = f"{folder} holds {BIN_FILE} beside {BIN_INDEX}: two sets of weights"
        raise ConversionRefused(
            [Issue("bin-weights-ambiguous", SOURCE, problem, remedy="Remove the one that is not meant")]
        )
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return _existing(folder, sorted({str(it) for it in names.values()}), index)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionRefused(
            [Issue("bin-index-invalid", SOURCE, f"{index} is not a usable index ({error})")]
        ) from None


def _existing(folder: Path, names: Sequence[str], index: Path) -> list[Path]:
    # The index comes with the weights and is not trusted: no name may lead out of the folder.
    files = [path_below(folder, name, origin=str(index)) for name in names]
    if missing := [path.name for path in files if not path.is_file()]:
        problem = f"{index.name} names files that are missing: {', '.join(missing)}"
        raise ConversionRefused([Issue("bin-files-missing", SOURCE, problem, remedy="Fetch the whole folder again")])
    return files


def files_beside(folders: Iterable[Path]) -> dict[str, Path]:
    """Config, generation config and tokenizer files; the first folder that holds one counts."""
    found: dict[str, Path] = {}
    for folder in folders:
        for name in BESIDE:
            if (folder / name).is_file():
                found.setdefault(name, folder / name)
    return found


def clean_name(name: str) -> str:
    """``name`` as the bare model has it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == _LEADING:
        parts = parts[1:]
    return ".".join(parts)


def clean_names(entries: Mapping[str, _Entry], where: str) -> tuple[dict[str, _Entry], list[Issue]]:
    """The same entries under clean names, and an issue for every two that would get the same one."""
    origins: dict[str, list[str]] = {}
    for name in entries:
        origins.setdefault(clean_name(name), []).append(name)
    issues = [
        Issue(
            "tensor-names-collide",
            where,
            f"{' and '.join(names)} are the same tensor {name} without the names of wrappers",
            remedy=_ONE,
        )
        for name, names in origins.items()
        if len(names) > 1
    ]
    return {name: entries[names[0]] for name, names in origins.items()}, issues
