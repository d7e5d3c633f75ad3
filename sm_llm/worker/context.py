"""What a worker process knows about its job, its place among the others and its folders."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hosts import Hosts
from sm_llm.errors import RunFailed
from sm_llm.redaction import Hidden
from sm_llm.runs.events.events import Event, EventWriter, Notice, last_events
from sm_llm.runs.run_paths import ContainerPaths, RunPaths
from sm_llm.spec.tasks import starts_ranks
from sm_llm.storage.uri import open_store
from sm_llm.terminal import counted
from sm_llm.worker.job_reader import read_job
from sm_llm.worker.process_info import ProcessInfo, container_paths
from sm_llm.worker.run_folder import run_folder
from sm_llm.worker.runtime.progress_marker import ProgressMarker
from sm_llm.worker.runtime.start_phases import StartPhases
from sm_llm.worker.runtime.stop import StopRequests
from sm_llm.worker.scratch import scratch_folder
from sm_llm.worker.transfer.local_copies import LocalCopies
from sm_llm.worker.transfer.transfer_agent import TransferAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from sm_llm.contract.job_file import JobFile
    from sm_llm.storage.base import Store
    from sm_llm.worker.runtime.key_value_store import KeyValueStore


@dataclass
class WorkerContext:
    """The job, the place and the folders of one worker process; the leader also has the event log."""

    job: JobFile
    process: ProcessInfo
    container: ContainerPaths
    run: RunPaths
    requests: StopRequests = field(default_factory=StopRequests)
    """Who asked this process to stop."""
    marker: ProgressMarker = field(default_factory=ProgressMarker)
    """How far it has come."""
    _events: EventWriter | None = field(default=None, repr=False)
    hidden: Hidden = field(default_factory=Hidden)
    """Keeps the values of the job's secrets out of the event log."""
    agent: TransferAgent = field(default_factory=TransferAgent, repr=False)
    """Moves this node's files."""
    kv_store: KeyValueStore | None = None
    """Notes that all processes can read, where somebody keeps them."""
    upload_events: Callable[[], object] = field(default=lambda: None, repr=False)
    """Brings the events so far to the run's storage, where this process does that. Never raises."""
    replaced_job: str | None = None
    """On the leader: another job of the platform that had this run before, where nobody launched this one for it."""
    changes: Sequence[str] = ()
    """Overrides that the container was started with."""
    began: float = field(default_factory=time.time)
    """When this process began to read its job, in seconds since the epoch."""
    start_phases: StartPhases = field(default_factory=StartPhases, repr=False)
    """What the start of a training is at."""
    earlier_events: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """On the leader: the last events of earlier starts of this attempt."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, argv: Sequence[str] = ()) -> WorkerContext:
        """Read job.json, what changes it, and the environment; opens the event log on the leader."""
        container = container_paths(environ)
        process = ProcessInfo.read(environ, Hosts.read(container.resource_config))
        job, changes = read_job(container, argv, environ)
        run = RunPaths(run_folder(job, process, container, environ))
        log = run.event_file(job.attempt, "rank0")
        # Read before anything is written: what follows belongs to this start.
        earlier = last_events(log) if process.is_leader else []
        events = EventWriter(log, job.attempt) if process.is_leader else None
        requests = StopRequests(process.rank)
        return cls(
            job, process, container, run, requests, ProgressMarker(), events, changes=changes, earlier_events=earlier
        )

    @cached_property
    def store(self) -> Store:
        """The run's storage: checkpoints and results."""
        return open_store(self.job.run_uri, self.job.spec.storage_options.model_dump())

    @cached_property
    def scratch(self) -> Path:
        """This node's folder for large temporary files."""
        return scratch_folder(self.container, self.job.run_id, self.process.node, os.environ)

    @cached_property
    def copies(self) -> LocalCopies:
        """This node's copies of checkpoints, which the next attempt finds."""
        is_of_attempt = self.scratch == self.container.scratch and self.scratch.is_relative_to(self.run.root)
        return LocalCopies(self.run.copies(self.process.node) if is_of_attempt else self.scratch)

    def check_world_size(self) -> None:
        """Raise ``RunFailed`` when other than the requested number of processes has started."""
        compute = self.job.spec.compute
        requested = compute.world_size if starts_ranks(self.job.spec.task) else self.process.world_size
        # Fewer processes would train with another global batch, and nobody would notice.
        if self.process.world_size != requested:
            raise RunFailed(
                f"started as {counted(self.process.world_size, 'process')}, but compute asks for {requested} "
                f"({compute.instance_count} x {compute.processes}): the launcher's command is wrong"
            )

    def check_hosts(self) -> None:
        """Raise ``RunFailed`` where the platform's hosts are not those of the job, or rank 0 is not on the first."""
        hosts = Hosts.read(self.container.resource_config)
        if hosts is None:
            return
        requested = self.job.spec.compute.instance_count
        if len(hosts.names) != requested:
            listed = ", ".join(hosts.names)
            raise RunFailed(f"compute.instance_count asks for {requested} hosts, the platform gave {listed}")
        # Stores and process groups listen where rank 0 is; the platform gave out the first host's name.
        if self.process.node == 0 and hosts.current != hosts.leader:
            raise RunFailed(f"rank 0 runs on {hosts.current}, but the first host of the job is {hosts.leader}")

    def emit(self, event: Event) -> None:
        """Append to the event log (leader only; nothing elsewhere)."""
        if self._events is not None:
            self._events.write(self.hidden.inside(event))

    def log(self, message: str) -> None:
        """Print one line (leader only)."""
        if self.process.is_leader:
            with suppress(BrokenPipeError):  # the toolkit that read it has ended; its watch reports that
                print(message, flush=True)

    def notice(self, message: str, level: str = "info") -> None:
        """Report to people: printed and in the event log."""
        self.log(message if level == "info" else f"{level}: {message}")
        self.emit(Notice(message, level))

    def close(self) -> None:
        """End the transfer agent and close the event log."""
        # First: a call that waits for it raises, and what it reports still reaches the event log.
        self.agent.end()
        # A background thread may still report: from here on it prints alone, since the descriptor is soon another's.
        events, self._events = self._events, None
        if events is not None:
            events.close()
