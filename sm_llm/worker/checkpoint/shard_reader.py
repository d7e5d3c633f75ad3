"""DCP's reader, with its metadata read as data: a checkpoint of somebody else's must not be able to run code."""

from __future__ import annotations

import io
import pickle
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from sm_llm.contract.dcp_metadata import CLASSES, DTYPES, FUNCTIONS, SIZE
from sm_llm.convert.files.pickle_check import MOST_BYTES, require_harmless
from sm_llm.errors import CheckpointError
from sm_llm.file_names import name_problem
from sm_llm.worker.unpickling import CarefulUnpickler

if TYPE_CHECKING:
    from io import IOBase
    from typing import IO


class _MetadataUnpickler(CarefulUnpickler):
    """Knows the classes of DCP's metadata alone."""

    def known(self, module: str, name: str) -> Any:
        # Names, not what is behind them: nothing is imported that is not listed.
        if (module, name) in {*CLASSES, *FUNCTIONS, SIZE} or (module == "torch" and name in DTYPES):
            return getattr(import_module(module), name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not part of a checkpoint's metadata")


def load_metadata(stream: IO[bytes] | IOBase, name: str) -> Metadata:
    """The metadata of a save. Raises ``CheckpointError`` for anything else, without having run any of it.

    Every entry must be a tensor: DCP opens other entries with an unrestricted unpickler. Every file must have a name
    below the checkpoint's folder.
    """
    try:
        # One byte more than is allowed is enough to see that it is too long.
        body = cast("IO[bytes]", stream).read(MOST_BYTES + 1)
        require_harmless(body)
        metadata = _MetadataUnpickler(io.BytesIO(body)).load()
    except Exception as error:  # a pickle that is damaged on purpose can raise anything
        raise CheckpointError(f"{name}: is not the metadata of a checkpoint: {error}") from error
    if problem := _problem(metadata):
        raise CheckpointError(f"{name}: is not the metadata of a checkpoint of this project: {problem}")
    assert isinstance(metadata, Metadata)
    return metadata


def _problem(metadata: object) -> str:
    # Exact types here and below: a subclass could bring its own behaviour.
    if type(metadata) is not Metadata:
        return f"it holds a {type(metadata).__name__}"
    entries, locations = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(entries, dict) or not isinstance(locations, dict):
        return "its tables are missing"
    for key, entry in entries.items():
        if not isinstance(key, str):
            return f"a name is a {type(key).__name__}"
        if type(entry) is not TensorStorageMetadata:
            return f"{key!r} is a {type(entry).__name__}, expected a tensor"
    for info in locations.values():
        path = getattr(info, "relative_path", None)
        if not isinstance(path, str):
            return f"a tensor lies in a {type(path).__name__}"
        # DCP joins it to the folder: ``../`` would read a file elsewhere.
        if "/" in path or name_problem(path):
            return f"a tensor lies in {path!r}, expected the name of a file beside it"
        if getattr(info, "transform_descriptors", None):
            return f"{path} was written through an extension"
    return ""


class ShardReader(FileSystemReader):
    """Reads what ``ShardWriter`` wrote, and its metadata but once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises ``CheckpointError`` for metadata that ``load_metadata`` refuses."""
        metadata = self._metadata
        # As torch's own ``read_metadata`` does, which this one replaces.
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @cached_property
    def _metadata(self) -> Metadata:
        path = self._get_metadata_path()
        with self.fs.create_stream(path, "rb") as stream:
            return load_metadata(stream, str(path))
