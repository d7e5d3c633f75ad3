"""One task of a Slurm job: checks its node, lays out the worker's folders, runs torchrun and stops it in order.

``node.py PROCESSES ENTRY`` on every node. Where the rendezvous is follows from the nodes of this very step: a job that
was requeued, or a step that HyperPod started again, has others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hosts import IN_ORDER, numeric
from sm_llm.contract.image_packages import WHOLE_ENVIRONMENT
from sm_llm.parent import end_with_parent
from sm_llm.worker.node_setup import forking_torchrun
from sm_llm.worker.node_setup.container_folders import STEPPED, make_container_folders, run_folder, user_folder
from sm_llm.worker.node_setup.preflight import Expected, node_issues
from sm_llm.worker.slurm import leftovers
from sm_llm.worker.slurm.nodelist import expand, keeping_positions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

BAD_NODE = 78
"""Exit code of a node that is unfit: EX_CONFIG of sysexits.h."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below the ports that kernels give to outgoing connections."""
_POLL_SECONDS = 0.5
# How long a node that cannot start waits for what the others note, which decides whether the job is tried without it.
# Longer than a container takes to start: when this task ends, srun ends only tasks that have begun.
_FITNESS_SECONDS = 600.0
NODES_ENVIRONMENT = "SM_LLM_NODES"
"""Nodes of the start before this one in the order of their ranks, as job.sh read them for all nodes alike."""


@dataclass(frozen=True)
class Node:
    """This node of the step, from Slurm's variables and job.json."""

    environ: Mapping[str, str]
    processes: int
    entry: str

    @cached_property
    def names(self) -> list[str]:
        """All nodes of this step; rank 0 runs on the first. A node that was there before keeps its place."""
        listed = self.environ.get("SLURM_STEP_NODELIST") or self.environ["SLURM_JOB_NODELIST"]
        # The same order on every node, since each of them derives its rank from it.
        names = sorted(expand(listed), key=numeric)
        # On its disk are the checkpoints of the ranks that it had.
        before = [it for it in self.environ.get(NODES_ENVIRONMENT, "").split(",") if it]
        return keeping_positions(names, before)

    @property
    def name(self) -> str:
        return self.environ["SLURMD_NODENAME"]

    @property
    def index(self) -> int:
        return self.names.index(self.name)

    @property
    def restart(self) -> int:
        """How often Slurm has started the job again."""
        return int(self.environ.get("SLURM_RESTART_COUNT") or 0)

    @property
    def folder(self) -> Path:
        """The attempt's folder on the shared file system."""
        return Path(self.environ["SM_LLM_JOB_FILE"]).parent

    @cached_property
    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        return found

    @property
    def base(self) -> Path:
        """The worker's folders on a disk of this node, the same in all attempts of a run."""
        return self.of_user / str(self.job["run_id"]) / f"node-{self.name}"

    @property
    def of_user(self) -> Path:
        """This user's folder on the disk."""
        return user_folder(str(self.job["spec"]["backend"]["scratch_folder"]))

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Id and port: of this start alone, so that no process of an earlier one can meet this one's."""
        job, step = int(self.environ["SLURM_JOB_ID"]), self.environ.get("SLURM_STEP_ID", "0")
        # Seven apart, so that a few restarts of a job do not meet the next job's port.
        port = _FIRST_PORT + (job * 7 + self.restart) % _PORTS
        return f"{job}-{self.restart}-{step}", port

    def command(self) -> list[str]:
        """What runs the processes of this node. Restarts are Slurm's business, so torchrun's stay 0."""
        rendezvous, port = self.rendezvous
        is_training = self.job["spec"]["task"]["kind"] == "train"
        return [
            sys.executable, "-P", "-m", forking_torchrun.__name__ if is_training else "torch.distributed.run",
            f"--nnodes={len(self.names)}", f"--nproc-per-node={self.processes}", f"--node-rank={self.index}",
            "--rdzv-backend=static", f"--rdzv-id={rendezvous}",
            f"--master-addr={self.names[0]}", f"--master-port={port}",
            "--max-restarts=0", f"--log-dir={self.base / 'scratch' / 'torchrun'}",
            *(["--tee=3"] if self.processes > 1 else []),  # one process prints into the node's log itself
            str(Path(__file__).parents[3] / self.entry),
        ]  # fmt: skip

    def variables(self) -> dict[str, str]:
        """The environment of torchrun."""
        threads = max(1, int(self.environ.get("SLURM_CPUS_ON_NODE") or os.cpu_count() or 1) // self.processes)
        backend = self.job["spec"]["backend"]
        return {
            # What stands before ``environ`` is a default that the user can replace; what stands after it is fixed.
            "OMP_NUM_THREADS": str(threads),
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(backend["stop_seconds"])),
            "PYTHONUNBUFFERED": "1",
            **self.environ,
            **_activation(self.environ),
            # The lock in the bundle is for images: a virtual environment is used as it is.
            **({} if backend["container_image"] else {WHOLE_ENVIRONMENT: "1"}),
            "SAGEMAKER_BASE_DIR": str(self.base),
        }

    def expected(self) -> Expected:
        """What this node must have."""
        uri, backend = str(self.job["run_uri"]), self.job["spec"]["backend"]
        kept = [] if "://" in uri else [Path(uri)]
        kept += [Path(it) for it in json.loads(self.environ.get("SM_LLM_SLURM_OUTPUTS", "[]"))]
        devices, _, count = self.environ.get("SM_LLM_SLURM_DEVICES", "").partition(":")
        return Expected(
            private=self.of_user,
            writable=[self.folder, *kept, self.base],
            scratch=self.base,
            mounted=[self.folder, *kept] if backend["container_image"] else [],
            devices=devices,
            device_count=int(count or 0),
        )

    def lay_out(self) -> None:
        """Create the worker's folders, with the order of the nodes, which the next start of the job reads as well."""
        make_container_folders(self.base)
        hosts = {"current_host": self.name, "hosts": self.names, "network_interface_name": "", IN_ORDER: True}
        (self.base / "input/config/resourceconfig.json").write_text(json.dumps(hosts), encoding="utf-8")
        if self.index == 0:
            (run_folder(self.job, self.base) / "stop").unlink(missing_ok=True)
            # For the next start, which reads it before its nodes begin.
            self.note("../nodes", ",".join(self.names))

    def await_fitness(self) -> None:
        """Wait until every node has noted whether it is fit: the end of one ends them all."""
        deadline = time.monotonic() + _FITNESS_SECONDS
        pending = set(range(len(self.names))) - {self.index}  # its own may not be there: the folder can be the fault
        while pending and time.monotonic() < deadline:
            pending = {
                it for it in pending if not any(self._fitness_file(it, kind).exists() for kind in ("fit", "unfit"))
            }
            time.sleep(_POLL_SECONDS if pending else 0)

    def _fitness_file(self, index: int, kind: str) -> Path:
        return self.folder / f"{kind}-{self.restart}-{index}"

    def note_fitness(self, kind: str) -> None:
        """Note that this node is ``fit`` or ``unfit``."""
        self.note(self._fitness_file(self.index, kind).name, f"{self.name}\n")

    def note(self, name: str, text: str = "") -> None:
        """Leave a file for the launcher and for the job's script."""
        with suppress(OSError):
            (self.folder / name).write_text(text, encoding="utf-8")


def _port_issue(port: int) -> str:
    """Why rank 0 cannot listen on ``port``; empty if it can."""
    with socket.socket() as probe:
        # As torch's store does: what an ended connection has left does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return f"port {port}, at which the processes of the job meet, cannot be used: {error.strerror or error}"
    return ""


def _activation(environ: Mapping[str, str]) -> dict[str, str]:
    """What a shell that activates this virtual environment sets, for programs that are called by name."""
    if sys.prefix == sys.base_prefix:
        return {}
    programs = str(Path(sys.prefix) / "bin")
    return {"VIRTUAL_ENV": sys.prefix, "PATH": os.pathsep.join(filter(None, [programs, environ.get("PATH")]))}


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run this node's processes; returns torchrun's exit code, 0 after a stop in order, ``BAD_NODE`` if it is unfit."""
    node = Node(environ, int(arguments[0]), arguments[1])
    # First, so that whatever fails from here on is in the log that the launcher reads. Where that cannot be written,
    # the checks below find the same, and what they print goes through srun into the job's own log.
    with suppress(OSError):
        _log_to(node.folder / f"node-{node.index}.log")
    rendezvous, port = node.rendezvous
    _log(
        f"--- job {environ['SLURM_JOB_ID']}, restart {node.restart}: node {node.index} of {len(node.names)} is "
        f"{node.name}; rendezvous {rendezvous} at {node.names[0]}:{port}; {time.strftime('%FT%TZ', time.gmtime())} ---"
    )
    if issues := node_issues(node.expected()):
        text = f"node {node.name} is unfit: {'; '.join(issues)}"
        _log(f"sm_llm: {text}")
        node.note(f"failure-{node.restart}-{node.index}", text)
        node.note_fitness("unfit")
        node.await_fitness()
        return BAD_NODE
    node.note_fitness("fit")
    if node.index == 0 and (issue := _port_issue(port)):
        _log(f"sm_llm: {issue}")
        node.note(f"failure-{node.restart}-0", f"node {node.name}: {issue}")
        # The next start has another port: this node is no worse than others.
        node.note(f"port-taken-{node.restart}")
        node.await_fitness()
        return BAD_NODE
    mark = leftovers.use(node.base)
    if swept := leftovers.sweep(node.of_user, str(node.job["run_id"]), node.name):
        _log(f"sm_llm: removed from {node.of_user} what runs had left that did not come back: {', '.join(swept)}")
    node.lay_out()
    code = _run(node)
    leftovers.leave(mark)
    # Before the exit code: torchrun reports an orderly stop as a failure of its processes.
    if (node.base / "output" / "stopped").is_file():
        if node.index == 0:
            node.note(f"stopped-{node.restart}")
        return 0
    if code:
        with suppress(OSError):
            failure = (node.base / "output" / "failure").read_text(encoding="utf-8", errors="replace")
            node.note(f"failure-{node.restart}-{node.index}", failure.strip())
    return code


def _run(node: Node) -> int:
    """Run torchrun to its end. SIGTERM reaches it once, a request to stop by what the task understands."""
    is_asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if not is_asked and process.poll() is None:
            process.send_signal(signal.SIGTERM)
        is_asked = True

    process = subprocess.Popen(
        node.command(),
        env=node.variables(),
        cwd=node.base / "code",
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Slurm signals whole process groups, and a second SIGTERM would cut short the first
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    # Only now, because the handler needs the process. A SIGTERM before this ends both (``end_with_parent``).
    signal.signal(signal.SIGTERM, stop)
    requests = [node.folder / "stop", node.folder / f"yield-{node.restart}"]
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if not is_asked and any(it.exists() for it in requests):
                if node.job["spec"]["task"]["kind"] in STEPPED:
                    if node.index == 0:
                        (run_folder(node.job, node.base) / "stop").touch(0o600)
                    # Asked once: the task itself reads the stop file from here on.
                    requests = []
                else:
                    stop(signal.SIGTERM, None)


def _log_to(path: Path) -> None:
    """Write all further output of this process and its children to the end of ``path``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _log(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
