"""The local backend: this machine, without docker or AWS; one torchrun per simulated node below a supervisor."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.entrypoint import entrypoint_source
from sm_llm.contract.job_file import RUN_FOLDER_ENVIRONMENT
from sm_llm.errors import Fault, SubmitError
from sm_llm.launcher.backends.base import NativeState, Submission
from sm_llm.launcher.backends.local.container import LOOPBACK, PORT, entry_script, node_environment, rank_logs
from sm_llm.launcher.backends.local.rehearsal import is_rehearsed, rehearsal_faults
from sm_llm.launcher.planning.review import Review
from sm_llm.launcher.planning.source_faults import local_program_faults
from sm_llm.optional import missing
from sm_llm.runs.run_home import local_root
from sm_llm.runs.run_paths import STEPS, RunPaths
from sm_llm.spec.backends import LocalBackend as LocalOptions
from sm_llm.spec.inputs import FileSystemInput, input_place
from sm_llm.spec.loading.references import sources
from sm_llm.spec.machines.machine import Machine, this_machine
from sm_llm.spec.tasks import ScriptTask, starts_ranks
from sm_llm.storage.uri import is_s3
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.observe.logs import LogFilter
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_home import RunHome
    from sm_llm.runs.run_record import Attempt
    from sm_llm.spec.job import JobSpec


@dataclass(frozen=True)
class LocalBackend:
    """Renders and starts local runs. ``machine`` is injected in tests.

    What runs and watches processes is imported where it is used: a plan needs none of it.
    """

    machine: Machine = field(default_factory=this_machine)
    name: str = "local"

    def check(self, job: JobSpec) -> list[Fault]:
        """What this machine cannot do: more processes than GPUs, trackers that are not installed, a pod's secrets."""
        own = rehearsal_faults(job) if is_rehearsed(job) else _package_faults(job)
        return [
            *self._device_faults(job),
            *own,
            *local_program_faults(job),
            *_secret_faults(job),
            *_platform_faults(job),
        ]

    def _device_faults(self, job: JobSpec) -> list[Fault]:
        """NCCL needs one GPU per process."""
        wanted = job.compute.world_size
        gpus = len(self.machine.gpus)
        if job.task.kind != "train" or "CUDA_VISIBLE_DEVICES" in job.environment or gpus == 0 or wanted <= gpus:
            return []
        fitting = max(1, gpus // job.compute.instance_count)
        remedy = (
            f"Ask for at most {gpus} in all (compute.processes_per_instance={fitting}),"
            " or train on the CPU with environment.CUDA_VISIBLE_DEVICES=''"
        )
        return [Fault("compute", f"{wanted} processes need {wanted} GPUs, this machine has {gpus}", wanted, remedy)]

    def review(self, plan: Plan) -> Review:
        """Nothing is wrong beyond the job itself. The devices it computes on are a fact to show."""
        return Review(facts={"devices": self._devices_in_words(plan)} if starts_ranks(plan.job.task) else {})

    def _devices_in_words(self, plan: Plan) -> str:
        """``2 of 4 GPUs``, and why, or the CPU."""
        job, gpus = plan.job, len(self.machine.gpus)
        if (own := job.environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            return f"CUDA_VISIBLE_DEVICES={own}, from environment" if own else "CPU, from environment"
        if not gpus:
            return "CPU (no NVIDIA GPU is visible)"
        used = min(gpus, job.compute.world_size)
        derived = plan.origins.get("compute.processes_per_instance", "").startswith("this machine")
        why = " (compute.processes_per_instance is not set)" if derived else ""
        return (
            f"all {gpus} visible GPUs{why}"
            if used == gpus > 1
            else f"{used} of {gpus} visible GPU{'s' if gpus > 1 else ''}{why}"
        )

    def command(self, job: JobSpec) -> tuple[tuple[str, ...], ...]:
        """The command of every node, with ``<run>`` for the folder and id that are generated at launch."""
        nodes = range(job.compute.instance_count)
        paths = RunPaths(Path("<run>"))
        return tuple(_torchrun(job, node, "<run>-1", paths.node_dir(1, node)) for node in nodes)

    def render(self, plan: Plan, job: JobFile) -> Submission:
        """One argument list and environment per node; the supervisor runs exactly these."""
        paths = RunPaths(local_root(job.run_uri))
        if is_rehearsed(job.spec):
            return self._rehearsal(plan, job)
        rendezvous = f"{job.run_id}-{job.attempt}"
        nodes = [
            {
                "argv": list(_torchrun(job.spec, node, rendezvous, paths.node_dir(job.attempt, node))),
                "env": node_environment(paths, job, node, self._devices(job.spec, node), self._threads(job.spec)),
            }
            for node in range(job.spec.compute.instance_count)
        ]
        return Submission(self.name, job, {"nodes": nodes, "entrypoint": entrypoint_source(job.spec.task.kind)})

    def _rehearsal(self, plan: Plan, job: JobFile) -> Submission:
        """What SageMaker would be sent, and the toolkit's own command for every host."""
        from sm_llm.launcher.backends.local import rehearsal
        from sm_llm.launcher.backends.sagemaker.render import render

        cloud = rehearsal.as_training_job(replace(plan, job=job.spec))
        inside = job.model_copy(update={"spec": cloud.job, "channels": {}})
        sent = render(cloud, inside)
        paths = RunPaths(local_root(job.run_uri))
        own = {RUN_FOLDER_ENVIRONMENT: str(paths.root), "OMP_NUM_THREADS": str(self._threads(job.spec))}
        nodes = [
            {
                "argv": rehearsal.command(PORT),
                "env": {**own, **rehearsal.environment(sent.request, paths.node_dir(job.attempt, node))},
            }
            for node in range(rehearsal.host_count(sent.request))
        ]
        return Submission(self.name, job, {"nodes": nodes, rehearsal.TRAINING_JOB: sent.request}, sent.uploads)

    def _devices(self, job: JobSpec, node: int) -> str | None:
        if not self.machine.gpus:
            return None
        count = job.compute.processes
        return ",".join(self.machine.gpus[node * count : (node + 1) * count])

    def _threads(self, job: JobSpec) -> int:
        processes = job.compute.world_size
        assert isinstance(job.backend, LocalOptions)
        return job.backend.threads_per_process or max(1, self.machine.cpus // processes)

    def starting(
        self, home: RunHome, number: int, submission: Submission | None = None
    ) -> AbstractContextManager[Attempt]:
        """Hold the run's starting lock; the supervisor gives the attempt its native id."""
        from sm_llm.launcher.backends.local.local_run import starting

        return starting(home, number)

    def submit(self, submission: Submission) -> str:
        """Start the detached supervisor; the native id is its process id."""
        from sm_llm.launcher.backends.local.local_run import start

        return start(submission)

    def submit_workflow(self, home: RunHome, attempt: int) -> str:
        """Start one detached supervisor, which runs the steps in turn; the native id is its process id."""
        from sm_llm.launcher.backends.local.local_run import start_supervisor

        return start_supervisor(home, attempt)

    def step_home(self, home: RunHome, step: str) -> RunHome:
        """A folder below the workflow's."""
        return home.below(STEPS, step)

    def describe(self, home: RunHome) -> NativeState:
        """The state of a local run, from its record, its lock and its final commit."""
        from sm_llm.launcher.backends.local.local_run import state as state_of

        state, reason = state_of(home)
        return NativeState(state, reason or "")

    def logs(self, home: RunHome, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]) -> Iterator[str]:
        """Wanted lines of all nodes, rank 0's node first; then new ones while ``still_running``."""
        from sm_llm.launcher.observe.logs import fresh_logs

        return fresh_logs(home, attempt, still_running, wanted)

    def stop(self, home: RunHome, attempt: Attempt, *, now: bool = False) -> None:
        """Signal the supervisor, which passes it on to every node; from another machine, leave a stop file."""
        from sm_llm.launcher.backends.local.local_run import stop

        pid = attempt.native_id
        stop(home, int(pid) if pid.isascii() and pid.isdigit() else 0, now=now)

    def shell_command(self, home: RunHome, native_id: str, node: int) -> list[str]:
        """None: a local run has no container to enter."""
        raise SubmitError(f"{home.uri}: a local run is in no container; its processes and files are on this machine")

    def native_uri(self, attempt: Attempt) -> str:
        """``local://HOST/PROCESS``, of the attempt's supervisor."""
        return f"{self.name}://{attempt.host or socket.gethostname()}/{attempt.native_id}"

    def find(self, native: str) -> str | None:
        """The run's address, if its supervisor lives on this machine."""
        from sm_llm.launcher.backends.local.local_run import supervised_run

        host, _, pid = native.rpartition("/")
        if host not in ("", "localhost", socket.gethostname()) or not pid.isdigit():
            return None
        return supervised_run(int(pid))


def _package_faults(job: JobSpec) -> list[Fault]:
    """Workers run in this very environment, so what is not installed here is known before anything starts."""
    sinks = job.task.logging.sinks if job.task.kind == "train" else None
    wanted = [name for name in type(sinks).model_fields if getattr(sinks, name) is not None] if sinks else []
    needed: dict[str, tuple[str, ...]] = {f"task.logging.sinks.{name}": (name,) for name in wanted}
    if job.task.kind == "train" and job.task.data.format == "stream":
        needed["task.data.format"] = ("datasets",)
    places = {"storage": job.storage, **{f"inputs.{name}": input_place(it) for name, it in job.inputs.items()}}
    needed |= {path: ("boto3", "botocore") for path, place in {**places, **sources(job)}.items() if is_s3(place)}
    return [Fault(path, lack) for path, modules in needed.items() if (lack := missing(*modules)) is not None]


def _secret_faults(job: JobSpec) -> list[Fault]:
    """Secrets that this machine does not hold: what is not set in this shell, what is not there, a pod's."""
    faults = []
    for name, reference in job.secrets.items():
        kind, _, place = reference.partition(":")
        if kind == "k8s":
            remedy = "Use env:, file:, secretsmanager: or ssm:"
            faults.append((name, "a secret of Kubernetes cannot be read on this machine", reference, remedy))
        elif kind == "env" and not {**os.environ, **job.environment}.get(place):
            faults.append(
                (name, "is not set in this shell, which the job inherits", reference, f"export {quoted(place)}=...")
            )
        elif kind == "file" and not Path(place).expanduser().is_file():
            faults.append((name, "no such file on this machine", reference, "Write the secret there, or name its file"))
    return [Fault(f"secrets.{name}", *told) for name, *told in faults]


def _platform_faults(job: JobSpec) -> list[Fault]:
    """What only a managed backend has: instances to rent and file systems to mount."""
    faults = []
    if job.compute.instance_type is not None and not is_rehearsed(job):
        remedy = "Set it to null, and compute.processes_per_instance to what this machine can run"
        faults.append(Fault("compute.instance_type", "this machine is what it is", job.compute.instance_type, remedy))
    for name, value in job.inputs.items():
        if isinstance(value, FileSystemInput):
            remedy = "Give the folder where it is mounted"
            faults.append(Fault(f"inputs.{name}", "cannot be mounted on this machine", value.uri, remedy))
    return faults


def _torchrun(job: JobSpec, node: int, rendezvous_id: str, base: Path) -> tuple[str, ...]:
    """The argument list of one node. Restarts are the launcher's business alone, so torchrun's stay 0."""
    # One process prints into the node's log itself; of several, torchrun labels the lines.
    tee = ("--tee=3",) if _processes(job) > 1 else ()
    return (
        sys.executable,
        "-P",  # the working folder is the user's; its files are not modules of ours
        "-m",
        LOOPBACK,
        "torch.distributed.run",
        f"--nnodes={job.compute.instance_count}",
        f"--nproc-per-node={_processes(job)}",
        f"--node-rank={node}",
        "--rdzv-backend=static",
        f"--rdzv-id={rendezvous_id}",
        "--master-addr=127.0.0.1",
        f"--master-port={PORT}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        f"--log-dir={rank_logs(base)}",  # else every run leaves a folder in the machine's temporary one
        *tee,
        str(entry_script(base, job.task.kind)),
    )


def _processes(job: JobSpec) -> int:
    """Processes per node; a shell script starts its own."""
    return 1 if isinstance(job.task, ScriptTask) and not starts_ranks(job.task) else job.compute.processes
