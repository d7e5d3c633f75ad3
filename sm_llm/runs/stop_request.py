"""The object in a run's storage by which another machine asks an attempt to stop after its current step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.runs.run_paths import STOP_FILE
from sm_llm.storage.s3.swap import change

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.storage.s3_store import S3Store


def ask_to_stop(store: S3Store, attempt: int) -> None:
    """Raises ``StorageError`` if the store does not answer."""
    change(store, STOP_FILE, lambda _: _body(attempt))


def is_asked_to_stop(store: S3Store, attempt: int) -> bool:
    """Whether somebody has asked this attempt. Raises ``StorageError`` if the store does not answer."""
    return store.get(STOP_FILE) == _body(attempt)


def _body(attempt: int) -> bytes:
    # An old request stops no later attempt.
    return f"{attempt}\n".encode()


class StopRequest:
    """Checks for the request with ``is_asked(attempt)``, a run's own; ``on_asked`` is called once."""

    def __init__(self, is_asked: Callable[[int], bool], attempt: int, on_asked: Callable[[], None]) -> None:
        self._ask = is_asked
        self._attempt = attempt
        self._on_asked = on_asked
        self._is_asked = False

    def poll(self) -> None:
        """Raises ``StorageError`` if the store does not answer."""
        if not self._is_asked and self._ask(self._attempt):
            self._is_asked = True
            self._on_asked()
