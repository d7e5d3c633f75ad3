"""The transfer that suits a store, and the plain one: files through the store's own methods, a few at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.storage.base import Copy, Progress, Store, StoredObject, Transfer

_Result = TypeVar("_Result")


def default_transfer(store: Store) -> Transfer:
    """What moves files where nobody chose: the engines for S3, plain copies for everything else."""
    if not store.uri.startswith("s3://"):
        return CopyTransfer()
    from sm_llm.storage.engines.auto import EngineTransfer

    return EngineTransfer()


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
                pool.shutdown(wait=False, cancel_futures=True)
                raise
