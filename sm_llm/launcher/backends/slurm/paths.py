"""Every place of a Slurm run on the cluster, in one object."""

from __future__ import annotations

from dataclasses import dataclass

from sm_llm.runs.run_paths import JOB_FILE

HERE = "localhost"
"""Place of a job in its native id, where Slurm's commands run on the machine itself."""
IN_CONTAINER = "/opt/sm_llm"
"""Where a container sees the code: nothing lies there outside, so a container that was not started is noticed."""


@dataclass(frozen=True)
class ClusterPaths:
    """Places below ``backend.shared_folder``, which may be on another machine: text, with "/"."""

    shared_folder: str

    def bundle(self, digest: str) -> str:
        """The unpacked code bundle of this digest, which all jobs that have it share."""
        return f"{self.shared_folder}/bundles/{digest}"

    def attempt(self, run_id: str, number: int) -> str:
        """What belongs to one attempt: the script, job.json, logs, requests to stop, and how it ended."""
        return f"{self.shared_folder}/jobs/{run_id}/attempt-{number}"

    def script(self, run_id: str, number: int) -> str:
        return f"{self.attempt(run_id, number)}/job.sh"

    def job_file(self, run_id: str, number: int) -> str:
        return f"{self.attempt(run_id, number)}/{JOB_FILE}"

    def log(self, run_id: str, number: int) -> str:
        """What the script and Slurm itself print; the nodes' logs are ``node-<i>.log`` beside it."""
        return f"{self.attempt(run_id, number)}/job.log"


SEPARATOR = ","
"""Between the numbers of a workflow's jobs, as squeue and scancel take them."""


def native_id(ssh_host: str | None, job_id: str) -> str:
    """``HOST/JOB``: the login node as ssh takes it, and Slurm's number of the job; of a workflow, of all its jobs."""
    return f"{ssh_host or HERE}/{job_id}"
