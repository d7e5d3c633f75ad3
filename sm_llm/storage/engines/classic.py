"""The engine that is always there: s3transfer's classic manager, with a bandwidth cap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.base import MissingObjectError
from sm_llm.storage.engines.common import DiskError, part_size, s3, stored, upload_arguments
from sm_llm.storage.s3.s3_client import code_of, s3_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.storage.base import Copy, Progress, Store, StoredObject
    from sm_llm.storage.s3.s3_objects import S3Objects


class ClassicTransfer:
    """``boto3``: threads in this process. ``max_bandwidth`` in bytes per second."""

    name = "boto3"

    def __init__(self, max_bandwidth: int | None = None) -> None:
        self._max_bandwidth = max_bandwidth

    def download(self, store: Store, copies: Sequence[Copy], progress: Progress) -> dict[str, str]:
        where = s3(store)

        def submit(manager: Any, copy: Copy) -> Any:
            copy.path.parent.mkdir(parents=True, exist_ok=True)
            return manager.download(
                where.bucket, where.full_key(copy.key), str(copy.path), where.options.owner, [_Counter(progress)]
            )

        self._each(where, copies, submit, "fetch")
        return {}

    def upload(self, store: Store, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        where = s3(store)

        def submit(manager: Any, copy: Copy) -> Any:
            arguments = upload_arguments(where, copy)
            key = where.full_key(copy.key)
            return manager.upload(str(copy.path), where.bucket, key, arguments, [_Counter(progress)])

        self._each(where, copies, submit, "store")
        return [stored(where, copy) for copy in copies]

    def _each(self, store: S3Objects, copies: Sequence[Copy], submit: Any, action: str) -> None:
        from botocore.exceptions import ClientError
        from s3transfer.exceptions import RetriesExceededError
        from s3transfer.manager import TransferConfig, TransferManager

        permission = "GetObject" if action == "fetch" else "PutObject"
        chunk = part_size(max((copy.size for copy in copies), default=0))
        config = TransferConfig(multipart_chunksize=chunk, multipart_threshold=chunk, max_bandwidth=self._max_bandwidth)
        # Leaving the block by any error, an interruption too, cancels what runs and aborts its uploads.
        with TransferManager(store.client, config) as manager:
            futures = [(copy, submit(manager, copy)) for copy in copies]
            for copy, future in futures:
                with s3_errors(store.uri, action, copy.key, store.needs(permission)):
                    try:
                        future.result()
                    except ClientError as error:
                        if action == "fetch" and code_of(error) in ("NoSuchKey", "404"):
                            raise MissingObjectError(f"{store.uri}: {copy.key!r} does not exist") from error
                        raise
                    except RetriesExceededError as error:
                        problem = f"{store.uri}: cannot {action} {copy.key!r}: {error.last_exception}"
                        raise StorageError(problem) from error
                    # The SDK wraps errors of the connection, so what is left is the local disk's.
                    except OSError as error:
                        raise DiskError(f"{store.uri}: cannot {action} {copy.key!r} ({copy.path}): {error}") from error


class _Counter:
    """An s3transfer subscriber that hands increments on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_queued(self, future: Any, **_: Any) -> None:
        """Nothing has moved yet."""

    def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
        self._progress(bytes_transferred)

    def on_done(self, future: Any, **_: Any) -> None:
        """The future holds the outcome."""
