"""A run: what is read of it (the handle), what shows it, and the verbs of its life."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import RunFailed
from sm_llm.launcher.observe.follow import final_state
from sm_llm.launcher.run_handle import POLL_SECONDS, RunHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sm_llm.launcher.observe.status import Status
    from sm_llm.runs.run_states import RunState
    from sm_llm.spec.loading.overrides import Override


class Run(RunHandle):
    """A run by its address. Cheap to make; every method reads what is true at that moment.

    Methods raise ``StorageError`` when a run's storage does not answer.
    """

    @classmethod
    def of(cls, handle: RunHandle) -> Run:
        """The run of a handle, with what that has read; the storage is not asked again."""
        # Not by the constructor, which would read the record again.
        run = cls.__new__(cls)
        vars(run).update(vars(handle))
        return run

    def status(self) -> Status:
        """State, progress and result, from the record, the lock and the events."""
        from sm_llm.launcher.observe.status import status_of

        return status_of(self)

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        node: int | None = None,
        rank: int | None = None,
        pattern: str | None = None,
        attempt: int | None = None,
        raw: bool = False,
    ) -> Iterator[str]:
        """What the processes of an attempt (the newest) printed, line by line.

        Args:
            follow: continue until the run ends.
            tail: begin with the last so many lines of every node that match.
            node: only this node.
            rank: only this process.
            pattern: only lines in which this regular expression is found.
            attempt: another attempt than the newest.
            raw: lines as they were written, with their line endings and control sequences; what is not UTF-8 as
                ``surrogateescape`` writes it.
        """
        from sm_llm.launcher.observe.run_logs import log_filter, logs_of

        return logs_of(self, log_filter(tail, node, rank, pattern, raw=raw), follow=follow, attempt=attempt)

    def plot(self, path: str | Path | None = None) -> Path:
        """Write a PNG of loss, learning rate and throughput; by default ``plot.png`` in the run's folder."""
        from sm_llm.launcher.display.plot import plot_run

        target = Path(path) if path is not None else self.paths.plot
        return plot_run(self.job.events, target, title=self.id)

    def resume(self, *overrides: Override, step: int | None = None, **fields: Any) -> Run:
        """Continue an interrupted, stopped or failed run from its newest checkpoint, or from that of ``step``.

        With ``step`` the later checkpoints are rolled back: the run continues without them. ``overrides``
        change the specification from here on. Relative inputs stay those of the folder it was launched from.

        Raises:
            CheckpointError: there is no such checkpoint.
            SubmitError: the run is running or completed.
            SpecError, PlanError: the changes do not fit.
        """
        from sm_llm.launcher.lifecycle import resume

        return Run.of(resume(self, overrides, fields, step))

    def stop(self, *, now: bool = False, wait: bool = False) -> RunState:
        """Ask the run to stop after its current step, saving what it can; ``now`` kills it instead.

        ``wait`` returns only when it has ended. Raises ``SubmitError`` if it is not running.
        """
        from sm_llm.launcher.lifecycle import stop

        return stop(self, now=now, wait=wait)

    def finish(self) -> Run:
        """Publish the result of a run that did all its steps but ended before its result was published.

        Raises ``SubmitError`` if steps are left or the result is there already.
        """
        from sm_llm.launcher.lifecycle import finish

        return Run.of(finish(self))

    def rerun(self, *overrides: Override, **fields: Any) -> Run:
        """Repeat this run as a new one, from its record alone: the same specification, digest and input folders."""
        from sm_llm.launcher.lifecycle import rerun

        return Run.of(rerun(self, overrides, fields))

    def branch(self, *overrides: Override, step: int | None = None, **fields: Any) -> Run:
        """Begin a new run from this run's newest checkpoint, or from that of ``step``, which this run then keeps.

        Raises ``CheckpointError`` if there is no such checkpoint.
        """
        from sm_llm.launcher.lifecycle import branch

        return Run.of(branch(self, overrides, fields, step))

    def wait(self, *, poll: float | None = None, sleep: Callable[[float], None] = time.sleep) -> RunState:
        """Wait until the run has completed. Raises ``RunFailed`` with the reason if it ends in any other way."""
        # A poll of a run in S3 is a request, so its store asks for longer pauses than a folder does.
        state = final_state(self, poll or max(POLL_SECONDS, self.run_store.poll_seconds), sleep)
        if not state.is_completed:
            raise RunFailed(self.failure_message())
        return state

    def watch(self, *, since: float | None = None) -> RunState:
        """Show the run until it ends, without what happened before ``since`` (seconds since the epoch)."""
        from sm_llm.launcher.display.console import console
        from sm_llm.launcher.display.live import accompany

        return accompany(self, console(), wait=True, since=since)
