"""The transfer that suits a store, and the plain one: files through the store's own methods, a few at a time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from sm_llm.storage.uri import is_s3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sm_llm.storage.base import Copy, Progress, Store, StoredObject, Transfer


_Result = TypeVar("_Result")
_BATCH_BYTES = 8 << 30
# A batch has at least so many of both: enough to move at once, and for its verification to be worth a head start.
_BATCH_FILES = 16

_SETTLERS = 8


def default_transfer(store: Store) -> Transfer:
    """What moves files where nobody chose: the engines for S3, plain copies for everything else."""
    if not is_s3(store.uri):
        return CopyTransfer()
    # Imported here: the engines need the SDK, which an installation for folders alone may lack.
    from sm_llm.storage.engines.auto import EngineTransfer

    return EngineTransfer()


def download_and_settle(
    transfer: Transfer,
    store: Store,
    copies: Sequence[Copy],
    progress: Progress,
    settle: Callable[[Copy, str | None], bool],
) -> list[Copy]:
    """Download; while a batch of files comes, those of the batch before are settled (verified and named) in threads.

    ``settle`` is given a copy and the checksum known by then, if any; returns the copies that it refused.
    Raises what ``transfer`` or ``settle`` raises; what had arrived before that is settled all the same, as far as it
    had begun.
    """
    pool = ThreadPoolExecutor(_SETTLERS, thread_name_prefix="settle")
    settled: list[tuple[Copy, Future[bool]]] = []
    try:
        for batch in _batches(copies):
            reported = transfer.download(store, batch, progress)
            settled += [(copy, pool.submit(settle, copy, reported.get(copy.key))) for copy in batch]
        return [copy for copy, future in settled if not future.result()]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    batch: list[Copy] = []
    size = 0
    for copy in copies:
        batch.append(copy)
        size += copy.size
        if size >= _BATCH_BYTES and len(batch) >= _BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class CopyTransfer:
    """Moves files with ``put_file`` and ``get_file`` in ``workers`` threads; the first error is the one raised."""

    name = "copy"

    def __init__(self, workers: int = 4) -> None:
        self._workers = workers

    def download(self, store: Store, copies: Sequence[Copy], progress: Progress) -> dict[str, str]:
        def fetch(copy: Copy) -> None:
            store.get_file(copy.key, copy.path)
            progress(copy.size)

        self._each(fetch, copies)
        return {}

    def upload(self, store: Store, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        def send(copy: Copy) -> StoredObject:
            stored = store.put_file(copy.path, copy.key)
            progress(copy.size)
            return stored

        return self._each(send, copies)

    def _each(self, move: Callable[[Copy], _Result], copies: Sequence[Copy]) -> list[_Result]:
        if self._workers == 1 or len(copies) < 2:
            return [move(copy) for copy in copies]
        with ThreadPoolExecutor(min(self._workers, len(copies)), thread_name_prefix="transfer") as pool:
            futures = [pool.submit(move, copy) for copy in copies]
            try:
                return [future.result() for future in futures]
            except BaseException:
                # Leaving the block waits for the copies that have begun; this only keeps the others from beginning.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
