"""The precompile task: on every node ``neuron_parallel_compile`` runs the training for its graphs and compiles them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.contract.compile_cache import CACHE_URL
from sm_llm.contract.hosts import Hosts
from sm_llm.contract.job_file import JOB_ENVIRONMENT, RUN_FOLDER_ENVIRONMENT, entrypoint_source
from sm_llm.errors import RunFailed
from sm_llm.package import PACKAGE_PARENT
from sm_llm.runs.events.events import AttemptStarted
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.runs.stopped import StopRecord
from sm_llm.spec.machines.neuron_releases import installed_packages, release_problem
from sm_llm.spec.tasks import PrecompileTask
from sm_llm.spec.training import CheckpointSpec, TrackersSpec
from sm_llm.terminal import counted
from sm_llm.worker.checkpoint.earlier import is_published
from sm_llm.worker.inputs.graph_cache import open_cache
from sm_llm.worker.publishing.publish_final import publish_final, result_folder
from sm_llm.worker.runtime.stop import Stopping
from sm_llm.worker.script.child_program import Program
from sm_llm.worker.supervision.compile_progress import CompileProgress
from sm_llm.worker.supervision.failure_report import FAILED
from sm_llm.worker.supervision.store_all_gather import StoreAllGather
from sm_llm.worker.training.job_setup import config_of
from sm_llm.worker.versions import versions

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.contract.job_file import JobFile
    from sm_llm.spec.job import JobSpec
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.inputs.graph_cache import CompileCache

COMMAND = "neuron_parallel_compile"
SUMMARY = "precompile.json"
"""File of the result with the counts of every node."""
_COUNT = re.compile(r"Total (graphs|successful compilations|failed compilations): *([0-9]{1,9})\b")
_OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|PET_).*|RANK|WORLD_SIZE")
_HERE = "127.0.0.1"
# Keeps torchrun's store on this machine where all nodes are simulated on it.
_LOOPBACK = "sm_llm.worker.loopback"
_POLL_SECONDS = 0.2
# Of the time to stop, for bringing back what was compiled.
_STOP_MARGIN_SECONDS = 15.0
_SHOWN = 3
_STOP = "precompile/stop"


@dataclass
class Counts:
    """What ``neuron_parallel_compile`` counts at its end; None until it has."""

    graphs: int | None = None
    compiled: int | None = None
    failed: int | None = None

    def read(self, line: str) -> None:
        """Take the count that a line of its output holds, if it does. The last one counts."""
        if match := _COUNT.search(line):
            name = {"graphs": "graphs", "successful compilations": "compiled", "failed compilations": "failed"}
            setattr(self, name[match[1]], int(match[2]))


def run(context: WorkerContext, job: JobSpec) -> None:
    """Compile the graphs of ``job.task.training`` (its sources are local) into the cache that the training will have.

    One process per node. Raises ``RunFailed`` where a graph does not compile.
    """
    assert isinstance(job.task, PrecompileTask)
    Precompilation(context, job, job.task).run()


class Precompilation:
    """One attempt, on one node. All nodes go through ``run`` together."""

    def __init__(self, context: WorkerContext, job: JobSpec, task: PrecompileTask) -> None:
        self.context = context
        self.job = job
        self.task = task
        self.counts = Counts()
        self.stopped: str | None = None
        process = context.process
        # Without a time-out: stages of one model compile for hours on one node and for minutes on another. The
        # watchdog finds a node that is gone, ``CompileProgress`` one whose compiler hangs.
        self.together = StoreAllGather(
            context.kv_store, "precompile", process.rank, process.world_size, timeout=float("inf")
        )

    def run(self) -> None:
        """From the restored cache to the saved one, and the counts of all nodes as the result."""
        context, process = self.context, self.context.process
        context.emit(AttemptStarted(process.world_size, "compiler", self.task.extract_steps, versions()))
        # Rank 0 decides for all: nodes that read the store at different moments could disagree.
        if self.together(process.is_leader and is_published(context))[0]:
            return
        if problem := release_problem(installed_packages()):
            raise RunFailed(f"task.training.parallelism: {problem}")
        if shutil.which(COMMAND) is None:
            raise RunFailed(f"{COMMAND} is not on the PATH of this image. Use an image with the Neuron SDK")
        cache = open_cache(context, self.task.training, config_of(self.task.training))
        if cache is None:
            raise RunFailed(f"{CACHE_URL} is not set, so compiled graphs would be lost with this job")
        address, port = self.together(self._rendezvous())[0]
        with context.requests.deferred():
            progress = CompileProgress(context, cache.folder, self.task.stall_seconds)
            try:
                self._compile(cache, str(address), int(port), progress)
            finally:
                # Whatever has compiled is worth keeping, also on a node whose compiler hangs or whose training failed.
                cache.save()
            progress.finish()
            self._heed_stop()
            own = {**asdict(self.counts), "failures": cache.failures() if self.counts.failed else []}
            nodes = self.together(own, lambda: self._wait(progress))
        cache.report(self.together)
        self._check(nodes)
        self._publish(nodes)

    def _wait(self, progress: CompileProgress) -> None:
        progress.report()
        self._heed()
        self._heed_stop()

    def _heed_stop(self) -> None:
        if self.stopped is not None:
            record = StopRecord(reason=self.stopped, checkpoint=None)
            self.context.log(record.sentence)
            raise Stopping(record)

    def _rendezvous(self) -> tuple[str, int]:
        """Where the training's processes find one another; the first node's counts."""
        hosts = Hosts.read(self.context.container.resource_config)
        leader = hosts.leader if hosts is not None else _HERE
        # A static rendezvous chooses no port itself, and one that is fixed may be held by another job on this host.
        with socket.socket() as holder:
            holder.bind(("", 0))
            return os.environ.get("MASTER_ADDR", leader), int(holder.getsockname()[1])

    def _compile(self, cache: CompileCache, address: str, port: int, progress: CompileProgress) -> None:
        folder = self.context.scratch / "precompile"
        # What an attempt that was killed on this node has left is another job's.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        argv = self._command(folder, address, port)
        program = Program(argv, self._environment(folder, cache), folder, on_line=self.counts.read)
        try:
            while program.poll() is None:
                self._heed()
                if self.stopped is not None:
                    left = self.context.requests.seconds_left(self.job.backend.stop_seconds)
                    # Compilers get SIGTERM too: those that are left would run for an hour.
                    grace = self.job.backend.stop_seconds if left is None else left
                    program.stop(max(1.0, grace - _STOP_MARGIN_SECONDS))
                    return
                progress.poll()
                time.sleep(_POLL_SECONDS)
        except BaseException:
            program.kill()
            raise
        code = program.wait()
        note = ContainerPaths(folder / "node").failure
        if code and note.is_file():
            words = note.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0]
            raise RunFailed(f"the training failed while its graphs were extracted: {words}")
        # Before the exit code, which is 0 with failed graphs as well.
        if not self.counts.failed:
            program.check()

    def _command(self, folder: Path, address: str, port: int) -> list[str]:
        """The training's own start, with the node count and processes that it will have."""
        entry = folder / "train.py"
        entry.write_text(entrypoint_source("train"), encoding="utf-8")
        process, compute = self.context.process, self.job.compute
        return [
            COMMAND,
            sys.executable,
            "-P",
            "-m",
            *((_LOOPBACK,) if address == _HERE else ()),
            "torch.distributed.run",
            f"--nnodes={process.node_count}",
            f"--nproc-per-node={compute.processes}",
            f"--node-rank={process.node}",
            "--rdzv-backend=static",
            f"--rdzv-id={self.context.job.run_id}-{self.context.job.attempt}-graphs",
            f"--master-addr={address}",
            f"--master-port={port}",
            *((f"--local-addr={_HERE}",) if address == _HERE else ()),
            "--max-restarts=0",
            f"--log-dir={folder / 'logs'}",
            str(entry),
        ]

    def _environment(self, folder: Path, cache: CompileCache) -> dict[str, str]:
        """As the training has it, with a run of its own: nothing that it writes is of any use."""
        (folder / "node").mkdir()
        self._training_job(folder).write(folder / "job.json")
        # With the outer torchrun's ranks, the training's processes would take places in a group that they are not in.
        inherited = {name: text for name, text in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)}
        # The package may be beside the entrypoint alone, in a code bundle.
        path = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
        return {
            **inherited,
            "PYTHONPATH": path,
            "SAGEMAKER_BASE_DIR": str(folder / "node"),
            "SM_HPS": "{}",
            JOB_ENVIRONMENT: str(folder / "job.json"),
            RUN_FOLDER_ENVIRONMENT: str(folder / "run"),
            CACHE_URL: str(cache.folder),
        }

    def _training_job(self, folder: Path) -> JobFile:
        """The training for a few steps, in a run on this node, without what is for people."""
        training = self.task.training
        # A tracker would show a run of invalid numbers.
        logging = training.logging.model_copy(update={"sinks": TrackersSpec(), "profile": None, "sample_prompt": None})
        short = {"max_steps": self.task.extract_steps, "max_tokens": None, "max_epochs": None}
        quiet = {"logging": logging, "checkpoint": CheckpointSpec()}
        spec = self.job.model_copy(update={"task": training.model_copy(update={**short, **quiet})})
        run = folder / "run"
        return self.context.job.model_copy(
            update={"spec": spec, "run_uri": str(run), "run_id": run.name, "channels": {}, "resume": None}
        )

    def _heed(self) -> None:
        """Note a request to stop, of this node or another one; raise if another node has failed."""
        requests, kv_store = self.context.requests, self.context.kv_store
        if self.context.process.is_leader:
            requests.check_file(self.context.run.stop_file)
        self.stopped = requests.reason
        if kv_store is None:
            return
        if kv_store.get(FAILED) is not None:
            raise RunFailed("another process is gone")
        # Only the first node sees a stop file, and a signal may reach one node alone.
        self.stopped = kv_store.get(_STOP) if self.stopped is None else kv_store.first(_STOP, self.stopped)

    def _check(self, nodes: list[dict[str, Any]]) -> None:
        """Raise ``RunFailed`` for graphs that did not compile, and for a count that never came, on any node."""
        problems = [
            f"{COMMAND} ended on node {node} without its count of failed compilations"
            for node, it in enumerate(nodes)
            if it["failed"] is None
        ]
        if failed := sum(it["failed"] or 0 for it in nodes):
            total = sum(it["graphs"] or 0 for it in nodes)
            listed = "; ".join(_failures(node, it) for node, it in enumerate(nodes) if it["failed"])
            problems.append(
                f"{failed} of {counted(total, 'graph')} did not compile: {listed}. A compiler that was killed had too "
                "little host memory; one with too many instructions needs a larger tensor_parallel_degree"
            )
        if problems:
            raise RunFailed(". ".join(problems))

    def _publish(self, nodes: list[dict[str, Any]]) -> None:
        context = self.context
        folder = result_folder(context)
        if context.process.is_leader:
            counts = [{name: it[name] for name in ("graphs", "compiled", "failed")} for it in nodes]
            graphs, compiled = (sum(it[name] or 0 for it in counts) for name in ("graphs", "compiled"))
            context.notice(
                f"compiled {compiled} of {counted(graphs, 'graph')} on {counted(len(counts), 'node')}, none failed"
            )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SUMMARY).write_text(json.dumps({"nodes": counts}, indent=2) + "\n", encoding="utf-8")
        publish_final(
            context,
            context.store,
            folder,
            self.together,
            {"kind": "precompiled", "spec_digest": context.job.spec_digest},
        )


def _failures(node: int, counts: dict[str, Any]) -> str:
    """A node's graphs that did not compile, with the compiler's last words."""
    found = counts["failures"]
    shown = ", ".join(f"{graph}: {words[-300:]}" for graph, words in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"node {node} {counts['failed']} of {counts['graphs']} ({shown or 'see its log'}{more})"
