"""The script task: the user's program in folders of its own, started, watched, and its result published."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract import program as names
from sm_llm.errors import RunFailed
from sm_llm.package import PACKAGE_PARENT
from sm_llm.runs.events.events import AttemptStarted, StartChosen
from sm_llm.runs.stopped import StopRecord
from sm_llm.spec.inputs import input_location, input_variable
from sm_llm.spec.tasks import ScriptTask
from sm_llm.storage.publication.result import result_address
from sm_llm.storage.uri import open_store
from sm_llm.terminal import counted, quoted
from sm_llm.worker.checkpoint.earlier import is_published
from sm_llm.worker.checkpoint.earlier_attempts import refuse_to_forget
from sm_llm.worker.checkpoint.newest import newest_step
from sm_llm.worker.inputs.requirements import install
from sm_llm.worker.inputs.stage_inputs import channel, once_per_node, stage
from sm_llm.worker.publishing.publish_final import publish_final
from sm_llm.worker.runtime.stop import Stopping
from sm_llm.worker.script.child_program import Program
from sm_llm.worker.script.program_files import copy_program
from sm_llm.worker.script.script_platform import astray, collect, count_files, make_folders, variables
from sm_llm.worker.script.script_publisher import ScriptPublisher, await_publication, restore_checkpoint
from sm_llm.worker.supervision.failure_report import FAILED
from sm_llm.worker.supervision.store_all_gather import StoreAllGather
from sm_llm.worker.versions import versions

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec
    from sm_llm.storage.base import Store
    from sm_llm.worker.context import WorkerContext

BUNDLED_SOURCE = "source"
"""Folder of the code bundle with the user's program."""
SUMMARY = "sm_llm.json"
"""File that every result has, so that a program that writes nothing has one, too."""
# What a file of that name that the program wrote is called in the result.
_OWN_SUMMARY = "sm_llm.program.json"
_POLL_SECONDS = 0.2
# Of the time to stop, for publishing what the program has written last.
_STOP_MARGIN_SECONDS = 15.0


@dataclass(frozen=True)
class Folders:
    """The program's folders on this node."""

    work: Path
    output: Path
    checkpoints: Path
    handover: Path
    scratch: Path
    packages: Path
    """What its requirements.txt asks for."""

    @property
    def smp_config(self) -> Path:
        """Parameters for a program that starts SageMaker's model parallel library."""
        return self.handover.with_name("smp.json")

    @classmethod
    def below(cls, base: Path, task: ScriptTask) -> Folders:
        work = base / "program"
        output, checkpoints = work / task.output_folder, work / task.checkpoint_folder
        return cls(work, output, checkpoints, base / "handover", base / "scratch", base / "packages")


def run(context: WorkerContext, job: JobSpec) -> None:
    """Run the program of ``job.task`` once in this process's name, and publish what it leaves."""
    assert isinstance(job.task, ScriptTask)
    ScriptRunner(context, job, job.task).run()


class ScriptRunner:
    """One attempt at a script job, on one process. All processes go through ``run`` together."""

    def __init__(self, context: WorkerContext, job: JobSpec, task: ScriptTask) -> None:
        self.context = context
        self.job = job
        self.task = task
        self.library_parameters = None if task.parallelism is None else task.parallelism.library_parameters(seed=0)
        self.folders = Folders.below(context.scratch / "script", task)
        self.kv_store = context.kv_store
        # Who asked to stop.
        self.stopped: str | None = None
        # Packages that were installed for the program; the leader knows.
        self.installed: list[str] = []
        process = context.process
        if self.kv_store is None and process.world_size > 1:
            raise RunFailed("a script job of several processes needs torchrun's own store (torch 2.4 or newer)")
        self.together = StoreAllGather(self.kv_store, "script", process.rank, process.world_size)
        self.store: Store = open_store(context.job.run_uri, job.storage_options.model_dump())

    def run(self) -> None:
        """From the staged inputs to the published result."""
        context, process = self.context, self.context.process
        context.emit(AttemptStarted(process.world_size, "script", None, versions()))
        # Rank 0 decides for all: processes that read the store at different moments could disagree.
        if self.together(process.is_leader and is_published(context))[0]:
            return
        start = self._lay_out()
        # From here on a stop is passed to the program, which gets time to save.
        with context.requests.deferred():
            publisher = self._publisher(start)
            began, clock = time.monotonic(), time.time()
            try:
                argv = self._run_program(start)
            except RunFailed:
                self._publish_after_failure(publisher)
                raise
            if publisher is not None:
                # A program that was stopped may have left a folder half-written: then only what it handed over counts.
                publisher.finish(complete=self.stopped is None)
            if self.stopped is not None:
                raise self._stopping(self.stopped)
            # Results only count once all programs have ended well; a failure elsewhere is raised here.
            self.together(True, self._heed)
            self._publish_result(argv, time.monotonic() - began, clock)

    def _publish_after_failure(self, publisher: ScriptPublisher | None) -> None:
        """Before the failure is reported: then the others end, and publication with them."""
        await_publication(self.folders.handover, self._publication_is_over)
        if publisher is not None:
            # The failure may have come in the middle of a save, on a full disk for one.
            publisher.report_changing()

    def _lay_out(self) -> tuple[int, str] | None:
        """The node's folders, the program in them, and the newest checkpoint: its step and folder."""
        if self.context.process.is_node_leader:
            # Only node leaders restore: their exchange needs a name of its own.
            nodes = StoreAllGather(self.kv_store, "nodes", self.context.process.node, self.context.process.node_count)
        text = once_per_node(self.context, "the program", lambda: json.dumps(self._prepare(nodes)))
        found = json.loads(text)
        start = None if found is None else (int(found[0]), str(found[1]))
        if start is None:
            self.context.emit(StartChosen("scratch", 0))
        else:
            self.context.emit(StartChosen("checkpoint", start[0], start[1]))
            self.context.log(f"the checkpoint of step {start[0]} is in {start[1]}")
        return start

    def _prepare(self, nodes: StoreAllGather) -> tuple[int, str] | None:
        folders = self.folders
        # What an earlier attempt on this node has left would mix with what is restored.
        shutil.rmtree(folders.work.parent, ignore_errors=True)
        if (source := self._source()) is not None:
            for text in copy_program(source, folders.work):
                self.context.notice(text)
        for folder in (folders.output, folders.checkpoints, folders.handover, folders.scratch, folders.packages):
            folder.mkdir(parents=True, exist_ok=True)
        make_folders(self.context.container, folders.output, folders.checkpoints)
        self._install()
        if self.library_parameters is not None:
            folders.smp_config.write_text(json.dumps(self.library_parameters, indent=2), encoding="utf-8")
        leader = self.context.process.is_leader
        found = restore_checkpoint(
            self.store, self.context.job.run_id, folders.checkpoints, leader=leader, gather=nodes
        )  # fmt: skip
        if found is None:
            # A script has no ``start`` to ask for a new beginning with: the way out is another run.
            anew = f"sm-llm rerun {quoted(self.store.uri)}, or in fit the option --new"
            refuse_to_forget(self.context, self.store, nodes, anew=anew)
            return None
        return found[0], str(found[1])

    def _install(self) -> None:
        parallelism = self.task.parallelism
        stack = None if parallelism is None else parallelism.image_stack  # any other image owns the least
        self.installed = install(self.folders.work, self.folders.packages, stack)
        if self.installed and self.context.process.is_leader:
            self.context.notice(f"installed for the program: {', '.join(self.installed)}")

    def _source(self) -> Path | None:
        bundled = self.context.container.code / BUNDLED_SOURCE
        if bundled.is_dir():
            return bundled
        return None if self.task.source is None else Path(self.task.source)

    def _inputs(self) -> dict[str, str]:
        """Name -> folder of every input of the job, on this node."""
        channels = self.context.job.channels
        mounted = {uri: name for name, uri in channels.items()}
        locations = {}
        for name, value in self.job.inputs.items():
            uri = input_location(value)
            if uri in mounted:  # several inputs may be one folder: each has a channel of its own name
                locations[name] = str(channel(self.context, name if channels.get(name) == uri else mounted[uri]))
            else:
                locations[name] = str(stage(self.context, uri)) if "://" in uri else result_address(uri)
        return locations

    def _environment(
        self, task: ScriptTask, inputs: dict[str, str], start: tuple[int, str] | None, arguments: list[str]
    ) -> dict[str, str]:
        folders, context = self.folders, self.context
        parent = str(PACKAGE_PARENT)
        # The program's own modules first, then its packages, then ``sm_llm`` for its calls.
        path = os.pathsep.join(
            filter(None, [str(folders.work), str(folders.packages), parent, os.environ.get("PYTHONPATH")])
        )
        found = {
            **variables(task, arguments, inputs, folders.output, os.environ),
            names.OUTPUT: str(folders.output),
            names.CHECKPOINTS: str(folders.checkpoints),
            names.SCRATCH: str(folders.scratch),
            names.HANDOVER: str(folders.handover),
            names.ATTEMPT: str(context.job.attempt),
            "PYTHONPATH": path,
            **{input_variable(name): location for name, location in inputs.items()},
        }
        if context.process.is_leader:
            found[names.EVENTS] = str(context.run.event_file(context.job.attempt, "rank0-program"))
        if self.library_parameters is not None:
            found[names.SMP_CONFIG] = str(folders.smp_config)
        if start is not None:
            found |= {names.RESUME_STEP: str(start[0]), names.RESUME_FOLDER: start[1]}
        return {**os.environ, **found}

    def _publisher(self, start: tuple[int, str] | None) -> ScriptPublisher | None:
        process, folders = self.context.process, self.folders
        if not process.is_node_leader:
            return None
        return ScriptPublisher(
            self.context,
            self.store,
            StoreAllGather(self.kv_store, "publisher", process.node, process.node_count, timeout=float("inf")),
            checkpoints=folders.checkpoints,
            handover=folders.handover,
            done=start[0] if start else -1,
        ).start()

    def _run_program(self, start: tuple[int, str] | None) -> list[str]:
        """Start it and wait for its end; returns its argv."""
        inputs, folders = self._inputs(), self.folders
        locations = {f"inputs.{name}": location for name, location in inputs.items()}
        locations |= {"output": str(folders.output), "checkpoints": str(folders.checkpoints)}
        locations |= {"scratch": str(folders.scratch)}
        task = names.with_folders(self.task, locations)
        argv = names.command(task, folders.work)
        own = argv[names.program_words(task) :]
        program = Program(argv, self._environment(task, inputs, start, own), folders.work)
        try:
            while program.poll() is None:
                # Raises if another process fails: the handler below then kills this program.
                self._heed()
                if self.stopped is not None:
                    self._stop(program)
                    return argv
                time.sleep(_POLL_SECONDS)
        except BaseException:
            # Whatever ends this process, the program must not go without it: it may hold the GPUs.
            program.kill()
            raise
        program.check()
        return argv

    def _publication_is_over(self) -> bool:
        """Whether nothing can be published any more: the nodes no longer act together, or the time to stop is up."""
        left = self.context.requests.seconds_left(self.job.backend.stop_seconds)
        # What is left is for the report and the end of this process.
        if left is not None and left < _STOP_MARGIN_SECONDS / 2:
            return True
        if self.kv_store is None or self.context.process.node_count == 1:
            return False
        try:
            return self.kv_store.get(FAILED) is not None
        except RuntimeError:  # its host is gone
            return True

    def _stop(self, program: Program) -> None:
        """Give the program all of the time to stop but what its last checkpoint needs to be published."""
        grace = self.job.backend.stop_seconds
        left = self.context.requests.seconds_left(grace)
        program.stop(max(1.0, (grace if left is None else left) - _STOP_MARGIN_SECONDS))

    def _heed(self) -> None:
        """Note a request to stop; raise if another process has failed."""
        requests = self.context.requests
        if self.context.process.is_leader:
            requests.check_file(self.context.run.stop_file)
        self.stopped = requests.reason
        if self.kv_store is not None and self.kv_store.get(FAILED) is not None:
            raise RunFailed("another process is gone")

    def _stopping(self, reason: str) -> Stopping:
        newest = newest_step(self.store, self.context.job.run_id)
        record = StopRecord(reason=reason, checkpoint=newest)
        self.context.log(record.sentence)
        return Stopping(record)

    def _publish_result(self, argv: list[str], seconds: float, began: float) -> None:
        """The output folder of the first node, once the programs of all processes have ended well.

        ``seconds`` is how long they ran, ``began`` the clock's time when they were started.
        """
        output = self.folders.output
        if self.context.process.is_node_leader:
            left = [
                *collect(self.context.container, output, self.folders.work.parent),
                *astray(self.context.container, began),
            ]
            self._note_output(left, count_files(output))
        if self.context.process.is_leader:
            # The name is taken by a file of the program, which is kept under another one.
            if (output / SUMMARY).exists():
                (output / SUMMARY).replace(output / _OWN_SUMMARY)
                self.context.notice(f"the program's {SUMMARY} is published as {_OWN_SUMMARY}", "warning")
            summary = {"argv": argv, "seconds": round(seconds, 3), "installed": self.installed}
            (output / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        meta = {"kind": "script", "spec_digest": self.context.job.spec_digest}
        # How long the program ran is in the summary, and no part of what it made.
        publish_final(self.context, self.store, output, self.together, meta, varying=(SUMMARY,))

    def _note_output(self, left: list[str], files: int) -> None:
        """Report what is not published, and a result with nothing in it."""
        node = self.context.process.node
        if node == 0 and not files:
            written = f"no file in {self.task.output_folder}/ (SM_LLM_OUTPUT, SM_MODEL_DIR)"
            left = [*left, f"the program left {written}: the result holds {SUMMARY} alone"]
        elif node != 0 and files:
            left = [
                *left,
                f"node {node}: {counted(files, 'file')} not published: the result is what the first node wrote",
            ]
        for text in left:
            self.context.notice(text, "warning")
