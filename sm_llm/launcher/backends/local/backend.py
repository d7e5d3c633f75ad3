"""The local backend: this machine, without docker or AWS; one torchrun per simulated node below a supervisor."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import RUN_FOLDER_ENVIRONMENT, entrypoint_source
from sm_llm.errors import Issue, warning
from sm_llm.launcher.backend import NativeJob, NativeState, Submission
from sm_llm.launcher.backends.local.container import LOOPBACK, PORT, entry_script, node_environment, rank_logs
from sm_llm.launcher.backends.local.contract import EMULATED, emulated
from sm_llm.launcher.job_inputs import rendered
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.launcher.planning.plan import Checks
from sm_llm.launcher.planning.program_checks import local_program_issues
from sm_llm.optional import missing
from sm_llm.runs.run_paths import STEPS, RunPaths, step_run_id
from sm_llm.runs.run_store import local_root
from sm_llm.spec.backends.local import LocalOptions
from sm_llm.spec.inputs import FileSystemInput, input_location
from sm_llm.spec.machines.machine import VISIBLE, Machine, this_machine
from sm_llm.spec.machines.neuron_releases import installed_packages, release_problem
from sm_llm.spec.references import sources
from sm_llm.spec.tasks import TASK_KINDS, TrainTask, starts_own_ranks, starts_ranks, training_of
from sm_llm.spec.validation.runner import run
from sm_llm.storage.uri import is_s3, join
from sm_llm.terminal import counted, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backend import Emulation
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.launcher.planning.plan import Plan, Target
    from sm_llm.runs.run_record import Attempt
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.spec.validation.runner import Checker

# So many wait in turn on any usual machine without harm, as tests of several processes do.
_MANY_PROCESSES = 8


@dataclass(frozen=True)
class LocalTarget:
    """What this machine gives a job."""

    command: tuple[tuple[str, ...], ...]
    devices: tuple[str | None, ...]
    """Of every node the GPUs, as ``CUDA_VISIBLE_DEVICES`` spells them; None where there is none."""
    threads: int
    """CPU threads of each process."""
    devices_in_words: str | None = None
    """None for tasks that compute on none."""
    elsewhere: Target | None = None
    """What the platform would give it whose contract is emulated."""

    @property
    def facts(self) -> dict[str, str]:
        """The devices that the job computes on."""
        return {"devices": self.devices_in_words} if self.devices_in_words is not None else {}


@dataclass(frozen=True)
class LocalBackend:
    """Renders and starts local runs. ``machine`` is injected in tests.

    What runs and watches processes is imported where it is used: a plan needs none of it.
    """

    machine: Machine = field(default_factory=this_machine)
    name: str = "local"

    def plan_checks(self, plan: Plan) -> Checks:
        """Devices and threads, and what this machine cannot do: more processes than GPUs, a pod's secrets, packages
        that are not installed."""
        contract = emulated(plan.job)
        elsewhere = contract.decide(plan) if contract is not None else Checks(None)
        issues = run(BACKEND_CHECKERS, Here(plan, self.machine, contract, elsewhere.issues))
        chosen = () if contract is not None else _missing_chosen_packages(plan)
        unsupported = (*_missing_packages(plan), *chosen, *_missing_cores(plan))
        return Checks(self._target(plan, elsewhere.target), tuple(issues), unsupported=unsupported)

    def _target(self, plan: Plan, elsewhere: Target | None) -> LocalTarget:
        job, paths = plan.job, RunPaths(Path("<run>"))
        nodes = range(job.compute.instance_count)
        return LocalTarget(
            command=tuple(_torchrun(job, node, "<run>-1", paths.node_dir(1, node)) for node in nodes),
            devices=tuple(self._devices(job, node) for node in nodes),
            threads=LocalOptions.of(job).threads_per_process or max(1, self.machine.cpus // job.compute.world_size),
            devices_in_words=self._devices_in_words(plan) if starts_ranks(job.task) else None,
            elsewhere=elsewhere,
        )

    def _devices_in_words(self, plan: Plan) -> str:
        """``2 of 4 GPUs``, and why, or the CPU."""
        job, gpus = plan.job, len(self.machine.gpus)
        if (own := job.environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            return f"CUDA_VISIBLE_DEVICES={own}, from environment" if own else "CPU, from environment"
        if not gpus:
            return "CPU (no NVIDIA GPU is visible)"
        # More processes than GPUs are an issue of their own (check_devices).
        used = min(gpus, job.compute.world_size)
        derived = plan.origins.get("compute.processes_per_instance", "").startswith("this machine")
        why = " (compute.processes_per_instance is not set)" if derived else ""
        return f"all {gpus} visible GPUs{why}" if used == gpus > 1 else f"{used} of {counted(gpus, 'visible GPU')}{why}"

    def render(self, plan: Plan, job: JobFile) -> Submission:
        """One argument list and environment per node; the supervisor runs exactly these."""
        paths, target = RunPaths(local_root(job.run_uri)), plan.target
        assert isinstance(target, LocalTarget)
        if (contract := emulated(job.spec)) is not None:
            return self._emulated(plan, job, target, contract)
        rendezvous = f"{job.run_id}-{job.attempt}"
        nodes = [
            {
                "argv": list(_torchrun(job.spec, node, rendezvous, paths.node_dir(job.attempt, node))),
                "env": node_environment(paths, job, node, devices, target.threads),
            }
            for node, devices in enumerate(target.devices)
        ]
        return Submission(self.name, job, {"nodes": nodes, "entrypoint": entrypoint_source(job.spec.task.kind)})

    def _emulated(self, plan: Plan, job: JobFile, target: LocalTarget, contract: Emulation) -> Submission:
        """What the platform would be sent, and the command of every one of its nodes here."""
        assert target.elsewhere is not None
        sent = contract.render(plan, job, target.elsewhere)
        paths = RunPaths(local_root(job.run_uri))
        own = {RUN_FOLDER_ENVIRONMENT: str(paths.root), "OMP_NUM_THREADS": str(target.threads)}
        found = contract.nodes(sent.request, partial(paths.node_dir, job.attempt), PORT)
        nodes = [{**node, "env": {**own, **node["env"]}} for node in found]
        return Submission(self.name, job, {"nodes": nodes, EMULATED: sent.request}, sent.uploads)

    def _devices(self, job: JobSpec, node: int) -> str | None:
        if not self.machine.gpus:
            return None
        count = job.compute.processes
        # Simulated nodes share this machine's GPUs, each node its own.
        return ",".join(self.machine.gpus[node * count : (node + 1) * count])

    def starting(
        self, run_store: RunStore, number: int, submission: Submission | None = None
    ) -> AbstractContextManager[Attempt]:
        """Hold the run's starting lock; the supervisor gives the attempt its native id."""
        from sm_llm.launcher.backends.local.local_run import starting

        return starting(run_store, number)

    def submit(self, submission: Submission) -> str:
        """Start the detached supervisor; the native id is its process id."""
        from sm_llm.launcher.backends.local.local_run import start

        return start(submission)

    def submit_workflow(self, run_store: RunStore, attempt: int) -> str:
        """Start one detached supervisor, which runs the steps in turn; the native id is its process id."""
        from sm_llm.launcher.backends.local.local_run import start_supervisor

        return start_supervisor(run_store, attempt)

    def render_workflow(
        self, workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str
    ) -> list[Submission]:
        """One submission per step, whose run will lie below the workflow's."""
        del workflow
        steps = [str(plan.step) for plan in plans]
        locations = [(step_run_id(run_id, step), join(run_uri, STEPS, step)) for step in steps]
        return [rendered(plan, *location) for plan, location in zip(plans, locations, strict=True)]

    def step_run_store(self, run_store: RunStore, step: str) -> RunStore:
        """A folder below the workflow's."""
        return run_store.below(STEPS, step)

    def describe(self, run_store: RunStore) -> NativeState:
        """The state of a local run, from its record, its lock and its final commit."""
        from sm_llm.launcher.backends.local.local_run import state as state_of

        state, reason = state_of(run_store)
        return NativeState(state, reason or "")

    def logs(
        self, run_store: RunStore, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]
    ) -> Iterator[str]:
        """Wanted lines of all nodes, rank 0's node first; then new ones while ``still_running``."""
        from sm_llm.launcher.observe.logs import fresh_logs

        return fresh_logs(run_store, attempt, still_running, wanted)

    def stop(self, run_store: RunStore, attempt: Attempt, *, now: bool = False) -> None:
        """Signal the supervisor, which passes it on to every node; from another machine, leave a stop file."""
        from sm_llm.launcher.backends.local.local_run import stop

        pid = attempt.native_id
        # A claim has no process yet, and 0 is never the id of a supervisor.
        stop(run_store, int(pid) if pid.isascii() and pid.isdigit() else 0, now=now)

    def parse_native(self, text: str) -> NativeJob | None:
        """``local://HOST/PROCESS``, of an attempt's supervisor."""
        scheme, separator, native = text.partition("://")
        if not separator or scheme != self.name:
            return None
        host, _, pid = native.rpartition("/")

        def find_run() -> str | None:
            from sm_llm.launcher.backends.local.local_run import supervised_run

            is_here = host in ("", "localhost", socket.gethostname())
            return supervised_run(int(pid)) if is_here and pid.isascii() and pid.isdigit() else None

        return NativeJob(text, find_run)


def _missing_cores(plan: Plan) -> Iterator[Issue]:
    """An engine for NeuronCores, where this environment is not that of an SDK for them."""
    training = training_of(plan.job.task)
    if training is None or training.parallelism.image_stack != "neuron":
        return
    if fault := release_problem(installed_packages()):
        prefix, strategy = f"steps.{plan.step}." if plan.step else "", training.parallelism.strategy
        holder = "task" if isinstance(plan.job.task, TrainTask) else "task.training"
        problem = f"a local run does not start NeuronCores here: {fault}"
        path = f"{prefix}{holder}.parallelism.strategy"
        remedy = "Use backend.name=sagemaker, or strategy fsdp here"
        yield Issue("local-strategy-unsupported", path, problem, strategy, remedy)


def _missing_packages(plan: Plan) -> Iterator[Issue]:
    """What every worker of this kind of task imports."""
    kind = plan.job.task.kind
    if (lack := missing("torch", *TASK_KINDS[kind].packages)) is not None:
        prefix = f"steps.{plan.step}." if plan.step else ""
        yield Issue("local-worker-package-missing", f"{prefix}task.kind", f"a local run cannot start: {lack}")


def _missing_chosen_packages(plan: Plan) -> Iterator[Issue]:
    """What the worker imports for trackers and formats that this job chooses: it runs in this very environment."""
    task, prefix = plan.job.task, f"steps.{plan.step}." if plan.step else ""
    if task.kind != "train":
        return
    sinks = task.logging.sinks
    wanted = [name for name in type(sinks).model_fields if getattr(sinks, name) is not None]
    needed = {f"task.logging.sinks.{name}": name for name in wanted}
    if task.data.format == "stream":
        needed["task.data.format"] = "datasets"
    if task.precision.compute == "fp8":
        needed["task.precision.compute"] = "torchao"
    for path, module in needed.items():
        if (lack := missing(module)) is not None:
            yield Issue("local-package-missing", f"{prefix}{path}", lack)


@dataclass(frozen=True)
class Here:
    """A plan, and the machine that it is for."""

    plan: Plan
    machine: Machine
    contract: Emulation | None = None
    """Of the platform that is emulated."""
    refused_elsewhere: tuple[Issue, ...] = ()
    """What that platform would refuse of the job."""

    @property
    def job(self) -> JobSpec:
        """The job of the plan."""
        return self.plan.job


def check_devices(here: Here) -> Iterator[Issue]:
    """NCCL needs one GPU per process."""
    job, wanted, gpus = here.job, here.job.compute.world_size, len(here.machine.gpus)
    # Whoever sets CUDA_VISIBLE_DEVICES has chosen the devices, which are then not counted here.
    if job.task.kind != "train" or "CUDA_VISIBLE_DEVICES" in job.environment or gpus == 0 or wanted <= gpus:
        return
    fitting = max(1, gpus // job.compute.instance_count)
    problem = f"{counted(wanted, 'process')} need {counted(wanted, 'GPU')}, this machine has {gpus}"
    remedy = (
        f"Ask for at most {gpus} in all (compute.processes_per_instance={fitting}),"
        " or train on the CPU with environment.CUDA_VISIBLE_DEVICES=''"
    )
    yield Issue("local-gpus-too-few", "compute", problem, wanted, remedy)


def check_processors(here: Here) -> Iterator[Issue]:
    """Devices that are named and not here, and many more processes than processors."""
    job = here.job
    if here.contract is not None or here.machine.gpus or not starts_ranks(job.task):
        return
    # Where the shell hides GPUs, the job may still show them.
    if job.environment.get(VISIBLE) and VISIBLE not in os.environ:
        message = "has no effect: this machine has no NVIDIA GPU, and the job computes on the CPU"
        yield warning("gpu-choice-without-gpu", f"environment.{VISIBLE}", message, job.environment[VISIBLE])
    processes = job.compute.world_size
    if processes > max(_MANY_PROCESSES, 2 * here.machine.cpus):
        message = f"{processes} processes share {counted(here.machine.cpus, 'core')} of this machine, and wait in turn"
        yield warning("processes-exceed-cores", "compute", message)


def check_emulation(here: Here) -> Iterator[Issue]:
    """What an emulated job needs on this machine, and inputs that its platform would not take."""
    if here.contract is not None:
        yield from here.contract.issues(here.job)


def check_s3_packages(here: Here) -> Iterator[Issue]:
    """Places in S3, which neither the plan nor a worker in this very environment can reach."""
    job = here.job
    if here.contract is not None or (lack := missing("boto3", "botocore")) is None:
        return
    inputs = {f"inputs.{name}": input_location(it) for name, it in job.inputs.items()}
    for path, location in {"storage": job.storage, **inputs, **sources(job)}.items():
        if is_s3(location):
            yield Issue("local-s3-package-missing", path, lack)


def check_program(here: Here) -> Iterator[Issue]:
    """The folder, the entry and the requirements of the user's program."""
    yield from local_program_issues(here.job)


def check_inputs(here: Here) -> Iterator[Issue]:
    """Inputs that should be on this machine and are not: a program would find an empty channel, or none."""
    for name, value in here.job.inputs.items():
        folder = None if isinstance(value, FileSystemInput) else local_folder(input_location(value))
        if folder is not None and not folder.exists():
            yield Issue(
                "local-input-not-found", f"inputs.{name}", "is not there", input_location(value), "Check the path"
            )


def check_input_contents(here: Here) -> Iterator[Issue]:
    """Inputs of programs that are probably not meant; what other tasks read is checked by its format."""
    if here.job.task.kind != "script":
        return
    for name, value in here.job.inputs.items():
        folder = None if isinstance(value, FileSystemInput) else local_folder(input_location(value))
        path, location = f"inputs.{name}", input_location(value)
        if folder is not None and folder.is_file():
            message = "is a file: the program gets its address, where SageMaker gives it a folder with the file in it"
            yield warning("local-input-is-file", path, message, location)
        elif folder is not None and folder.is_dir() and not _holds_file(folder):
            yield warning("local-input-empty", path, "holds no file", location)


def _holds_file(folder: Path) -> bool:
    try:
        return any(it.is_file() for it in folder.rglob("*"))
    except OSError:  # the job may have rights that this user lacks
        return True


def check_secrets(here: Here) -> Iterator[Issue]:
    """Secrets that this machine does not hold: what is not set in this shell, what is not there, a pod's."""
    for name, reference in here.job.secrets.items():
        path, (kind, _, location) = f"secrets.{name}", reference.partition(":")
        if kind == "k8s":
            problem = "a secret of Kubernetes cannot be read on this machine"
            remedy = "Use env:, file:, secretsmanager: or ssm:"
            yield Issue("local-secret-of-kubernetes", path, problem, reference, remedy)
        elif kind == "env" and not {**os.environ, **here.job.environment}.get(location):
            problem, remedy = "is not set in this shell, which the job inherits", f"export {quoted(location)}=..."
            yield Issue("local-secret-variable-unset", path, problem, reference, remedy)
        elif kind == "file" and not Path(location).expanduser().is_file():
            problem, remedy = "no such file on this machine", "Write the secret there, or name its file"
            yield Issue("local-secret-file-not-found", path, problem, reference, remedy)


def check_platform(here: Here) -> Iterator[Issue]:
    """What only a managed backend has: instances to rent and file systems to mount."""
    job = here.job
    if job.compute.instance_type is not None and here.contract is None:
        path, problem = "compute.instance_type", "has no effect: the local backend runs on this machine, and rents none"
        remedy = "Set it to null, and compute.processes_per_instance to what this machine can run"
        yield Issue("local-instance-type-without-effect", path, problem, job.compute.instance_type, remedy)
    for name, value in job.inputs.items():
        if isinstance(value, FileSystemInput):
            problem, remedy = "cannot be mounted on this machine", "Give the folder where it is mounted"
            yield Issue("local-input-not-mountable", f"inputs.{name}", problem, value.uri, remedy)


def check_emulated_request(here: Here) -> Iterator[Issue]:
    """What keeps the platform's part of an emulated job from being decided."""
    yield from here.refused_elsewhere


BACKEND_CHECKERS: tuple[Checker[Here], ...] = (
    check_devices,
    check_processors,
    check_emulation,
    check_s3_packages,
    check_program,
    check_inputs,
    check_input_contents,
    check_secrets,
    check_platform,
    check_emulated_request,
)


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
        # All nodes are known before the start, so no rendezvous service is needed.
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
    """Processes per node that torchrun starts; a shell script starts its own, and so does the precompile task."""
    return 1 if starts_own_ranks(job.task) else job.compute.processes
