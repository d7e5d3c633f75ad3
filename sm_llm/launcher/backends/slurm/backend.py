"""The Slurm backend: one sbatch job per attempt, on HyperPod, ParallelCluster or any other cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sm_llm.launcher.backend import NativeJob
from sm_llm.launcher.backends.job_backend import JobBackend
from sm_llm.launcher.backends.slurm.paths import HERE, SEPARATOR, native_id
from sm_llm.runs.run_paths import STEPS
from sm_llm.spec.backends.slurm import SlurmAccess, SlurmOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backend import ClusterCheck, ClusterNode, ImportedImage, NativeState, Submission
    from sm_llm.launcher.backends.slurm.cluster import Cluster
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.launcher.planning.plan import Checks, Plan
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec
    from sm_llm.spec.loading.overrides import Override

_NATIVE = re.compile(rf"slurm://(?P<location>.+)/(?P<jobs>[0-9]+(?:{SEPARATOR}[0-9]+)*)")


def _cluster(ssh_host: str | None) -> Cluster:
    from sm_llm.launcher.backends.slurm.cluster import cluster

    return cluster(ssh_host)


@dataclass(frozen=True)
class SlurmBackend(JobBackend):
    """Renders and runs jobs of Slurm. ``connect`` is injected in tests."""

    name: str = "slurm"
    connect: Callable[[str | None], Cluster] = _cluster
    shell_needs: ClassVar[str] = "Slurm's commands, or ssh where backend.ssh_host is set"

    def plan_checks(self, plan: Plan) -> Checks:
        """Software, mounts, limits and restarts, and every fault of them."""
        from sm_llm.launcher.backends.slurm.target import plan_checks

        return plan_checks(plan)

    def render(self, plan: Plan, job: JobFile) -> Submission:
        """The sbatch script, the code bundle and job.json."""
        from sm_llm.launcher.backends.slurm.render import render

        return render(plan, job)

    def check_start(self, submission: Submission | None) -> None:
        """The cluster is asked whether it can run the job."""
        from sm_llm.launcher.backends.slurm.submit import check_cluster

        # A workflow's specification may change once its attempt is claimed, so its start checks the cluster.
        if submission is not None:
            options = SlurmOptions.of(submission.job.spec)
            check_cluster(options, self.connect(options.ssh_host))

    def submit(self, submission: Submission) -> str:
        """Write the files and submit the job; the native id is ``HOST/JOB``."""
        from sm_llm.launcher.backends.slurm.submit import announce, submit

        options = SlurmOptions.of(submission.job.spec)
        cluster = self.connect(options.ssh_host)
        job_id = submit(submission, cluster)
        announce(submission.job, job_id, cluster)
        return native_id(options.ssh_host, job_id)

    def submit_workflow(self, run_store: RunStore, attempt: int) -> str:
        """Submit all steps, each behind those that it reads from; the native id is ``HOST/JOB,JOB``."""
        from sm_llm.launcher.backends.slurm.workflows import start

        del attempt  # each step has attempts of its own
        return start(run_store, self.connect)

    def render_workflow(
        self, workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str
    ) -> list[Submission]:
        """One script per step, whose run will lie below the workflow's."""
        from sm_llm.launcher.backends.slurm.workflows import submissions

        return submissions(workflow, plans, run_id, run_uri)

    def step_run_store(self, run_store: RunStore, step: str) -> RunStore:
        """A folder below the workflow's."""
        return run_store.below(STEPS, step)

    def open_state(self, run_store: RunStore, record: RunRecord) -> NativeState:
        """The state of the run's newest job; of a workflow those of its steps together."""
        from sm_llm.launcher.backends.slurm import jobs

        if "steps" in record.spec:
            from sm_llm.launcher.backends.slurm import workflows

            return workflows.state_of(run_store, record, self.describe)
        is_claim = record.attempts[-1].is_claim
        return (jobs.state_of_claim if is_claim else jobs.state_of)(run_store, record, self._cluster_of(record))

    # A job whose launcher did not come to record it is found by the folder of its attempt.
    claim_state = open_state

    def logs(
        self, run_store: RunStore, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]
    ) -> Iterator[str]:
        """Wanted lines of all nodes, rank 0's node first, over all restarts; then new ones while ``still_running``."""
        from sm_llm.launcher.backends.slurm.jobs import logs_of

        record = run_store.record()
        return logs_of(run_store, record, attempt, wanted, still_running, self._cluster_of(record))

    def stop(self, run_store: RunStore, attempt: Attempt, *, now: bool = False) -> None:
        """Ask the job to save and stop; one that waits, or with ``now`` any, is cancelled."""
        from sm_llm.launcher.backends.slurm.jobs import stop_job

        record = run_store.record()
        cluster = self._cluster_of(record)
        if "steps" in record.spec:
            from sm_llm.launcher.backends.slurm import workflows

            workflows.stop(run_store, record, cluster, self.describe, now=now)
        else:
            stop_job(record, attempt, cluster, now=now)

    def nodes(self, overrides: Sequence[Override], fields: Mapping[str, Any]) -> list[ClusterNode]:
        """The nodes of a partition, or of all, as Slurm's controller sees them."""
        from sm_llm.spec.loading.backend_settings import backend_settings

        settings = backend_settings(SlurmAccess, overrides, fields)
        return self.connect(settings.ssh_host).nodes(settings.partition)

    def check_cluster(
        self, overrides: Sequence[Override], fields: Mapping[str, Any], tell: Callable[[str], None]
    ) -> Iterator[ClusterCheck]:
        """Slurm's commands, HyperPod's plugins, the shared folder and, by a small job, what nodes see."""
        from sm_llm.launcher.backends.slurm.setup.doctor import checks
        from sm_llm.spec.loading.backend_settings import backend_settings

        options = backend_settings(SlurmOptions, overrides, fields)
        return checks(options, self.connect(options.ssh_host), tell)

    def create_environment(
        self, profile: str, overrides: Sequence[Override], fields: Mapping[str, Any], tell: Callable[[str], None], *,
        python: str, wheels: str | None,
    ) -> str:  # fmt: skip
        """Build a pinned virtual environment by a job on a node, below ``backend.shared_folder``."""
        from sm_llm.launcher.backends.slurm.setup.environments import create
        from sm_llm.spec.loading.backend_settings import backend_settings

        options = backend_settings(SlurmOptions, overrides, fields)
        return create(profile, options, self.connect(options.ssh_host), tell, python=python, wheels=wheels)

    def import_image(
        self, image: str, overrides: Sequence[Override], fields: Mapping[str, Any], tell: Callable[[str], None]
    ) -> ImportedImage:
        """Import an image of ECR with enroot by a job on a node, below ``backend.shared_folder``."""
        from sm_llm.launcher.backends.slurm.setup.image_import import import_image
        from sm_llm.spec.loading.backend_settings import backend_settings

        options = backend_settings(SlurmOptions, overrides, fields)
        return import_image(image, options, self.connect(options.ssh_host), tell)

    def shell_command(self, run_store: RunStore, native_id: str, node: int) -> list[str]:
        """A step of its own on a node of the job; with pyxis it is on the node itself, not in the container."""
        from sm_llm.launcher.backends.slurm.jobs import shell_command

        record = run_store.record()
        attempt = next(it for it in record.attempts if it.native_id == native_id)
        return shell_command(record, attempt, node, self._cluster_of(record))

    def parse_native(self, text: str) -> NativeJob | None:
        """``slurm://HOST/JOB``, or ``slurm://localhost/JOB`` on a login node; of a workflow ``slurm://HOST/JOB,JOB``."""
        match = _NATIVE.fullmatch(text)
        if match is None:
            return None
        location, job_id = match["location"], match["jobs"]

        def find_run() -> str | None:
            if SEPARATOR in job_id:
                return None  # each of its jobs names the run of its own step
            row = self.connect(None if location == HERE else location).job(job_id)
            # A comment may hold anything; only what has the form of a run's address is taken for one.
            return row.comment if row is not None and row.comment.startswith(("/", "s3://")) else None

        return NativeJob(text, find_run)

    def _cluster_of(self, record: RunRecord) -> Cluster:
        return self.connect(record.spec["backend"].get("ssh_host"))
