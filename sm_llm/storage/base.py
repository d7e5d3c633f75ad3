"""The interfaces of storage: a Store holds small control objects and finished files; a Transfer moves many files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sm_llm.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path


class MissingObjectError(StorageError):
    """A key that was asked for does not exist: proof that an object is gone, unlike any other storage error."""


class TooLargeError(StorageError):
    """An object is larger than anything of its kind that is read into memory: it cannot be what its key names."""


class WrongContentError(StorageError):
    """What arrives has another size than an object, or another checksum than the store names: it is not that object."""


LARGEST_BYTES = 1 << 46
"""No object is larger (Amazon S3 User Guide, "Uploading objects": 50 TB); a size beyond it is nonsense."""
SMALL_BYTES = 64 << 20
"""Size of the largest object that ``Store.get`` reads: records, manifests and segments of logs are far smaller."""


@dataclass(frozen=True)
class StoredObject:
    """What a store knows of a key.

    ``size`` in bytes, ``crc64nvme`` (16 hex digits) where it is known, ``modified`` in seconds since the epoch by
    the store's own clock where it is known, ``tag`` whatever changes when the object does (S3's entity tag), ``md5``
    where the store is known to keep it.
    """

    key: str
    size: int
    crc64nvme: str | None = None
    modified: float | None = None
    tag: str | None = None
    md5: str | None = None


class Store(Protocol):
    """Objects under string keys below one root. Folders and S3 behave the same.

    Every method raises ``StorageError`` when the storage does not answer; "not there" is a value, never an error
    (except for ``get_file`` and ``checksum``, which raise ``MissingObjectError``).
    """

    uri: str

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Create ``key`` durably; False if it exists already. The only linearisation point of the protocol."""

    def get(self, key: str) -> bytes | None:
        """The body, or None if the key does not exist. Raises ``TooLargeError`` above ``SMALL_BYTES``."""

    def put_file(self, source: Path, key: str) -> StoredObject:
        """Copy a local file to a key that was never written before, durably; returns what was stored, re-read."""

    def get_file(self, key: str, target: Path) -> None:
        """Copy an object to a local file (temporary name, fsync, rename)."""

    def head(self, key: str) -> StoredObject | None:
        """Size of a key, or None."""

    def checksum(self, key: str) -> str:
        """CRC64NVME of the bytes the store holds now, as 16 hex digits."""

    def list(self, prefix: str) -> list[StoredObject]:
        """Every object whose key starts with ``prefix``, by key; a prefix that is a folder ends with "/"."""

    def holds(self, prefix: str = "") -> bool:
        """Whether any key starts with ``prefix``; a folder's own entry is no key."""

    def first(self, count: int) -> tuple[Sequence[StoredObject], bool]:
        """At most ``count`` objects, and whether these are all."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys; one that is gone already is fine."""

    def abort_unfinished(self, before: float, prefix: str = "") -> int:
        """Remove what killed writers left below ``prefix`` before a time of the store's clock: parts nobody can see."""


@dataclass(frozen=True)
class Copy:
    """One file to move: ``key`` in the store, ``path`` on local disk, ``size`` and ``crc64nvme`` it must have.

    The checksum is empty where nobody knows it before a download.
    """

    key: str
    path: Path
    size: int
    crc64nvme: str


Progress = Callable[[int], None]
"""Called with byte increments, possibly from several threads; a negative one subtracts bytes that come again."""


class Transfer(Protocol):
    """Moves many files between a store and local disk; comparing the result with ``Copy`` stays with the caller."""

    name: str

    def download(self, store: Store, copies: Sequence[Copy], progress: Progress) -> dict[str, str]:
        """Fetch every copy to its path; raises ``MissingObjectError`` or ``StorageError`` for the first that fails.

        Returns, by key, the checksums the store returned on the way, as far as it did.
        """

    def upload(self, store: Store, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        """Store every copy; returns, in the same order, what the store holds now, with its checksum."""


Gather = Callable[[Any], Sequence[Any]]
"""All-gather of one small picklable value per process over the job's own channel, by rank; every process calls it."""
