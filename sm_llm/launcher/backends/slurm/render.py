"""Renders a plan as an sbatch script, with the code bundle and job.json that it needs on the shared file system."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import JOB_ENVIRONMENT
from sm_llm.launcher.backend import Submission
from sm_llm.launcher.backends.slurm.batch_script import BatchScript, Option
from sm_llm.launcher.backends.slurm.paths import IN_CONTAINER, ClusterPaths
from sm_llm.launcher.backends.slurm.target import SlurmTarget
from sm_llm.launcher.images.images import lock_text, stack_of
from sm_llm.launcher.planning.bundle import SOURCE_FOLDER, make_bundle
from sm_llm.runs.run_states import EXIT_CODES, RunState
from sm_llm.spec.backends.slurm import SlurmOptions
from sm_llm.spec.job_machines import network_environment
from sm_llm.storage.uri import fill, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.job import JobSpec

DEVICES_ENVIRONMENT = "SM_LLM_SLURM_DEVICES"
"""Names the accelerators that each node must have."""
OUTPUTS_ENVIRONMENT = "SM_LLM_SLURM_OUTPUTS"
"""Lists, as JSON, folders that each node must be able to write to beside its own."""
END_SECONDS = 600
"""How long nodes may end after one another: the first publishes what the others have finished."""


def render(plan: Plan, job: JobFile) -> Submission:
    """The script, the code bundle and job.json. Reads files of this machine, nothing else."""
    target = plan.target
    assert isinstance(target, SlurmTarget)
    spec = job.spec
    options = SlurmOptions.of(spec)
    paths = ClusterPaths(options.shared_folder)
    bundle = make_bundle(target.program, lock_text(stack_of(spec)))
    unpacked = paths.bundle(bundle.digest)
    code = unpacked if options.container_image is None else IN_CONTAINER
    seen = _seen_by_nodes(spec, code, has_program=target.program is not None)
    # Nothing is mounted as a channel: every place is read where it lies.
    inside = job.model_copy(update={"spec": seen, "channels": {}})
    script = _script(inside, options, target, paths, unpacked, code)
    if plan.step is not None:
        # Without the option a job whose dependency has failed would wait for ever.
        waits = [("kill-on-invalid-dep", "yes")] if plan.after else []
        script = replace(
            script, options=[*script.options, *waits], stopped_code=EXIT_CODES[RunState.INTERRUPTED]
        )  # fmt: skip
    text = script.text()
    request = {
        "host": options.ssh_host,
        "shared_folder": options.shared_folder,
        "bundle": bundle.digest,
        "script": text,
    }
    uploads = {
        unpacked: bundle.archive,
        paths.job_file(job.run_id, job.attempt): inside.model_dump_json(indent=2).encode() + b"\n",
    }
    return Submission("slurm", inside, request, uploads, text)


def _seen_by_nodes(job: JobSpec, code: str, *, has_program: bool) -> JobSpec:
    """The job as the workers read it: the user's program is in the bundle."""
    if not has_program:
        return job
    task = {**job.task.model_dump(), "source": f"{code}/{SOURCE_FOLDER}"}
    return job.model_copy(update={"task": type(job.task).model_validate(task)})


def _script(
    job: JobFile, options: SlurmOptions, target: SlurmTarget, paths: ClusterPaths, bundle: str, code: str
) -> BatchScript:
    environment = _environment(job, target, paths, code)
    is_container = options.container_image is not None
    return BatchScript(
        run_id=job.run_id,
        attempt=job.attempt,
        options=_options(job, options, target, paths),
        step_options=[
            # Without it a failed node would leave the others waiting in their collectives.
            ("kill-on-bad-exit", "1"),
            ("wait", str(END_SECONDS)),
            # srun would bind its one task of a node, and so all processes of torchrun, to the CPUs of that task.
            ("cpu-bind", "none"),
            *([("cpus-per-task", str(options.cpus_per_node))] if options.cpus_per_node is not None else []),
            *(_container(options, target, bundle, [name for name, _ in environment]) if is_container else []),
        ],
        environment=environment,
        code=code,
        folder=paths.attempt(job.run_id, job.attempt),
        python=target.python,
        processes=target.processes,
        entry=target.entry,
        absent="the container was not started" if is_container else "the shared folder is not mounted on this node",
        no_python=(
            "Take an image that holds it"
            if is_container
            else "Check backend.virtual_environment; sm-llm env create --backend slurm makes one"
        ),
        is_container=is_container,
        umask="027" if job.spec.storage_options.shared_with_group else "077",
        requeues=target.max_requeues is not None,
        time_limit=target.signal_seconds is not None,
        auto_resume=options.retry == "auto-resume",
        max_requeues=target.max_requeues,
        outputs=target.outputs,
    )


def _options(job: JobFile, options: SlurmOptions, target: SlurmTarget, paths: ClusterPaths) -> list[Option]:
    """Those of sbatch, in the order in which people look for them."""
    words = {name: getattr(options, name) for name in ("partition", "account", "qos", "reservation", "constraint")}
    limit = options.time_limit_minutes
    found: list[Option] = [
        ("job-name", job.run_id),
        ("comment", job.run_uri),
        ("nodes", str(target.nodes)),
        ("ntasks-per-node", "1"),
        *((name, value) for name, value in words.items() if value is not None),
    ]
    if options.exclusive:
        found += [("exclusive", None), ("mem", "0")]  # 0: all memory of the node
    if options.cpus_per_node is not None:
        found.append(("cpus-per-task", str(options.cpus_per_node)))
    if options.gpus_per_node is not None:
        found.append(("gpus-per-node", str(options.gpus_per_node)))
    if limit is not None:
        # B: the signal goes to the batch script alone, which passes it on as a request to save and stop.
        found += [("time", str(limit)), ("signal", f"B:USR1@{target.signal_seconds}")]
    found.append(("requeue" if target.max_requeues is not None else "no-requeue", None))
    # Slurm replaces % and a letter in this name, and reads two as one.
    log = paths.log(job.run_id, job.attempt).replace("%", "%%")
    return [*found, ("output", log), ("open-mode", "append")]  # of a restart, too


def _environment(job: JobFile, target: SlurmTarget, paths: ClusterPaths, code: str) -> list[tuple[str, str]]:
    own = dict(job.spec.environment)
    # An empty entry would be whatever folder a process works in.
    path = ":".join(it for it in own.pop("PYTHONPATH", "").split(":") if it)
    ours = {
        JOB_ENVIRONMENT: paths.job_file(job.run_id, job.attempt),
        "PYTHONPATH": f"{code}:{path}" if path else code,  # first, so that the bundle is what runs
    }
    if target.devices:
        ours[DEVICES_ENVIRONMENT] = target.devices
    if target.outputs:
        ours[OUTPUTS_ENVIRONMENT] = json.dumps(target.outputs)
    # Of the job as the nodes read it: its places are absolute. So must the storage be, below which caches lie.
    storage = parse(fill(job.spec.storage, run_name=job.spec.name)).uri
    ours |= network_environment(job.spec.model_copy(update={"storage": storage}))
    return [*{**ours, **own}.items()]


def _container(options: SlurmOptions, target: SlurmTarget, bundle: str, names: Sequence[str]) -> list[Option]:
    """pyxis' options of srun. Of variables that the image sets as well, those in ``names`` win over it."""
    # pyxis documents a place for each folder.
    own = (it if ":" in it else f"{it}:{it}" for it in options.container_mounts)
    mounts = [*(f"{it}:{it}" for it in target.mounts), f"{bundle}:{IN_CONTAINER}:ro", *own]
    return [
        ("container-image", options.container_image),
        ("container-mounts", ",".join(mounts)),
        ("container-env", ",".join(names)),
        ("no-container-mount-home", None),
    ]
