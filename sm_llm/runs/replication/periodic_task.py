"""A thread that does small duties at a store every few seconds and never disturbs whoever started it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROUND_SECONDS = 3.0
CLOSE_SECONDS = 30.0
"""How long the end waits for a store that does not answer."""


class PeriodicTask:
    """Runs ``duties`` periodically. A failure is reported once, and so is its end; nothing is raised.

    ``last`` is done after the last round, and tried again until it succeeds or ``close`` has waited long enough.
    ``what`` names what is stored, in words.
    """

    def __init__(
        self,
        duties: Sequence[Callable[[], None]],
        report: Callable[[str], None],
        *,
        last: Callable[[], None] = lambda: None,
        what: str = "events and logs",
        round_seconds: float = ROUND_SECONDS,
    ) -> None:
        self._duties = duties
        self._report = report
        self._last = last
        self._what = what
        self._round_seconds = round_seconds
        self._is_failing = False
        self._working = threading.Lock()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="periodic-task", daemon=True)

    def start(self) -> Self:
        """Begin; the first round comes after one pause."""
        self._thread.start()
        return self

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While this lasts the thread waits and does nothing: this process can be forked."""
        with self._working:
            yield

    def hurry(self) -> None:
        """Do the duties once, in the calling thread. Never raises."""
        self._try(*self._duties)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End after ``last``; wait at most ``seconds``. Once is enough, more do no harm."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._closing.set()
        self._thread.join(max(0.0, self._deadline - time.monotonic()))

    def _run(self) -> None:
        # An event and no sleep, so that ``close`` ends a pause at once.
        while not self._closing.wait(self._round_seconds):
            self._try(*self._duties)
        while not self._try(self._last) and time.monotonic() < self._deadline:
            time.sleep(min(1.0, self._round_seconds))

    def _try(self, *duties: Callable[[], None]) -> bool:
        """Every duty once; whether all went well."""
        problems = []
        for duty in duties:
            try:
                # Held for one duty at a time, so that ``quiet`` waits for one at most.
                with self._working:
                    duty()
            except Exception as error:  # a store can fail in every way, and training continues all the same
                problems.append(error)
        if problems and not self._is_failing:
            self._report(f"the run's storage does not take {self._what}: {problems[0]}")
        elif not problems and self._is_failing:
            self._report(f"the run's storage answers again and takes {self._what}")
        self._is_failing = bool(problems)
        return not problems
