"""The doors of storage: a Store holds small control objects and finished files; a Transfer moves many files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StoredObject:
    """What a store knows of a key: size in bytes and ``crc64nvme`` (16 hex digits) where it is known."""

    key: str
    size: int
    crc64nvme: str | None = None


class Store(Protocol):
    """Objects under string keys below one root. Folders first; S3 is the same door.

    Every method raises ``StorageError`` when the storage does not answer; "not there" is a value, never an error.
    """

    uri: str

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Create ``key`` durably; False if it exists already. The only linearisation point of the protocol."""

    def get(self, key: str) -> bytes | None:
        """The body, or None if the key does not exist."""

    def put_file(self, source: Path, key: str) -> StoredObject:
        """Copy a local file to a key that was never written before, durably; returns what was stored, re-read."""

    def get_file(self, key: str, target: Path) -> None:
        """Copy an object to a local file (temporary name, fsync, rename)."""

    def head(self, key: str) -> StoredObject | None:
        """Size of a key, or None."""

    def list(self, prefix: str) -> list[StoredObject]:
        """Every object whose key starts with ``prefix``; a prefix that is a folder ends with "/"."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys; one that is gone already is fine."""


@dataclass(frozen=True)
class Copy:
    """One file to move: ``key`` in the store, ``path`` on local disk, expected ``size`` and ``crc64nvme``."""

    key: str
    path: Path
    size: int
    crc64nvme: str


class Transfer(Protocol):
    """Moves many files between a store and local disk; verification stays with the caller."""

    name: str

    def download(self, store: Store, copies: Sequence[Copy], progress: Callable[[int], None]) -> None:
        """Fetch every copy; ``progress`` gets byte increments."""

    def upload(self, store: Store, copies: Sequence[Copy], progress: Callable[[int], None]) -> None:
        """Store every copy."""
