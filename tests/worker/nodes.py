"""A job of several simulated nodes, each under its own torchrun, as the local backend runs it, without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from worker_jobs import job_file, search_path, train_task

from sm_llm.contract.failure import Failure
from sm_llm.contract.job_file import JOB_ENVIRONMENT, entrypoint_source
from sm_llm.launcher.backends.local.processes import reserved_port
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_paths import ContainerPaths, RunPaths
from sm_llm.runs.stopped import StopRecord
from sm_llm.spec.machines.compute import ComputeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_SECONDS = 300.0
"""For anything that a test waits for, on a busy machine. What would never happen otherwise comes much later still."""


NOTE = """
import os, pathlib
note = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "worker-" + os.environ["LOCAL_RANK"])
note.with_suffix(".new").write_text(str(os.getpid()))
note.with_suffix(".new").rename(note)
"""
"""What every worker runs first: what its torchrun has started may only stand in for it (``fixtures/preloaded.py``)."""
HOLD = """
import pathlib, time
from sm_llm.worker.tasks import train
def held(self, step, batches, take=train.Trainer.take_step):
    while step == {step} and not pathlib.Path({path!r}).exists():
        time.sleep(0.02)
    return take(self, step, batches)
train.Trainer.take_step = held
"""


def holding(step: int, path: Path) -> str:
    """Code with which every worker waits before ``step`` until ``path`` exists."""
    return HOLD.format(step=step, path=str(path))


class Nodes:
    """Starts torchrun once per node; leaving the context kills what is left.

    ``before`` is Python that every worker runs before its program: tests break things there. ``environ`` is what
    torchrun gets besides: with the fixture ``forks`` the fork server starts it and its workers. ``task`` changes fields
    of a long training; ``whole_task`` is another task, with the processes that its kind has on a node.
    """

    def __init__(
        self,
        run: Path,
        *,
        nodes: int = 2,
        processes: int = 1,
        attempt: int = 1,
        before: str = "",
        environ: dict[str, str] | None = None,
        stop_seconds: float = 60.0,
        gpus: bool = False,
        whole_task: dict[str, Any] | None = None,
        **task: Any,
    ) -> None:
        self.paths = RunPaths(run)
        self.attempt = attempt
        self._before = before
        self._environ = environ or {}
        self._nodes, self._processes, self._gpus = nodes, processes, gpus
        fields = whole_task or train_task(**{"max_steps": 4000, "logging": {"every_steps": 5}, **task})
        job = job_file(fields, run, 1, attempt)
        compute = ComputeSpec(instance_count=nodes, processes_per_instance=processes)
        backend = job.spec.backend.model_copy(update={"stop_seconds": stop_seconds})
        self.job = job.model_copy(update={"spec": job.spec.model_copy(update={"compute": compute, "backend": backend})})
        self.torchruns: list[subprocess.Popen[bytes]] = []
        self._held = ExitStack()

    def __enter__(self) -> Self:
        port = self._held.enter_context(reserved_port())
        self.torchruns = [self._start(node, port) for node in range(self._nodes)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.torchruns:
            for pid in [*children(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        self._held.close()

    def _start(self, node: int, port: int) -> subprocess.Popen[bytes]:
        base = self.container(node).base
        kind = self.job.spec.task.kind
        script = ContainerPaths(base).code / f"{kind}.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"{NOTE}\n{self._before}\n{entrypoint_source(kind)}")
        self.job.write(base / "job.json")
        command = [sys.executable, "-u", "-m", "torch.distributed.run", f"--nnodes={self._nodes}"]
        command += [f"--node-rank={node}", f"--log-dir={base / 'torchrun'}"]
        command += [f"--nproc-per-node={self._processes}", "--rdzv-backend=static", "--master-addr=127.0.0.1"]
        command += [f"--master-port={port}", "--local-addr=127.0.0.1", str(script)]
        environ = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": str(node) if self._gpus else "",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
            JOB_ENVIRONMENT: str(base / "job.json"),
            "SAGEMAKER_BASE_DIR": str(base),
            "PYTHONPATH": search_path(),
        }
        with (base / "log.txt").open("wb") as log:
            return subprocess.Popen(
                command, env={**os.environ, **environ, **self._environ}, stdout=log, stderr=subprocess.STDOUT
            )

    def container(self, node: int) -> ContainerPaths:
        return ContainerPaths(self.paths.node_dir(self.attempt, node))

    def workers(self, node: int = 0) -> list[int]:
        """Process ids of a node's workers that have started, by local rank."""
        return [int(note.read_text()) for note in sorted(self.container(node).base.glob("worker-?"))]

    def kill(self) -> None:
        """Everything at once, as a machine that is switched off."""
        for pid in [pid for node in range(self._nodes) for pid in self.workers(node)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.torchruns:
            process.kill()
        for process in self.torchruns:
            process.wait()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [
            event
            for event in read_events(self.paths.events)
            if event["kind"] == kind and event["attempt"] == self.attempt
        ]

    def log(self) -> str:
        files = [self.container(node).base / "log.txt" for node in range(self._nodes)]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-6000:]}" for file in files)

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONG_SECONDS
        while not true():
            assert time.monotonic() < deadline, f"waited in vain\n{self.log()}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(event["step"] >= step for event in self.events("step")))

    def ended(self) -> None:
        """Wait for all torchruns. A process that waits for another in a collective would do so for half an hour."""
        self.until(lambda: all(process.poll() is not None for process in self.torchruns))

    def failures(self) -> list[Failure]:
        """The text of every node's output/failure."""
        return [Failure.from_text(self.container(node).failure.read_text()) for node in range(self._nodes)]

    def stops(self) -> list[StopRecord | None]:
        """The text of every node's output/stopped."""
        return [StopRecord.read(self.container(node).stopped) for node in range(self._nodes)]


def children(pid: int) -> list[int]:
    """Direct children of a process, oldest first."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return sorted(int(child) for child in text.split())


def state(pid: int) -> str:
    """The kernel's letter for what a process is doing."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
