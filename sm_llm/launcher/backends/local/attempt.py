"""One attempt of one local run, from the laid-out folders to its recorded end; runs inside the supervisor."""

from __future__ import annotations

import json
import os
import secrets
import site
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import STORE_SECRET_ENVIRONMENT, JobFile
from sm_llm.launcher.attempt_outcome import judge, record_outcome, steps_have_worked
from sm_llm.launcher.backends.local import processes
from sm_llm.launcher.backends.local.container import LOOPBACK_ENVIRONMENT, PORT, clear_scratch, lay_out
from sm_llm.launcher.backends.local.contract import EMULATED, emulated
from sm_llm.launcher.backends.local.evidence import evidence
from sm_llm.launcher.backends.local.store_heartbeat import store_tasks
from sm_llm.launcher.job_inputs import absolute_inputs, input_manifests
from sm_llm.package import PACKAGE_PARENT
from sm_llm.runs.events.events import AttemptEnded, EventWriter
from sm_llm.runs.outcome import Outcome, with_end
from sm_llm.runs.replication.periodic_task import CLOSE_SECONDS
from sm_llm.runs.results import link_result, result_location
from sm_llm.runs.run_lock import hold
from sm_llm.runs.run_paths import STEPS, ContainerPaths, RunPaths
from sm_llm.runs.run_record import Attempt, RunRecord
from sm_llm.runs.run_states import RunState
from sm_llm.spec.job import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from sm_llm.runs.replication.periodic_task import PeriodicTask
    from sm_llm.runs.run_store import RunStore

GRACE_SECONDS = 5.0
"""How long the other nodes may take to notice by themselves that one has failed."""
KILL_SECONDS = 5.0
"""How long after that they may take to end, once asked."""
STOP_MARGIN_SECONDS = 10.0
"""Beyond ``backend.stop_seconds``, after which torchrun kills its processes and ends itself."""


def run_attempt(
    run_store: RunStore,
    interrupts: processes.Interrupts,
    *,
    environ: Mapping[str, str] = os.environ,
    on_started: Callable[[], None] = lambda: None,
    quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
    folder: Path | None = None,
) -> Outcome:
    """Run the attempt that ``job.json`` and its request describe, and record how it ended.

    ``on_started`` is called once the run's lock is held and the attempt is in the record. ``quiet`` makes this
    process's other threads wait, while it is forked. ``folder`` is what relative inputs are relative to.
    """
    paths = run_store.paths
    job = JobFile.read(paths.job_file)
    with recorded(run_store, job.attempt, on_started, folder) as recording:
        run_store.update(lambda record: with_facts(record, paths, job))
        request = json.loads(request_file(paths, job.attempt).read_text(encoding="utf-8"))
        # A supervisor that was killed has left the scratch folders of its attempt.
        for earlier in range(1, job.attempt):
            clear_scratch(paths, earlier)
        # Before any node starts: a folder that cannot be made fails the attempt at once.
        for node in range(len(request["nodes"])):
            _lay_out(paths, job, request, node)
        ended = _run_nodes(paths, job, request, interrupts, environ, [quiet, recording.quiet])
        # A stop that was asked for after a node had failed is not what ended the attempt.
        found = evidence(paths, job, ended, interrupted=interrupts.count > 0 and not ended.failed_unasked)
        outcome = judge(run_store, job.run_id, job.attempt, found)
        link_result(run_store, result_location(run_store, job.run_id))
        clear_scratch(paths, job.attempt)  # first: a full disk has no space for the record
        recording.end(outcome)
    return outcome


def _lay_out(paths: RunPaths, job: JobFile, request: Mapping[str, Any], node: int) -> None:
    if (contract := emulated(job.spec)) is None:
        lay_out(paths, job, node, request["entrypoint"])
    else:
        base, options = paths.node_dir(job.attempt, node), job.spec.storage_options.model_dump()
        contract.lay_out(request[EMULATED], base, node, job.spec.compute.processes, options)


class Recording:
    """An attempt that is in the run's record, until ``end``."""

    def __init__(
        self, run_store: RunStore, opened: Attempt, periodics: Sequence[PeriodicTask], folder: Path | None
    ) -> None:
        self._run_store = run_store
        self._folder = folder
        self._opened = opened
        self._periodics = periodics
        self._outcome: Outcome | None = None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While this lasts no other thread of ours does anything: this process can be forked."""
        with ExitStack() as stack:
            for periodic in self._periodics:
                stack.enter_context(periodic.quiet())
            yield

    def end(self, outcome: Outcome) -> None:
        """Record the end: in the event log first, so that whoever reads of it in the record finds all events."""
        self._outcome = outcome
        number = self._opened.number
        events = EventWriter(self._run_store.paths.event_file(number, "launcher"), number)
        events.write(AttemptEnded(outcome.state.value, outcome.reason, outcome.rank))
        events.close()
        self.close()
        self._record(outcome)

    def recover(self, error: Exception) -> bool:
        """Record the end once more if it was that which failed; for any other error record that as the end.

        Returns whether ``error`` is fixed.
        """
        if self._outcome is None:
            self.end(Outcome(RunState.FAILED, f"the launcher failed: {type(error).__name__}: {error}"))
            return False
        self._record(self._outcome)
        return True

    def _record(self, outcome: Outcome) -> None:
        run_store, record = self._run_store, self._run_store.record()
        steps = [run_store.below(STEPS, name) for name in record.spec.get("steps", ())]
        worked = record.before is not None and steps_have_worked(steps, self._opened)
        ended = with_end(record, run_store.paths, self._opened, outcome, steps_worked=worked)
        _restore_job_file(run_store, ended, self._folder)  # before anybody reads of the end
        record_outcome(run_store, self._opened, outcome, steps=steps)

    def close(self) -> None:
        """Store what is left, while the run still counts as running."""
        ends = time.monotonic() + CLOSE_SECONDS
        for periodic in self._periodics:
            periodic.close(ends - time.monotonic())


def _restore_job_file(run_store: RunStore, record: RunRecord, folder: Path | None) -> None:
    """Take changes out of job.json that the run has not kept."""
    path = run_store.paths.job_file
    if "steps" in record.spec or not path.is_file():
        return
    job = JobFile.read(path)
    spec = record.load_spec() if job.spec_digest != record.spec_digest else None
    if isinstance(spec, JobSpec):
        kept, channels = absolute_inputs(spec, folder)
        update = {"spec": kept, "spec_digest": record.spec_digest, "channels": channels}
        job.model_copy(update=update).write(path)
        run_store.keep(path)


@contextmanager
def recorded(
    run_store: RunStore, number: int, on_started: Callable[[], None], folder: Path | None = None
) -> Iterator[Recording]:
    """Hold the run's lock and keep its record true around one attempt: opened here, ended by what it yields.

    An error of our own ends the attempt as failed before it is raised on; one in recording its end is tried again.
    """
    # The supervisor's own process id, by which other processes signal it.
    opened = Attempt.claim(number, str(os.getpid()))
    # The lock comes first: from here on everybody sees a run that is alive.
    with hold(run_store.root):
        run_store.hold_originals(number)
        run_store.paths.stop_file.unlink(missing_ok=True)  # it asked an earlier attempt
        run_store.update(lambda record: record.with_attempt(opened))
        on_started()
        recording = Recording(
            run_store, opened, [periodic.start() for periodic in store_tasks(run_store, number)], folder
        )
        try:
            yield recording
        except Exception as error:
            if not recording.recover(error):
                raise
        finally:
            recording.close()


def with_facts(record: RunRecord, paths: RunPaths, job: JobFile) -> RunRecord:
    """The record with what the job's attempt was sent and is about to read; as it is if that was rolled back."""
    opened = record.attempt(job.attempt)
    if opened is None:
        return record
    request = request_file(paths, job.attempt).relative_to(paths.root).as_posix()
    return record.with_attempt(opened.model_copy(update={"request": request, "inputs": input_manifests(job.spec)}))


def request_file(paths: RunPaths, attempt: int) -> Path:
    """The submission's request as it was sent."""
    return paths.attempt_dir(attempt) / "request.json"


def _run_nodes(
    paths: RunPaths,
    job: JobFile,
    request: Mapping[str, Any],
    interrupts: processes.Interrupts,
    environ: Mapping[str, str],
    quiet: Sequence[Callable[[], AbstractContextManager[None]]],
) -> processes.Ended:
    contract = emulated(job.spec)
    alone = contract.alone(len(request["nodes"])) if contract is not None else nullcontext()
    # Never written anywhere: of another user's process, nobody else can read the environment.
    secret = {STORE_SECRET_ENVIRONMENT: secrets.token_hex(16)}
    with processes.reserved_port() as port, alone:
        nodes = []
        # No other thread of this process may run while it forks the nodes (processes.start).
        with ExitStack() as stack:
            for silence in quiet:
                stack.enter_context(silence())
            for index, node in enumerate(request["nodes"]):
                argv = [part.replace(PORT, str(port)) for part in node["argv"]]
                # Later ones win: the user's environment over the loopback defaults, the node's own variables over both.
                variables = {**LOOPBACK_ENVIRONMENT, **environ, **python_path(environ), **node["env"], **secret}
                folder = ContainerPaths(paths.node_dir(job.attempt, index)).code
                nodes.append(processes.start(argv, variables, paths.node_log(job.attempt, index), folder))
        ended = processes.wait_for_all(
            nodes,
            interrupts,
            grace_seconds=GRACE_SECONDS,
            kill_seconds=KILL_SECONDS,
            stop_seconds=job.spec.backend.stop_seconds + STOP_MARGIN_SECONDS,
        )
        if contract is not None:  # the toolkit dies of a signal that its torchrun never gets
            processes.await_descendants(interrupts, job.spec.backend.stop_seconds)
    # What a program has started and left behind would hold GPUs and ports.
    processes.kill_descendants()
    return ended


def python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Make this very package importable in the nodes, unless it is installed where Python finds it anyway.

    A site-packages folder is never put on PYTHONPATH: there it would come before the standard library. Of the user's
    own entries an empty one, which means whatever folder a process works in, is left out; relative ones are made
    absolute, since processes of a run work in other folders.
    """
    own = [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    parent = PACKAGE_PARENT
    installed = {Path(folder).resolve() for folder in [*site.getsitepackages(), site.getusersitepackages()]}
    if parent in installed or parent.name == "site-packages":
        return {"PYTHONPATH": os.pathsep.join(own)} if "PYTHONPATH" in environ else {}
    return {"PYTHONPATH": os.pathsep.join([str(parent), *own])}
