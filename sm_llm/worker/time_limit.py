"""The job's own watch over SageMaker's time limit: a stop in order, before the service ends everything.

At the limit SageMaker sends SIGTERM to the container's first process, the toolkit, which passes it on to nobody. The
service counts from when it has the instances, so downloading inputs is part of it; this process cannot see when that
was, and leaves room for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sm_llm.spec.backends import SageMakerBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.worker.context import WorkerContext

_DOWNLOAD_SHARE = 0.05
_DOWNLOAD_SECONDS = 600.0
"""Room for what was counted before this process began: a share of the limit, and so much at most."""


def seconds_until_stop(limit: float, stop_seconds: float) -> float:
    """When to ask for a stop, in seconds from the start of the process: early enough to save and publish, but never
    in the first half of the limit."""
    room = stop_seconds + min(_DOWNLOAD_SECONDS, _DOWNLOAD_SHARE * limit)
    return max(limit - room, limit / 2)


def start_time_limit(
    context: WorkerContext, timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer
) -> None:
    """Ask for a stop before the backend's time limit, if it has one."""
    backend = context.job.spec.backend
    if not isinstance(backend, SageMakerBackend) or backend.max_run_seconds is None:
        return
    limit = backend.max_run_seconds
    watch = timer(
        seconds_until_stop(limit, backend.stop_seconds),
        lambda: context.requests.warn(f"the time limit of {limit:,} s (backend.max_run_seconds), soon reached"),
    )
    watch.daemon = True
    watch.start()
