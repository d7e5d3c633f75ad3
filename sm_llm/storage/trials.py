"""What publication needs of any store, as trials that raise ``StorageError`` for what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.checksum import crc64_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.storage.base import Store

BODY = b"sm_llm storage probe"


@dataclass(frozen=True)
class Trial:
    """One thing to try: what, how, and the IAM actions that it takes in S3."""

    name: str
    run: Callable[[], None]
    actions: tuple[str, ...]


class Trials:
    """The trials of one store, on objects whose keys begin with ``key``; the last one deletes them."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    def all(self) -> list[Trial]:
        """In the order in which they are run: later ones use what earlier ones created."""
        return [
            Trial("create an object", self._create, ("s3:PutObject",)),
            Trial("create it only once (conditional write)", self._create_again, ("s3:PutObject",)),
            Trial("read it", self._read, ("s3:GetObject",)),
            Trial("know its checksum", self._compare_checksum, ("s3:GetObject",)),
            Trial("list", self._list, ("s3:ListBucket",)),
            *self.own(),
            Trial("delete", lambda: self._store.delete(self.keys()), ("s3:DeleteObject",)),
        ]

    def own(self) -> list[Trial]:
        """What only this kind of store has to pass."""
        return []

    def keys(self) -> list[str]:
        """Every object that a trial may have created."""
        return [self._key]

    def checksum(self) -> str | None:
        """The checksum of the object, as publication compares it in this kind of store."""
        return self._store.checksum(self._key)

    def policy(self, actions: Sequence[str]) -> dict[str, Any] | None:
        """The IAM policy that would allow ``actions``; None where there are no policies."""
        return None

    def _create(self) -> None:
        if not self._store.put_if_absent(self._key, BODY):
            raise StorageError("a fresh name is reported to exist already")

    def _create_again(self) -> None:
        # Without an object to collide with, a second creation succeeds rightly and proves nothing.
        if self._store.get(self._key) is None:
            raise StorageError("could not be tried, for the object could not be created or read")
        if self._store.put_if_absent(self._key, b"another body"):
            raise StorageError(
                "this store overwrites what exists. It ignores If-None-Match, so two jobs could both win"
            )

    def _read(self) -> None:
        if (body := self._store.get(self._key)) != BODY:
            raise StorageError(f"read back {body!r} instead of {BODY!r}")

    def _compare_checksum(self) -> None:
        if (found := self.checksum()) != (wanted := crc64_bytes(BODY)):
            raise StorageError(f"it is returned as {found} instead of {wanted}: this store keeps no CRC64NVME")

    def _list(self) -> None:
        if self._key not in [it.key for it in self._store.list(self._key.partition("/")[0] + "/")]:
            raise StorageError("the object that was just created is not listed")
