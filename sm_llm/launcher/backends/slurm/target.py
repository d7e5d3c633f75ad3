"""What is decided for a job on Slurm before its script is written, and what stands against it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, warning
from sm_llm.launcher.backends.cluster_program import PROGRAM_CHECKERS
from sm_llm.launcher.backends.slurm.paths import IN_CONTAINER
from sm_llm.launcher.job_inputs import output_folders
from sm_llm.launcher.planning.bundle import local_source
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.launcher.planning.plan import Checks
from sm_llm.spec.backends.slurm import SlurmOptions
from sm_llm.spec.inputs import FileSystemInput, input_location
from sm_llm.spec.job_machines import machines
from sm_llm.spec.references import outputs, patterns, sources
from sm_llm.spec.tasks import ScriptTask, starts_ranks
from sm_llm.spec.validation.runner import errors_of, run
from sm_llm.storage.uri import fill, parse, run_and_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.planning.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.validation.runner import Checker

SIGNAL_SECONDS = 180
MAX_REQUEUES = 20
# NeuronCores of a Neuron device, as the runtime counts them.
_CORES_OF_DEVICE = {"trn1": 2, "trn1n": 2, "trn2": 4}
# pyxis separates mounts by : and , and writes each into a line of enroot's fstab, in which blanks separate fields.
_NOT_MOUNTABLE = re.compile(r"[\s:,\\$]")
# An argument or variable that is one absolute path, or ``NAME=PATH``.
_PATH = re.compile(r"(?:--?[\w.-]+=|[\w.-]+=)?(/[^\s:;,=]+)")
# Folders that every image has of its own.
_OF_IMAGES = ("/bin", "/dev", "/etc", "/lib", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var")


@dataclass(frozen=True)
class SlurmTarget:
    """The decisions for one job."""

    nodes: int
    processes: int
    """Per node."""
    python: str
    mounts: tuple[str, ...]
    """Folders that a container sees, each at its own path."""
    outputs: tuple[str, ...]
    """Folders that the task writes to, beside the storage and our own."""
    devices: str
    """``nvidia:8`` or ``neuron:16``: what every node must have; empty where that is not known."""
    signal_seconds: int | None
    """Before the time limit; None without a limit."""
    max_requeues: int | None
    """None where Slurm does not requeue the job."""
    facts: dict[str, str]
    """The decisions in words."""
    entry: str
    program: SourceTree | None = None
    """The files of the user's program, where they are on this machine."""

    @property
    def command(self) -> tuple[tuple[str, ...], ...]:
        """What runs on every node; the rendezvous follows from the nodes that Slurm gives."""
        argv = ("torchrun", f"--nnodes={self.nodes}", f"--nproc-per-node={self.processes}")
        return tuple((*argv, f"--node-rank={node}", self.entry) for node in range(self.nodes))


def plan_checks(plan: Plan) -> Checks:
    """What is decided for a job, and every issue of it. Contacts nothing."""
    job = plan.job
    options = SlurmOptions.of(job)
    program = local_source(job.task.source) if isinstance(job.task, ScriptTask) else None
    asked = ClusterRequest(job, options, program)
    issues = run(BACKEND_CHECKERS, asked)
    issues += run(PROGRAM_CHECKERS, asked, issues)
    return Checks(None if errors_of(issues) else _decide(job, options, program), tuple(issues))


def _decide(job: JobSpec, options: SlurmOptions, program: SourceTree | None) -> SlurmTarget:
    venv = options.virtual_environment
    return SlurmTarget(
        nodes=job.compute.instance_count,
        # What starts no ranks runs once on each node.
        processes=job.compute.processes if starts_ranks(job.task) else 1,
        # In a container python3 is that of the image.
        python=f"{venv}/bin/python" if venv is not None else "python3",
        mounts=_mounts(job, options) if options.container_image is not None else (),
        outputs=_outputs(job, options),
        devices=_devices(job, options),
        signal_seconds=None if options.time_limit_minutes is None else options.signal_seconds or SIGNAL_SECONDS,
        max_requeues=_max_requeues(options),
        facts=_facts(options),
        entry=f"{job.task.kind}.py",
        program=program,
    )


def _max_requeues(options: SlurmOptions) -> int | None:
    if options.retry != "requeue":
        return None
    return MAX_REQUEUES if options.max_requeues is None else options.max_requeues


def _facts(options: SlurmOptions) -> dict[str, str]:
    again = {
        "requeue": f"Slurm requeues the job, {_max_requeues(options)} times at most, at its time limit included",
        "auto-resume": "HyperPod replaces faulty nodes and starts the step again",
        "none": "nobody starts the job again",
    }
    limit = options.time_limit_minutes
    return {
        "cluster": f"through {options.ssh_host}" if options.ssh_host is not None else "of this machine",
        "partition": options.partition or "the cluster's default",
        "software": options.container_image or options.virtual_environment or "",
        "code": f"{options.shared_folder}/bundles",
        "time limit": "the partition's" if limit is None else f"{limit} minutes",
        "after a fault": again[options.retry],
    }


def _devices(job: JobSpec, options: SlurmOptions) -> str:
    row = next(iter(machines(job)), None)
    if row is not None and row.is_neuron:
        return f"neuron:{row.accelerators // _CORES_OF_DEVICE[row.family]}"
    # Only a job that has the whole node must find all its GPUs.
    if row is not None and row.is_gpu and options.exclusive:
        return f"nvidia:{row.accelerators}"
    return ""


def _mounts(job: JobSpec, options: SlurmOptions) -> tuple[str, ...]:
    """Every folder that the specification names, without those that lie below another."""
    paths = [PurePosixPath(it) for it in dict.fromkeys([*_own_folders(job, options), *_locations(job).values()])]
    return tuple(str(it) for it in paths if not any(other in it.parents for other in paths))


def _own_folders(job: JobSpec, options: SlurmOptions) -> list[str]:
    storage = parse(fill(job.storage, run_name=job.name)).path
    return [options.shared_folder, options.scratch_folder, *([str(storage)] if storage is not None else [])]


def _outputs(job: JobSpec, options: SlurmOptions) -> tuple[str, ...]:
    own = [PurePosixPath(it) for it in _own_folders(job, options)]
    named = [PurePosixPath(it) for it in output_folders(job).values()]
    return tuple(str(it) for it in named if not any(it.is_relative_to(other) for other in own))


def _locations(job: JobSpec) -> dict[str, str]:
    """Dotted path -> folder or file of the cluster that the job reads or writes beside its storage."""
    inputs = {f"inputs.{name}": input_location(value) for name, value in job.inputs.items()}
    named = {**_sources_outside_bundle(job), **inputs}
    secrets = {name: it.partition(":")[2] for name, it in job.secrets.items() if it.startswith("file:")}
    named |= {f"secrets.{name}": it for name, it in secrets.items()}
    found: dict[str, str] = {}
    for path, location in named.items():
        # RUN@STEP is a checkpoint in the folder RUN.
        folder = local_folder(run_and_step(location)[0])
        # What is relative and not there may be the name of a model in the hub.
        if folder is not None and (location.startswith(("/", "~", "file:")) or folder.exists()):
            found[path] = str(folder)
    found |= {path: _fixed_part(it) for path, it in patterns(job).items() if it.startswith("/")}
    return found | {path: str(folder) for path, folder in output_folders(job).items()}


def _sources_outside_bundle(job: JobSpec) -> dict[str, str]:
    """What the task reads, without a program of this machine: nodes need not see where it was."""
    is_packed = isinstance(job.task, ScriptTask) and local_source(job.task.source) is not None
    return {path: it for path, it in sources(job).items() if path != "task.source" or not is_packed}


def _fixed_part(pattern: str) -> str:
    """The folder or file below which all matches of a pattern lie."""
    parts = PurePosixPath(pattern).parts
    wild = next((index for index, part in enumerate(parts) if any(it in part for it in "*?[{")), len(parts))
    return str(PurePosixPath(*parts[:wild]))


@dataclass(frozen=True)
class ClusterRequest:
    """A job, and what it asks of the cluster."""

    job: JobSpec
    options: SlurmOptions
    program: SourceTree | None
    """The files of the user's program, where they are on this machine."""


def check_environment(asked: ClusterRequest) -> Iterator[Issue]:
    """Either an image or a virtual environment."""
    options = asked.options
    if (options.container_image is None) == (options.virtual_environment is None):
        both = options.container_image is not None
        problem = "cannot be set beside backend.virtual_environment" if both else "is not set, and no environment is"
        remedy = "Give one of them: an image for pyxis, or a virtual environment that all nodes see"
        yield Issue("environment-not-one", "backend.container_image", problem, options.container_image, remedy)


def check_limits(asked: ClusterRequest) -> Iterator[Issue]:
    """A signal that leaves no time to train."""
    options = asked.options
    limit, signal = options.time_limit_minutes, options.signal_seconds or SIGNAL_SECONDS
    # 30 times the minutes are half of the limit in seconds.
    if limit is not None and signal > 30 * limit:
        problem = f"must be at most half of the time limit, which is {60 * limit} s"
        yield Issue("signal-too-early", "backend.signal_seconds", problem, signal, "Raise backend.time_limit_minutes")


def check_effects(asked: ClusterRequest) -> Iterator[Issue]:
    """Options that are set and have no effect beside others."""
    options = asked.options
    found = {
        "container_mounts": ("backend.container_image", options.container_image is None),
        "signal_seconds": ("backend.time_limit_minutes", options.time_limit_minutes is None),
        "max_requeues": ("backend.retry=requeue", options.retry != "requeue"),
        "gpus_per_node": ("backend.exclusive=false: whole nodes come with all their GPUs", options.exclusive),
    }
    for name, (needed, is_idle) in found.items():
        if is_idle and (value := getattr(options, name)) not in (None, []):
            problem = f"has no effect without {needed}"
            yield Issue("slurm-option-without-effect", f"backend.{name}", problem, value, "Leave it out, or set both")


def check_locations(asked: ClusterRequest) -> Iterator[Issue]:
    """Places that the nodes do not see, or that pyxis cannot mount."""
    job, options = asked.job, asked.options
    storage = parse(fill(job.storage, run_name=job.name)).path
    remedy = "Give the folder where it is mounted"
    reached: list[tuple[str, str, str, str]] = [
        (f"inputs.{name}", value.uri, "cannot be mounted by Slurm", remedy)
        for name, value in job.inputs.items()
        if isinstance(value, FileSystemInput)
    ]
    if options.ssh_host is not None:
        if storage is not None:
            remedy = "Use s3://bucket/folder, or work on the login node"
            reached.append(("storage", job.storage, "is a folder of this machine", remedy))
        remedy = "Give its absolute path on the cluster, or its address in S3"
        problem = f"is a folder of this machine, and the job runs on {options.ssh_host}"
        named = {**_sources_outside_bundle(job), **{path: outputs(job)[path] for path in output_folders(job)}}
        reached += [(path, it, problem, remedy) for path, it in named.items() if _is_of_this_machine(it)]
    for path, location, problem, remedy in reached:
        yield Issue("place-out-of-reach", path, problem, location, remedy)
    if storage is not None and not str(storage).isprintable():
        problem = "holds characters that no line of a batch script can"
        yield Issue("place-unprintable", "storage", problem, job.storage, "Rename the folder")
    if options.container_image is not None:
        own = {f"backend.{name}": getattr(options, name) for name in ("shared_folder", "scratch_folder")}
        mounts = {f"backend.container_mounts.{index}": it for index, it in enumerate(options.container_mounts)}
        own |= {path: it.replace(":", "/") for path, it in mounts.items()}  # its own separators
        kept = {"storage": str(storage)} if storage is not None else {}
        yield from _mount_issues({**own, **kept, **_locations(job)})


def _mount_issues(locations: Mapping[str, str]) -> Iterator[Issue]:
    for path, location in locations.items():
        if (found := _NOT_MOUNTABLE.search(location)) is not None:
            problem = f"cannot be mounted into a container: pyxis takes no {found[0]!r} in a path"
            remedy = "Rename the folder, or use a virtual environment"
            yield Issue("place-not-mountable", path, problem, location, remedy)


def check_unmounted(asked: ClusterRequest) -> Iterator[Issue]:
    """Paths in arguments and variables: a container finds those of the cluster only below its mounts."""
    job, options = asked.job, asked.options
    if options.container_image is None:
        return
    own = [(it if ":" not in it else it.split(":")[1]) for it in options.container_mounts]
    seen = [*_mounts(job, options), *own, IN_CONTAINER, *_OF_IMAGES]
    arguments = {} if not isinstance(job.task, ScriptTask) else {"task.args": job.task.args}
    for path, text in _texts({**arguments, "environment": job.environment}):
        match = _PATH.fullmatch(text)
        if match is not None and not any(PurePosixPath(match[1]).is_relative_to(it) for it in seen):
            message = "lies on no mount, so it is looked for in the container's image"
            remedy = "Add its folder to backend.container_mounts if it is one of the cluster"
            yield warning("path-on-no-mount", path, message, text, remedy)


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (dict, list)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _texts(part, f"{path}.{key}" if path else str(key))


def check_secrets(asked: ClusterRequest) -> Iterator[Issue]:
    """Secrets of the environment that submits the job, which it does not get."""
    job = asked.job
    for name, reference in job.secrets.items():
        if reference.startswith(("env:", "k8s:")):
            problem = "cannot be read by a job: it gets nothing of the environment that submits it"
            remedy = "Use secretsmanager:ARN, ssm:NAME or file:/PATH"
            yield Issue("secret-out-of-reach", f"secrets.{name}", problem, reference, remedy)


def _is_of_this_machine(location: str) -> bool:
    return "://" not in location and not location.startswith(("/", "builtin:", "steps.", "inputs."))


def check_use(asked: ClusterRequest) -> Iterator[Issue]:
    """What works, but is probably not meant."""
    job, options = asked.job, asked.options
    if options.retry == "auto-resume" and options.gpus_per_node is not None:
        message = "HyperPod's auto-resume does nothing for jobs that ask for GRES"
        yield warning("auto-resume-beside-gres", "backend.gpus_per_node", message)
    if options.retry == "none":
        message = "after a fault of a node, or at the time limit, the run waits until fit is called again"
        yield warning("nobody-retries", "backend.retry", message)
    if job.compute.instance_type is None and starts_ranks(job.task) and job.compute.processes_per_instance is None:
        message = "is not set, and no instance type: each node runs one process"
        yield warning("one-process-of-a-node", "compute.processes_per_instance", message)


BACKEND_CHECKERS: tuple[Checker[ClusterRequest], ...] = (
    check_environment,
    check_limits,
    check_effects,
    check_locations,
    check_unmounted,
    check_secrets,
    check_use,
)
