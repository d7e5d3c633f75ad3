"""A Store in S3: its objects, and whole files that the engines move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.storage.arrival import journal_of
from sm_llm.storage.base import Copy, StoredObject
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.engines.classic import ClassicTransfer
from sm_llm.storage.engines.ranges import RangesTransfer
from sm_llm.storage.files import fsync_path, temporary_name
from sm_llm.storage.s3.s3_objects import S3Objects

if TYPE_CHECKING:
    from pathlib import Path


class S3Store(S3Objects):
    """Objects below ``prefix`` of a bucket, and files of any size."""

    def put_file(self, source: Path, key: str) -> StoredObject:
        """Store a local file with its CRC64NVME, which S3 compares, and check what is stored."""
        try:
            copy = Copy(key, source, source.stat().st_size, crc64_file(source))
        except OSError as error:
            raise StorageError(f"{self.uri}: cannot read {source}: {error}") from error
        return ClassicTransfer().upload(self, [copy], lambda _: None)[0]

    def get_file(self, key: str, target: Path) -> None:
        """Fetch one object, verified, to its own name."""
        found = self.require(key)
        temporary = temporary_name(target)
        try:
            RangesTransfer().download(self, [Copy(key, temporary, found.size, found.crc64nvme or "")], lambda _: None)
            fsync_path(temporary)
            temporary.replace(target)
            fsync_path(target.parent)
        except OSError as error:
            raise StorageError(f"{self.uri}: cannot copy {key!r} to {target}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
            # The name is random, so no later call could continue from this journal.
            journal_of(temporary).unlink(missing_ok=True)
