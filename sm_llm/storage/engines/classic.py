"""The engine that is always there: s3transfer's classic manager, with a bandwidth cap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.engines.common import Counter, DiskError, copy_errors, part_size, s3, stored, upload_arguments

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
                where.bucket, where.full_key(copy.key), str(copy.path), where.options.owner, [Counter(progress)]
            )

        self._each(where, copies, submit, "fetch")
        return {}

    def upload(self, store: Store, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        where = s3(store)

        def submit(manager: Any, copy: Copy) -> Any:
            arguments = upload_arguments(where, copy)
            key = where.full_key(copy.key)
            return manager.upload(str(copy.path), where.bucket, key, arguments, [Counter(progress)])

        self._each(where, copies, submit, "store")
        return [stored(where, copy) for copy in copies]

    def _each(self, store: S3Objects, copies: Sequence[Copy], submit: Any, action: str) -> None:
        from s3transfer.exceptions import RetriesExceededError
        from s3transfer.manager import TransferConfig, TransferManager

        chunk = part_size(max((copy.size for copy in copies), default=0))
        config = TransferConfig(multipart_chunksize=chunk, multipart_threshold=chunk, max_bandwidth=self._max_bandwidth)
        # Leaving the block by any error, an interruption too, cancels what runs and aborts its uploads.
        with TransferManager(store.client, config) as manager:
            futures = [(copy, submit(manager, copy)) for copy in copies]
            for copy, future in futures:
                with copy_errors(store, action, copy):
                    try:
                        future.result()
                    except RetriesExceededError as error:
                        problem = f"{store.uri}: cannot {action} {copy.key!r}: {error.last_exception}"
                        raise StorageError(problem) from error
                    # The SDK wraps errors of the connection, so what is left is the local disk's.
                    except OSError as error:
                        raise DiskError(f"{store.uri}: cannot {action} {copy.key!r} ({copy.path}): {error}") from error
