"""Submits an attempt: code, job.json and script are written to the shared file system, then sbatch is called once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.backends.slurm.paths import ClusterPaths
from sm_llm.launcher.backends.slurm.transport import NoAnswer
from sm_llm.launcher.submission import MayRun, keep_request
from sm_llm.spec.backends.slurm import SlurmOptions
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.backends.slurm.cluster import Cluster

HYPERPOD = "/opt/sagemaker_cluster"
"""Folder that HyperPod's nodes have, and no others."""


def check_cluster(options: SlurmOptions, cluster: Cluster) -> None:
    """Raise ``SubmitError`` for what the cluster lacks: pyxis, HyperPod's restarts, the shared folder."""
    where = cluster.transport.where
    cluster.check_commands()
    if not cluster.has_folder(options.shared_folder):
        raise SubmitError(
            f"backend.shared_folder: {where} has no folder {options.shared_folder}. Make it there, on a file system "
            "that all nodes mount at this path"
        )
    if options.container_image is not None and not cluster.has_option("container-image"):
        raise SubmitError(
            f"backend.container_image: srun on {where} has no --container-image, so pyxis is not installed or not "
            "loaded. Install it, or use backend.virtual_environment"
        )
    if options.retry != "auto-resume":
        return
    if not cluster.has_folder(HYPERPOD):
        raise SubmitError(
            f"backend.retry=auto-resume: {where} has no {HYPERPOD}, so it is not of a HyperPod cluster. Use "
            "backend.retry=requeue"
        )
    if (types := cluster.resource_types) is not None:
        echo(
            f"warning: backend.retry=auto-resume: the cluster configures GRES ({types}), and HyperPod starts no step "
            "of a job with GRES again on other nodes. Use backend.retry=requeue",
            err=True,
        )


def _submitted(cluster: Cluster, folder: str, script: str, uri: str, after: Sequence[str] = ()) -> str:
    """Submit the script once, also where the answer is lost. Raises ``MayRun`` if nobody knows whether it was."""
    try:
        return cluster.submit(folder, script, after)
    except NoAnswer as error:
        try:
            # The folder belongs to this attempt alone, so a job that works in it is this one.
            found = cluster.job_in(folder)
        except NoAnswer:
            perhaps = f"A job may have been submitted all the same; check it with: sm-llm status {quoted(uri)}"
            raise MayRun(f"{error}. {perhaps}") from error
        if found is None:
            raise
        return found.job_id


def submit(submission: Submission, cluster: Cluster) -> str:
    """Submit a claimed attempt; returns the job's id. Raises ``SubmitError``."""
    job = submission.job
    options = SlurmOptions.of(job.spec)
    paths = ClusterPaths(options.shared_folder)
    bundle = paths.bundle(submission.request["bundle"])
    # All that the job reads is there before Slurm may start it.
    for path, body in submission.uploads.items():
        if path == bundle:
            cluster.unpack(body, submission.request["bundle"], path)
        else:
            cluster.put(path, body)
    keep_request(submission)
    script = paths.script(job.run_id, job.attempt)
    cluster.put(script, submission.request["script"].encode())
    after = submission.request.get("after", [])  # a step of a workflow has it
    return _submitted(cluster, paths.attempt(job.run_id, job.attempt), script, job.run_uri, after)


def announce(job: JobFile, job_id: str, cluster: Cluster) -> None:
    """Print where a submitted job is, and how it is followed."""
    echo(
        f"submitted job {job_id} ({job.spec.compute.instance_count} nodes) through {cluster.transport.where}",
        f"its results will be in {job.run_uri}; follow it with: sm-llm logs -f {quoted(job.run_uri)}",
        err=True,
    )
