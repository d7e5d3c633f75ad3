"""Saves training state without stopping training: staged in memory, written, sealed and published in the background."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.runs.events.checkpoints import CheckpointPublished
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.uri import join
from sm_llm.worker.checkpoint.save_writer import SaveJob, SaveWriter, StagedState
from sm_llm.worker.checkpoint.staging import Staging
from sm_llm.worker.publishing.checkpoint_age import CheckpointAge
from sm_llm.worker.publishing.publisher import Publisher
from sm_llm.worker.runtime.collectives import ControlGroup

if TYPE_CHECKING:
    from sm_llm.spec.training import CheckpointSpec
    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.publish import CommitResult
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.device import Device
    from sm_llm.worker.publishing.publisher import Sealed
    from sm_llm.worker.strategies.base import CheckpointLibrary

PUBLICATION_TIMEOUT = timedelta(hours=2)
"""How long the slowest node may take to store its part before the others give the job up."""
_COPIES = 2
"""States on the host at a time: one that is being written, and the next one."""
# How much later than another process this one learns what went wrong in the background.
_ECHO_SECONDS = 10.0


class Checkpointer:
    """One save is written while an older one is published and one waits. Copies to host memory run beside the loop.

    ``save``, ``check`` and ``finish`` are collectives. A store that is slow or fails does not stop training: newer
    saves replace the one that waits, an alarm reports the age of the last published one, and only when the oldest
    unpublished save has waited ``max_unpublished_seconds`` it is an error. What goes wrong on the node itself, a full
    disk above all, is raised at the next save.
    """

    def __init__(
        self,
        context: WorkerContext,
        store: Store,
        spec: CheckpointSpec,
        control: ControlGroup,
        device: Device,
        library: CheckpointLibrary | None = None,
    ) -> None:
        """``library`` writes a save's files in the thread that trains, which waits for it."""
        self._context = context
        self._library = library
        self._store = store
        self._spec = spec
        self._control = control
        self._checkpoint_age = CheckpointAge()
        # Collectives of different threads must never cross each other: each has a control group of its own.
        self._publisher = Publisher(
            context,
            store,
            ControlGroup(PUBLICATION_TIMEOUT),
            self._checkpoint_age,
            spec.max_unpublished_seconds,
            self._announce,
        )
        self._writer = SaveWriter(context, ControlGroup(PUBLICATION_TIMEOUT), self._publisher)
        copies = _COPIES if spec.async_save else 1
        self._staging = Staging(device, processes=context.process.local_world_size, copies=copies)
        self._writes: deque[Future[Sealed]] = deque(maxlen=_COPIES)
        self._protected: set[int] = set()
        self._last_saved: int | None = None
        self._deadline: float | None = None

    @property
    def expected_seconds(self) -> float | None:
        """How long it would take to save now, from experience: saves in flight come first. None without any."""
        if self._writer.seconds is None or self._publisher.seconds is None:
            return None
        writes = 1 + sum(not it.done() for it in self._writes)
        seconds = writes * self._writer.seconds + self._publisher.seconds
        return seconds + (self._publisher.seconds if self._publisher.is_busy else 0.0)

    @property
    def published_step(self) -> int | None:
        """The newest step that is safe, as far as this attempt knows."""
        return self._checkpoint_age.step

    def protect(self, step: int) -> None:
        """Never collect the checkpoint of this step (the one that training continued from)."""
        self._protected.add(step)
        self._last_saved = step
        self._checkpoint_age.begin(step)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        private: dict[str, Any],
        meta: dict[str, Any],
        *,
        required: bool = False,
        waits: bool = False,
    ) -> float:
        """Begin a save of ``step``; returns the seconds the loop was blocked.

        ``state`` are the live tensors by name, ``private`` this rank's JSON, ``meta`` goes into the commit. While there
        is no memory for another copy after ``max_blocking_seconds``, since earlier saves are still being written, this
        one is skipped with a warning, unless it is ``required``. One that ``waits`` is published when this returns,
        which raises what goes wrong. A step is saved at most once.
        """
        began = time.perf_counter()
        # The last step can be due twice: by its interval, and as the end or stop. One slot has one commit.
        if step == self._last_saved:
            self.finish()
            return time.perf_counter() - began
        self.check()
        if not self._make_room(required):
            self._context.notice(f"checkpoint of step {step} skipped: an earlier one is still being written", "warning")
            return time.perf_counter() - began
        process = self._context.process
        save = self._control.broadcast(
            publication.new_save(
                self._context.job.run_id, step, world_size=process.world_size, node_count=process.node_count
            )
        )
        # From here on the save counts as unpublished, however far it comes.
        self._checkpoint_age.saved(step)
        content = (
            self._writer.write_now(save, self._library) if self._library else StagedState(*self._staging.stage(state))
        )
        # From here on training continues: ``hold`` lets its next change come after the copies, which the writer reads.
        waits = waits or not self._spec.async_save
        blocked = None if waits else time.perf_counter() - began
        self._last_saved = step
        self._writes.append(self._writer.submit(SaveJob(save, content, private, meta, began, blocked)))
        if waits and not self._wait(None if required else self._spec.max_blocking_seconds):
            self._context.notice(f"checkpoint of step {step}: is not published yet", "warning")
        return time.perf_counter() - began

    def prepare(self, state: dict[str, Any]) -> None:
        """Make the host buffers of later saves of ``state``, in the background."""
        if self._library is None:
            self._staging.prepare(state)

    def hold(self) -> None:
        """Called before the state changes: it does so after the copies that a save has begun. Waits for nothing."""
        self._staging.hold()

    def check(self) -> None:
        """Raise, on all processes, what went wrong for good. Reports when publication is late. A collective."""
        if (alarm := self._checkpoint_age.late()) is not None:
            self._context.emit(alarm)
        if not self._control.any(self._failure is not None):
            return
        # Threads of the other processes learn of a failure moments later. This process's own error explains more than
        # "another process failed", so it is worth a short wait.
        deadline = time.monotonic() + _ECHO_SECONDS
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        raise self._failure or CheckpointError("another process could not save its checkpoint")

    @property
    def _failure(self) -> BaseException | None:
        failures = (it.exception() for it in self._writes if it.done())
        return next(filter(None, failures), self._publisher.failure)

    @property
    def alarm(self) -> str:
        """For the training line, on the leader: the last published step and its age, if that is too old; else empty."""
        return self._checkpoint_age.sentence

    def hurry(self, seconds: float | None) -> None:
        """Wait no longer than this from now on, for anything (None: as long as it takes)."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def finish(self) -> bool:
        """Wait until everything is published; raises what goes wrong. A collective; False only after ``hurry``.

        Then what still runs is broken off: the store holds the old state or the new one, and the transfer agents
        abort their uploads before they end.
        """
        done = self._wait(None)
        if not done:
            self._publisher.end_soon()
            self._context.agent.end()
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publish what is left, unless training failed: then other ranks may never join the collectives."""
        # In an error only this process comes here, so no collective may follow.
        if kind is None:
            self.finish()
        self._writer.close(wait=kind is None)
        self._publisher.close(wait=kind is None)

    def _make_room(self, required: bool) -> bool:
        """Wait until the buffers of this save are free, within the bound; all ranks get the same answer."""
        # A save that is being written reads those that it was copied to; what a library writes, it writes one by one.
        copies = self._staging.copies if self._library is None else 1
        before = list(self._writes)[-copies:]
        unfinished = [before[0]] if len(before) == copies else []
        if self._control.any(bool(wait_for(unfinished, None if required else self._spec.max_blocking_seconds)[1])):
            return False
        self.check()
        return True

    def _wait(self, seconds: float | None) -> bool:
        """Whether the newest save is published, on all processes, within so many seconds and the time there is."""
        limits = [time.monotonic() + seconds] if seconds is not None else []
        limits += [self._deadline] if self._deadline is not None else []
        deadline = min(limits, default=None)
        if not self._writes:
            return True
        # Only words an alarm: whether training continues or waits.
        self._publisher.is_awaited = True
        done = all(_is_over(it, deadline) for it in self._writes)
        self._publisher.is_awaited = False
        if done:
            # Raises what a publication ended with. A save that a newer one replaced ends with None.
            for write in self._writes:
                write.result().done.result()
        # Without a deadline every process waits to the end, and there is nothing to agree on. All have one or none.
        return deadline is None or not self._control.any(not done)

    def _announce(self, sealed: Sealed, published: CommitResult) -> None:
        """Publication thread, on all processes: report how it ended, and delete what is not to be kept."""
        step, commit, is_leader = sealed.save.step, published.commit, self._context.process.is_leader
        assert step is not None
        if not published.won or commit is None:
            self._context.notice(f"checkpoint of step {step} dropped: {published.reason}", "warning")
        if commit is None or commit.run_id != self._context.job.run_id:
            return
        # Also where another attempt won: its commit holds this step of this run, which is safe then.
        left_out = self._checkpoint_age.published(step)
        if is_leader and published.won:
            seconds = time.perf_counter() - sealed.began
            blocked = seconds if sealed.blocked_seconds is None else sealed.blocked_seconds
            uri = join(self._store.uri, sealed.save.slot.commit_key)
            self._context.emit(CheckpointPublished(step, uri, commit.size, seconds, blocked, left_out))
            self._context.log(
                f"checkpoint step {step}: {commit.size / 2**20:.1f} MiB published in {seconds:.2f} s, "
                f"training waited {blocked:.3f} s"
            )
            self._collect()

    def _collect(self) -> None:
        """Delete what the policy does not keep. A failure leaves garbage, which the next collection finds."""
        try:
            publication.collect_garbage(
                self._store,
                run_id=self._context.job.run_id,
                keep_last=self._spec.keep_last,
                keep_every=self._spec.keep_every_steps,
                protect=self._protected,
            )
        except StorageError as error:
            self._context.notice(f"old checkpoints could not be deleted: {error}", "warning")


def _is_over(write: Future[Sealed], deadline: float | None) -> bool:
    """Wait until a save is published, or was not written, until ``deadline``."""
    return _is_done(write, deadline) and (write.exception() is not None or _is_done(write.result().done, deadline))


def _is_done(future: Future[Any], deadline: float | None) -> bool:
    """Wait for it until ``deadline``, by the monotonic clock."""
    wait_for([future], timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    return future.done()
