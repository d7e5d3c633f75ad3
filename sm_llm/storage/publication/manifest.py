"""Manifests: what a node stored (part) and what a publication consists of (commit), as self-checking JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sm_llm.file_names import name_problem, paths_problem
from sm_llm.storage.base import LARGEST_BYTES
from sm_llm.storage.checksum import crc64_bytes
from sm_llm.storage.publication.keys import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1
_SELF = "self_crc64nvme"


def _plain_path(path: str) -> str:
    if problem := name_problem(path):
        raise ValueError(f"{path!r} cannot be the path of a file: {problem}")
    return path


def _distinct(files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
    """No path twice, and none that is a folder of another: whoever fetches them would overwrite one."""
    if problem := paths_problem(it.path for it in files):
        raise ValueError(problem)
    return files


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class FileEntry(_Manifest):
    """One published file: ``path`` below the save's data folder, size in bytes, CRC64NVME as 16 hex digits."""

    path: Annotated[str, AfterValidator(_plain_path)]
    # Strict: otherwise ``true`` and ``"5"`` would pass for numbers.
    size: int = Field(ge=0, le=LARGEST_BYTES, strict=True)
    crc64nvme: str = Field(pattern=r"^[0-9a-f]{16}$")


class Save(_Manifest):
    """One save of one slot, the same on every process. ``save_id`` is drawn afresh by rank 0: no key is written twice.

    ``world_size`` counts processes, ``node_count`` the nodes that each bring one part.
    """

    run_id: str
    step: int | None = Field(ge=0, strict=True)
    """Optimiser steps done; None for the final result."""
    save_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    world_size: int = Field(ge=1, strict=True)
    node_count: int = Field(ge=1, strict=True)

    @property
    def slot(self) -> Slot:
        return Slot(self.step)

    @property
    def data_prefix(self) -> str:
        """Key prefix of the published files; it ends with "/"."""
        return self.slot.data_prefix(self.save_id)


class PartManifest(_Manifest):
    """What one node stored of a save."""

    version: int = VERSION
    save: Save
    node: int = Field(ge=0, strict=True)
    files: Annotated[tuple[FileEntry, ...], AfterValidator(_distinct)]


class CommitManifest(_Manifest):
    """A publication. It exists exactly when this object does. ``time`` is seconds since the epoch."""

    version: int = VERSION
    save: Save
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Drawn by the writer of this commit, who recognises it after a lost answer."""
    time: float = Field(ge=0, lt=1e11)
    files: Annotated[tuple[FileEntry, ...], Field(min_length=1), AfterValidator(_distinct)]
    meta: dict[str, Any] = Field(default_factory=dict)
    """Whatever a restore needs beyond files: degrees, library versions, data position, scheduler. A JSON value."""

    @property
    def run_id(self) -> str:
        return self.save.run_id

    @property
    def step(self) -> int | None:
        return self.save.step

    @property
    def save_id(self) -> str:
        return self.save.save_id

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def digest(self) -> str:
        """CRC64NVME over names, sizes and checksums: equal for equal contents, whoever published them."""
        # Sorted: nodes bring their parts in any order.
        listed = sorted((entry.path, entry.size, entry.crc64nvme) for entry in self.files)
        return crc64_bytes(json.dumps(listed).encode())


_AnyManifest = TypeVar("_AnyManifest", PartManifest, CommitManifest)


def encode(manifest: PartManifest | CommitManifest) -> bytes:
    """The stored form: readable JSON that carries a checksum of its own content.

    Raises ``ValueError`` or ``TypeError`` if ``meta`` is not a JSON value (NaN and infinity are not).
    """
    record = manifest.model_dump(mode="python")
    # A store may return half of an object, or one that was changed by hand; both must read as damage.
    record[_SELF] = _checksum(record)
    return (json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def decode(body: bytes, kind: type[_AnyManifest]) -> _AnyManifest:
    """Read a stored manifest. Raises ``ValueError`` with a one-line reason for anything that cannot be trusted."""
    try:
        return _decode(body, kind)
    # Bytes of a store are not trusted: json raises this for a list that is nested a thousand times.
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _decode(body: bytes, kind: type[_AnyManifest]) -> _AnyManifest:
    try:
        record = json.loads(body)
    except ValueError as error:
        raise ValueError(f"it is not whole JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    # The version comes first: another one may compute its checksum, and name its fields, in another way.
    if type(record.get("version")) is not int or record["version"] != VERSION:
        raise ValueError(f"its version {record.get('version')!r} is not known to this release (which writes {VERSION})")
    if record.pop(_SELF, None) != _checksum(record):
        raise ValueError("its content does not match its own checksum")
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _checksum(record: Mapping[str, Any]) -> str:
    # JSON text of a value read back from JSON is the same text: tuples have become lists, floats repeat exactly.
    return crc64_bytes(json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
