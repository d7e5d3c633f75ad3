"""All-gather between processes that have no process group of torch's: over the notes that torchrun keeps."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sm_llm.errors import RunFailed
from sm_llm.worker.runtime.message import decode, encode
from sm_llm.worker.supervision.failure_report import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.runtime.key_value_store import KeyValueStore

TIMEOUT_SECONDS = 2 * 3600.0
_POLL_SECONDS = 0.1


class StoreAllGather:
    """A ``Gather`` among ``count`` processes, of which this is number ``index``; without a board there is but one.

    Every process calls it equally often, from one thread. Threads need gatherings of different names. Waiting ends
    with ``RunFailed`` once a process of the job has failed, or after ``timeout`` seconds.
    """

    def __init__(
        self, kv_store: KeyValueStore | None, name: str, index: int, count: int, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self._kv_store = kv_store
        self._name = name
        self._index = index
        self._count = count
        self._timeout = timeout
        self._round = 0

    def __call__(self, value: Any, while_waiting: Callable[[], None] = lambda: None) -> list[Any]:
        """Every process's value, by number. A value is one that ``message.encode`` takes."""
        if self._kv_store is None or self._count == 1:
            return [value]
        # All processes call equally often, so the number names the same exchange everywhere.
        self._round += 1
        prefix = f"gather/{self._name}/{self._round}"
        self._kv_store.put(f"{prefix}/{self._index}", encode(value))
        notes = [f"{prefix}/{number}" for number in range(self._count)]
        return [decode(_awaited(self._kv_store, note, self._timeout, while_waiting)) for note in notes]


def leave_in_order(kv_store: KeyValueStore | None, process: ProcessInfo, seconds: float) -> None:
    """Wait until all processes are ready to end; the leader, whose host serves the notes, is last.

    Otherwise the store is gone while another process still reads what the last exchange brought or whether the job
    stops, and that process reports a failure. Waits ``seconds`` at most for each process, and for none of a job that
    has failed.
    """
    if kv_store is None or process.world_size == 1:
        return
    others = range(1, process.world_size)
    # Without an answer of the store there is nobody left to wait for.
    with suppress(RuntimeError, RunFailed):
        if process.is_leader:
            for rank in others:
                _awaited(kv_store, f"leave/ready/{rank}", seconds)
            kv_store.put("leave/all", "")
            for rank in others:
                _awaited(kv_store, f"leave/left/{rank}", seconds)
            return
        kv_store.put(f"leave/ready/{process.rank}", "")
        # Torchrun ends all processes of its node once one has stopped: none goes before all are ready.
        _awaited(kv_store, "leave/all", seconds)
        kv_store.put(f"leave/left/{process.rank}", "")


def _awaited(
    kv_store: KeyValueStore, note: str, seconds: float, while_waiting: Callable[[], None] = lambda: None
) -> str:
    deadline = time.monotonic() + seconds
    while (text := kv_store.get(note)) is None:
        # Asked in every turn: the note that is waited for may never come from a process that has failed.
        if kv_store.get(FAILED) is not None:
            raise RunFailed("another process is gone")
        if time.monotonic() > deadline:
            raise RunFailed(f"another process did not come within {seconds:.0f} s ({note})")
        while_waiting()
        time.sleep(_POLL_SECONDS)
    return text
