"""One background thread that runs an iterator a bounded number of items ahead of its consumer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""A thread stuck in a network read must not hold up the end of a job."""

_END: Any = object()


class Prefetcher(Generic[T]):
    """Iterates over ``source`` in a daemon thread, at most ``depth`` items ahead; an error is raised in the consumer.

    ``wait_seconds`` is how long the consumer has waited for items in all. ``close`` ends the thread and closes a
    generator that is the source.
    """

    def __init__(self, source: Iterator[T], depth: int = 2, name: str = "prefetch") -> None:
        self.wait_seconds = 0.0
        self._source = source
        self._items: queue.Queue[tuple[T, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._ended is not None:
            raise self._ended
        began = time.perf_counter()
        # No timeout: whatever ends the thread, its last item is the end or the error.
        item, self._ended = self._items.get()
        self.wait_seconds += time.perf_counter() - began
        if self._ended is not None:
            raise self._ended
        return item

    def close(self) -> None:
        """Stop the thread and wait for it, at most ``CLOSE_SECONDS``; what was fetched ahead is thrown away."""
        self._closed.set()
        # After ``close`` the consumer gets the end, not what is still in the queue.
        self._ended = self._ended or StopIteration()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._offer(item, None):
                    return
            self._offer(_END, StopIteration())
        except BaseException as error:  # whatever went wrong belongs to the consumer
            self._offer(_END, error)
        finally:
            # Here and not in ``close``: a generator that runs in one thread cannot be closed from another.
            if isinstance(self._source, Generator):
                self._source.close()

    def _offer(self, item: T, error: BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                # Wakes up to see ``close``: a consumer that left never makes room in the queue.
                self._items.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
