"""The job's own watch over its time limit: a stop in order, before the platform ends everything.

At the limit SageMaker, for one, sends SIGTERM to the container's first process, the toolkit, which passes it on to
nobody. The service counts from when it has the instances, so downloading inputs is part of it; this process cannot see
when that was, and leaves time for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.worker.context import WorkerContext


def start_time_limit(
    context: WorkerContext, timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer
) -> None:
    """Ask for a stop before the backend's time limit, if it has one."""
    backend = context.job.spec.backend
    if (until_stop := backend.seconds_until_stop) is None:
        return
    watch = timer(until_stop, lambda: context.requests.warn(f"the time limit of {backend.time_limit}, soon reached"))
    # A job that ends earlier must not wait for its limit.
    watch.daemon = True
    watch.start()
