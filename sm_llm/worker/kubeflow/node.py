"""The program of a pod: checks it, lays out the worker's folders, meets the other pods, runs the processes of the task.

``node.py torchrun|hyperpodrun PODS PROCESSES ENTRY [SIZES SECONDS]``. Under Kubeflow's operator, which restarts pods
one by one, the pods find each other by ``group``; under HyperPod's its agent ``hyperpodrun`` does all that, and runs in
their place. SIZES (``1,2``) are the numbers of pods that may begin after SECONDS without the others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.parent import end_with_parent
from sm_llm.worker.kubeflow.group import Group
from sm_llm.worker.kubeflow.start_steps import STOPPED
from sm_llm.worker.node_setup.container_folders import STEPPED, make_container_folders, run_folder, user_folder
from sm_llm.worker.node_setup.preflight import Expected, node_issues

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from sm_llm.worker.kubeflow.group import GroupStart

BAD_POD = 78
"""Exit code of a pod that is unfit: EX_CONFIG of sysexits.h."""
LOST_PEER = 75
"""Exit code after the loss of another pod: EX_TEMPFAIL. The operator starts this pod again, too."""
ENDED = 143
"""Exit code after SIGTERM, whatever the processes returned: with 0 the operator would take a pod that is evicted for
one that has done its work, and the job for complete."""
END_SECONDS = 600.0
"""How long pods may end after the first, which publishes what the others have finished."""
GRACE_SECONDS = 30.0
"""After the loss of a pod the processes may still find out and report why, then they are killed."""
_POLL_SECONDS = 0.5
# The operator's variables; of its ranks and sizes some releases count pods, others processes (kubeflow/trainer#1947).
_TORCHRUN_DEFAULTS = re.compile(r"PET_.*|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT")


@dataclass(frozen=True)
class Pod:
    """This pod of the job, from its variables and job.json."""

    environ: Mapping[str, str]
    runner: str
    pods: int
    processes: int
    entry: str
    sizes: tuple[int, ...] = ()
    wait_seconds: float = 0.0

    @classmethod
    def of(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> Pod:
        """From the arguments of ``main``."""
        runner, pods, processes, entry, *elastic = arguments
        if not elastic:
            return cls(environ, runner, int(pods), int(processes), entry)
        sizes, seconds = elastic
        return cls(environ, runner, int(pods), int(processes), entry, tuple(map(int, sizes.split(","))), float(seconds))

    @property
    def name(self) -> str:
        return self.environ["SM_LLM_POD_NAME"]

    @property
    def index(self) -> int:
        """The master is pod 0, the first worker pod 1; pods of other types are numbered as they are named."""
        # From the name, which follows the replica: releases of the operator number RANK differently.
        job, _, number = self.name.rpartition("-")
        # Where the number of pods may change there is no master, and the first worker is pod 0.
        return int(number) + (1 if job.endswith("-worker") and not self.sizes else 0)

    @cached_property
    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(self.environ["SM_LLM_JOB_FILE"]).read_text(encoding="utf-8"))
        return found

    @property
    def of_user(self) -> Path:
        """This user's folder on the disk, which may be the node's own, and be shared with other pods."""
        return user_folder(self.environ["SM_LLM_POD_SCRATCH"])

    @property
    def base(self) -> Path:
        """The worker's folders, the same after a restart of the container."""
        return self.of_user / str(self.job["run_id"]) / f"node-{self.index}"

    @property
    def address(self) -> tuple[str, int]:
        """Where the first pod is: the operator makes a service for it."""
        if self.sizes:
            host, _, port = self.environ["PET_RDZV_ENDPOINT"].rpartition(":")
            return host, int(port)
        return self.environ["MASTER_ADDR"], int(self.environ["MASTER_PORT"])

    def command(self, start: GroupStart | None) -> list[str]:
        """What runs the processes of this pod. Restarts are the operator's business, so torchrun's stay 0."""
        entry = str(Path(__file__).parents[3] / self.entry)
        pods = self.pods if start is None else len(start.members)
        common = [
            f"--nnodes={pods}", f"--nproc-per-node={self.processes}", "--max-restarts=0",
            f"--log-dir={self.base / 'scratch' / 'torchrun'}",
            *(["--tee=3"] if self.processes > 1 else []),  # one process prints into the pod's log itself
        ]  # fmt: skip
        if start is None:
            return ["hyperpodrun", "--rdzv-backend=hyperpod", *common, entry]
        rank = start.members.index(self.index)
        return [
            sys.executable, "-P", "-m", "torch.distributed.run", *common, f"--node-rank={rank}",
            "--rdzv-backend=static", f"--rdzv-id={start.rendezvous}",
            f"--master-addr={self.address[0]}", f"--master-port={start.port}", entry,
        ]  # fmt: skip

    def variables(self, start: GroupStart | None) -> dict[str, str]:
        """The environment of the processes."""
        threads = max(1, (os.cpu_count() or 1) // self.processes)
        kept = self.environ
        if start is not None:
            kept = {name: value for name, value in self.environ.items() if not _TORCHRUN_DEFAULTS.fullmatch(name)}
        found = {
            # What stands before the pod's own is a default that the user can replace; what stands after it is fixed.
            "OMP_NUM_THREADS": str(threads),
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.job["spec"]["backend"]["stop_seconds"]),
            "PYTHONUNBUFFERED": "1",
            **kept,
            "SAGEMAKER_BASE_DIR": str(self.base),
        }
        if start is None:
            return found
        if len(start.members) != self.pods:
            found["SM_LLM_JOB_FILE"] = str(self._job_of(len(start.members)))
        return {**found, "SM_LLM_STORE_SECRET": start.secret}

    def _job_of(self, pods: int) -> Path:
        """A job file for a start with fewer pods. Its global batch is given, so that steps stay the same."""
        spec = {**self.job["spec"], "compute": {**self.job["spec"]["compute"], "instance_count": pods}}
        path = self.base / "input" / "job.json"
        path.write_text(json.dumps({**self.job, "spec": spec}), encoding="utf-8")
        return path

    def expected(self) -> Expected:
        """What this pod must have."""
        uri = str(self.job["run_uri"])
        kept = [] if "://" in uri else [Path(uri)]
        devices, _, count = self.environ.get("SM_LLM_POD_DEVICES", "").partition(":")
        return Expected(
            private=self.of_user,
            writable=[self.base, *kept],
            scratch=self.base,
            mounted=kept,
            devices=devices,
            device_count=int(count or 0),
        )

    def is_asked_to_stop(self) -> bool:
        """Whether the run was asked to stop through its storage."""
        return (run_folder(self.job, self.base) / "stop").exists()


class _Termination:
    """Whether SIGTERM has come, and the process that it is passed on to."""

    def __init__(self) -> None:
        self.has_come = False
        self.process: subprocess.Popen[bytes] | None = None
        self.group: Group | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.has_come and self.group is not None:
            # First: the processes of all pods stop together, and the others would take that for the run's end.
            self.group.announce_end()
        if not self.has_come and self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.has_come = True


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run this pod's processes; returns their exit code, or one that states why another start is needed."""
    pod = Pod.of(arguments, environ)
    termination = _Termination()
    # At once: the first process of a container gets no signal that it has no handler for.
    signal.signal(signal.SIGTERM, termination)
    if issues := node_issues(pod.expected()):
        _log(f"sm_llm: pod {pod.name} is unfit: {'; '.join(issues)}")
        return BAD_POD
    make_container_folders(pod.base)
    if pod.runner != "torchrun":
        return _code(pod, _run(pod, None, None, termination), termination)
    job = f"{pod.job['run_id']}/{pod.job['attempt']}"
    group = Group(job, pod.index, pod.pods, pod.address, _log, pod.sizes, pod.wait_seconds)
    start = group.start(lambda: termination.has_come)
    if start is None:
        return ENDED
    termination.group = group
    code = _run(pod, start, group, termination)
    if code != LOST_PEER and _has_stopped(pod) and not termination.has_come and not group.have_stopped(END_SECONDS):
        code = LOST_PEER
    code = _code(pod, code, termination)
    if code == 0 and pod.index == 0:
        # The operator takes the success of this pod for that of the job, and may then delete the others.
        group.await_others(END_SECONDS)
    group.close(code)
    return code


def _code(pod: Pod, code: int, termination: _Termination) -> int:
    if termination.has_come:
        return ENDED
    # torchrun reports an orderly stop as a failure of its processes.
    if _has_stopped(pod) and code != LOST_PEER:
        if (message := pod.environ.get("SM_LLM_POD_MESSAGE")) is not None:
            Path(message).write_text(f"{STOPPED} in order", encoding="utf-8")
        return 0
    if code not in (0, LOST_PEER):
        failure = pod.base / "output" / "failure"
        lines = failure.read_text(encoding="utf-8", errors="replace").splitlines() if failure.is_file() else []
        # Kubernetes keeps the last lines of a container's log as the reason of its end.
        _log(f"sm_llm: pod {pod.index} ends with code {code}: {lines[0] if lines else 'no process reported a reason'}")
    return code


def _has_stopped(pod: Pod) -> bool:
    """Whether the processes report that they have stopped in order."""
    return (pod.base / "output" / "stopped").is_file()


def _run(pod: Pod, start: GroupStart | None, group: Group | None, termination: _Termination) -> int:
    """Run the processes to their end, or until another pod is lost."""
    moment = time.strftime("%FT%TZ", time.gmtime())
    meeting = "hyperpodrun" if start is None else f"rendezvous {start.rendezvous}"
    count = pod.pods if start is None else len(start.members)
    _log(f"--- pod {pod.index} of {count} is {pod.name}; {meeting}; {moment} ---")
    process = subprocess.Popen(
        pod.command(start),
        env=pod.variables(start),
        cwd=pod.base / "code",
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, that can be killed as a whole
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    termination.process = process
    asks = pod.job["spec"]["task"]["kind"] not in STEPPED
    given_up: float | None = None
    while True:
        try:
            code = process.wait(_POLL_SECONDS)
            return LOST_PEER if given_up is not None else code
        except subprocess.TimeoutExpired:
            if asks and pod.is_asked_to_stop():
                process.send_signal(signal.SIGTERM)
                asks = False
        if group is not None and not termination.has_come and (why := group.lost()):
            if given_up is None:
                _log(f"sm_llm: {why}; this pod ends, too, so that all of them start again together")
                given_up = time.monotonic() + GRACE_SECONDS
                if group.is_orderly:
                    process.send_signal(signal.SIGTERM)
                    given_up += float(pod.job["spec"]["backend"]["stop_seconds"])
            elif time.monotonic() > given_up:
                os.killpg(process.pid, signal.SIGKILL)


def _log(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
