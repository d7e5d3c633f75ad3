"""The worker: job.json -> context -> inputs on this node -> task -> published result, or an end that is reported."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, cast

from sm_llm.contract.hosts import Hosts, await_host
from sm_llm.contract.job_file import STORE_SECRET_ENVIRONMENT
from sm_llm.errors import RunFailed
from sm_llm.parent import end_with_parent
from sm_llm.runs.run_lock import RunLock
from sm_llm.runs.run_states import EXIT_CODES, RunState
from sm_llm.runs.stopped import StopRecord
from sm_llm.spec.job import JobSpec
from sm_llm.spec.tasks import TASK_KINDS, PrecompileTask, ScriptTask, TrainTask
from sm_llm.worker.checkpoint.earlier import replace_finished
from sm_llm.worker.checkpoint.newest import newest_step
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.inputs.secrets import secrets_at_hand
from sm_llm.worker.inputs.stage_inputs import stage_inputs
from sm_llm.worker.process_info import ProcessInfo, container_paths
from sm_llm.worker.publishing.event_upload import upload_events
from sm_llm.worker.publishing.own_record import keep_record
from sm_llm.worker.runtime.imports import without_collections
from sm_llm.worker.runtime.stop import Stopping, leave
from sm_llm.worker.supervision import failure_report as failures
from sm_llm.worker.supervision.kernel_probe import probe_kernels
from sm_llm.worker.supervision.start_lines import start_lines
from sm_llm.worker.supervision.store_all_gather import leave_in_order
from sm_llm.worker.supervision.time_limit import start_time_limit
from sm_llm.worker.supervision.toolkit import is_child_of_toolkit, settle_environment, start_watch
from sm_llm.worker.trackers.experiment_trackers import forwarded_events

if TYPE_CHECKING:
    from sm_llm.runs.replication.periodic_task import PeriodicTask
    from sm_llm.spec.training import WatchdogSpec
    from sm_llm.worker.runtime.key_value_store import KeyValueStore

Task = Callable[[WorkerContext, JobSpec], None]


def program(kind: str) -> int:
    """What an entrypoint runs: ``main`` with its arguments, and this process is the job's own.

    It ends with its parent (or stops in order with the SageMaker toolkit), takes SIGTERM, SIGUSR1 and SIGINT for
    requests to stop, is watched, and ends at once when it fails: a thread that waits for a process which is gone would
    keep it alive.
    """
    if not is_child_of_toolkit(os.environ):
        end_with_parent()
    # A crash in a C library prints the Python stacks before the process dies.
    faulthandler.enable()
    code = main(kind, argv=sys.argv[1:], watched=True)
    # After an error threads may wait for processes that are gone: Python's own end would join them.
    if code != EXIT_CODES[RunState.COMPLETED]:
        leave(code)
    return code


def main(
    kind: str, environ: MutableMapping[str, str] = os.environ, argv: Sequence[str] = (), *, watched: bool = False
) -> int:
    """Run the job's task in this process; returns the exit code of ``runs.run_states``.

    A fault of the user, the data or the platform is reported in one line, anything else with its traceback. The node's
    ``output/failure`` holds the failure of the job's first failing process, ``output/stopped`` an orderly stop.
    ``watched`` takes over signals and starts the watchdog: only for a process that does nothing else.
    """
    frame = Frame(environ, argv)
    try:
        frame.work(kind, watched)
    except Stopping as stopping:
        return EXIT_CODES[stopping.record.state]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch has errors that are not an Exception
        frame.report_failure(error)
        return EXIT_CODES[RunState.FAILED]
    finally:
        # Last: the report of a failure is among the events.
        frame.upload_rest()
    return EXIT_CODES[RunState.COMPLETED]


class Frame:
    """What surrounds a task, also one that fails before it knows its job."""

    def __init__(self, environ: MutableMapping[str, str], argv: Sequence[str] = ()) -> None:
        self.environ = environ
        self.argv = argv
        self.context: WorkerContext | None = None
        self.kv_store: KeyValueStore | None = None
        self.periodic: PeriodicTask | None = None
        self.settle_kernels: Callable[[], None] = lambda: None
        self._reported = False

    def work(self, kind: str, watched: bool) -> None:
        """Run the task."""
        context = self.context = WorkerContext.read(self.environ, self.argv)
        # Before anything that can take long: from here on the run can be found, watched and stopped.
        keep_record(context, self.environ)
        self.periodic = upload_events(context, self.environ)
        if self.periodic is not None:
            context.upload_events = self.periodic.hurry
        # The import takes seconds to minutes, during which the log would be silent.
        if kind == "train" and "torch" not in sys.modules:
            context.notice("loads torch")
        if watched:
            context.requests.install(self.end_now)
            start_watch(context, self.environ)
            start_time_limit(context)
            if context.process.is_node_leader:
                failures.reserve_room(context.container.failure)
        # Held as long as this process lives: others see by it that the run is not dead.
        with RunLock(context.run.lock):
            try:
                # Before inputs are staged: a job that cannot run should not copy data first.
                _check(kind, context)
                _report_changes(context)
                replace_finished(context)
                # NCCL and gloo read their variables once, when a process group is made.
                settle_environment(self.environ, context.job.spec.environment)
                if watched:
                    self.settle_kernels = probe_kernels(context)
                context.start_phases.enter("importing torch and our code")
                secrets = secrets_at_hand(context.job.spec.secrets, warn=partial(context.notice, level="warning"))
                # In this order: trackers may need secrets, and ``watching``, the innermost, reports a failure before
                # they close.
                lines = start_lines(context) if kind == "train" else nullcontext()
                with secrets as context.hidden, forwarded_events(context), lines, self.watching(context, watched):
                    self.run_task(kind, context)
            finally:
                # Ends the transfer agent, which would otherwise see the end of its pipe only when this process is gone.
                context.close()

    def run_task(self, kind: str, context: WorkerContext) -> None:
        """The task. A stop is recorded before anything closes, which may take longer than the grace time."""
        try:
            task = _task(kind)
            self.settle_kernels()  # they were loaded beside the import of torch
            context.start_phases.enter("bringing the inputs to this node")
            task(context, stage_inputs(context))
        except Stopping as stopping:
            self.report_stop(stopping.record)
            raise

    @contextmanager
    def watching(self, context: WorkerContext, watched: bool) -> Iterator[None]:
        """Watch over a job of several processes. Its failure is reported in here, before anything closes.

        The end of a user's program is its own report; only our own training and precompilation are asked for signs of
        life.
        """
        task = context.job.spec.task
        if not watched or not isinstance(task, TrainTask | ScriptTask | PrecompileTask):
            yield
            return
        # Names of hosts are known to a platform's resolver some time after its containers start.
        if (address := self.environ.get("MASTER_ADDR")) is not None:
            await_host(address)
        self.kv_store = context.kv_store = _kv_store(context, self.environ)
        spec = _watchdog_of(task)
        try:
            with nullcontext() if spec is None else _watchdog(context, spec, self.kv_store):
                try:
                    yield
                except (Stopping, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    self.report_failure(error)
                    raise
        except Stopping:
            self._leave(context)
            raise
        self._leave(context)

    def _leave(self, context: WorkerContext) -> None:
        grace = context.job.spec.backend.stop_seconds
        left = context.requests.seconds_left(grace)
        leave_in_order(self.kv_store, context.process, grace if left is None else left)

    def end_now(self, reason: str) -> None:
        """A request to stop while there are no steps to finish: nothing is lost by ending here."""
        assert self.context is not None
        record = StopRecord(reason=reason, checkpoint=self._newest_step())
        self.report_stop(record)
        # ``leave`` runs no ``finally``: what is to be kept is stored here.
        self.upload_rest()
        leave(EXIT_CODES[record.state])

    def upload_rest(self) -> None:
        """Bring the last events to the run's storage, where nobody else does."""
        if self.periodic is not None:
            self.periodic.close()

    def _newest_step(self) -> int | None:
        assert self.context is not None
        return newest_step(self.context.store, self.context.job.run_id)

    def report_stop(self, record: StopRecord) -> None:
        """Leave ``output/stopped``: torchrun loses exit codes."""
        with suppress(OSError):
            record.write(container_paths(self.environ).stopped)

    def report_failure(self, error: BaseException) -> None:
        """Report once, to all: the other processes, the platform, the event log, the log."""
        if self._reported:
            return
        # Set before the work: an error inside of it must not report a second time.
        self._reported = True
        context = self.context
        process = context.process if context is not None else ProcessInfo.read(self.environ)
        own = failures.failure_of(error, process, context.marker.step if context is not None else None)
        # The message may quote a secret. Below it is printed, stored and sent to other processes.
        own = own if context is None else context.hidden.inside(own)
        first = failures.claim(self.kv_store, own)
        # The log first: it needs neither a disk nor another process.
        failures.print_failure(own, first)
        if context is not None:
            failures.publish(context, first)
        else:
            failures.leave_note(container_paths(self.environ).failure, first)
        failures.linger(self.kv_store, process.world_size, is_cause=first == own and not own.cause.is_consequence)


def _check(kind: str, context: WorkerContext) -> None:
    wanted = context.job.spec.task.kind
    if wanted != kind:
        raise RunFailed(f"this entrypoint runs {kind} jobs, but job.json holds a {wanted} job")
    context.check_world_size()
    context.check_hosts()


def _report_changes(context: WorkerContext) -> None:
    if context.changes:
        digest = context.job.spec_digest[:12]
        context.notice(f"changed by hyperparameters: {', '.join(context.changes)}; the specification is now {digest}")


def _task(kind: str) -> Task:
    """The code of a task kind, imported only now: prepare needs no torch."""
    row = TASK_KINDS.get(kind)
    if row is None:
        raise RunFailed(f"there are no {kind} jobs; there are {', '.join(TASK_KINDS)}")
    module, _, name = row.worker.partition(":")
    with without_collections():
        return cast("Task", getattr(import_module(module), name))


def _kv_store(context: WorkerContext, environ: Mapping[str, str]) -> KeyValueStore | None:
    """Torchrun's, or one of our own for hosts that run no torchrun; none for a program that is alone."""
    if not isinstance(context.job.spec.task, TrainTask) and context.process.world_size == 1:
        return None  # and torch is not needed
    with without_collections():
        import_module("torch")
    # Only here, since it needs torch.
    from sm_llm.worker.runtime.key_value_store import connect, open_key_value_store

    prefix, secret = f"{context.job.run_id}/{context.job.attempt}", environ.get(STORE_SECRET_ENVIRONMENT, "")
    hosts = Hosts.read(context.container.resource_config)
    # Below torchrun all processes share its store, which outlives each of them.
    if "TORCHELASTIC_RUN_ID" in environ or hosts is None or context.process.world_size == 1:
        return connect(prefix, secret, environ)
    await_host(hosts.leader)
    return open_key_value_store(prefix, secret, hosts.leader, is_leader=context.process.is_leader)


def _watchdog_of(task: TrainTask | ScriptTask | PrecompileTask) -> WatchdogSpec | None:
    """Precompile has its training's: a node that is gone would be waited for without end."""
    if isinstance(task, PrecompileTask):
        return task.training.watchdog
    return task.watchdog if isinstance(task, TrainTask) else None


@contextmanager
def _watchdog(context: WorkerContext, spec: WatchdogSpec, kv_store: KeyValueStore | None) -> Iterator[None]:
    from sm_llm.worker.supervision.watchdog import Watchdog

    watchdog = Watchdog(context, spec, kv_store).start()
    try:
        yield
    finally:
        watchdog.close()
