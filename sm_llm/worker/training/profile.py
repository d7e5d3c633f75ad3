"""Traces of torch's profiler every so many steps, published beside the run while training continues."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from torch.profiler import profile

from sm_llm.errors import StorageError
from sm_llm.runs.events.checkpoints import ProfilePublished
from sm_llm.storage.uri import join

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.spec.training import ProfileSpec
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.device import Device


class Profiler:
    """Wraps every step in ``with profiler.of(step)``; without a specification that costs nothing.

    A trace that cannot be stored is reported, and the training continues.
    """

    def __init__(self, context: WorkerContext, spec: ProfileSpec | None, device: Device) -> None:
        wanted = spec is not None and (spec.all_processes or context.process.is_leader)
        self._spec = spec if wanted else None
        self._context = context
        self._device = device
        # One thread: traces are stored one after the other, while the training continues.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="profile")
        self._running: Any = None
        self._begun = self._last = 0

    def of(self, step: int) -> Self:
        """The context of a step, taken before it begins."""
        if self._spec is not None and self._running is None and step % self._spec.every_steps == 0:
            self._running = profile(activities=self._device.profiled(), record_shapes=True)
            self._running.__enter__()
            self._begun, self._last = step, step + self._spec.steps - 1
        self._step = step
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A failed step ends the trace as well, which is then not stored.
        if self._running is None or (kind is None and self._step < self._last):
            return
        running, self._running = self._running, None
        running.__exit__(None, None, None)
        if kind is None:
            self._publish(running)

    def _publish(self, running: Any) -> None:
        """Write the trace on this thread, which knows the profiler, and store it on another."""
        name = f"step-{self._begun:08d}-rank-{self._context.process.rank:05d}.json.gz"
        path = self._context.scratch / "profiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(path))
        key = f"profiles/attempt-{self._context.job.attempt}/{name}"
        self._thread.submit(self._store, path, key, self._begun)

    def _store(self, path: Path, key: str, step: int) -> None:
        context = self._context
        try:
            if context.store.head(key) is None:  # a step that is done again after a rollback has its trace already
                stored = context.store.put_file(path, key)
                context.emit(ProfilePublished(step, join(context.store.uri, key), stored.size))
        except (StorageError, OSError) as error:
            context.notice(f"the trace of step {step} was not stored: {error}", "warning")
        finally:
            path.unlink(missing_ok=True)

    def close(self, *, wait: bool) -> None:
        """End, once what was traced is stored, or at once."""
        self._thread.shutdown(wait=wait, cancel_futures=not wait)
