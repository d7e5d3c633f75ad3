"""The Kubernetes backend: one custom resource per attempt, on HyperPod or any cluster with a training operator."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sm_llm.launcher.backend import NativeJob
from sm_llm.launcher.backends.job_backend import JobBackend
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.runs.run_paths import STEPS, RunPaths
from sm_llm.runs.run_record import Attempt
from sm_llm.spec.backends.kubeflow import KubeflowAccess, KubeflowOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backend import ClusterCheck, ClusterNode, NativeState, Submission
    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.launcher.planning.plan import Checks, Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec
    from sm_llm.spec.loading.overrides import Override


def _cluster(context: str | None) -> KubernetesCluster:
    from sm_llm.launcher.backends.kubeflow.cluster import cluster

    return cluster(context)


def _sagemaker_client(region: str) -> Any:
    import boto3

    return boto3.client("sagemaker", region_name=region)


@dataclass(frozen=True)
class KubeflowBackend(JobBackend):
    """Renders and runs jobs of Kubernetes."""

    name: str = "kubeflow"
    shell_needs: ClassVar[str] = "kubectl"
    connect: Callable[[str | None], KubernetesCluster] = _cluster
    """Context -> its cluster; injected in tests."""

    def plan_checks(self, plan: Plan) -> Checks:
        """Pods, devices, volumes and restarts, and every fault of them."""
        from sm_llm.launcher.backends.kubeflow.target import plan_checks

        return plan_checks(plan)

    def render(self, plan: Plan, job: JobFile) -> Submission:
        """The manifests, the code bundle and job.json."""
        from sm_llm.launcher.backends.kubeflow.render import render

        return render(plan, job)

    @contextmanager
    def starting(self, run_store: RunStore, number: int, submission: Submission | None) -> Iterator[Attempt]:
        """The cluster is asked whether it can run the job, and an earlier attempt whether it has ended."""
        from sm_llm.launcher.backends.kubeflow.submit import check_cluster
        from sm_llm.launcher.submission import assert_ended

        assert_ended(self, run_store)
        record = run_store.record()
        backend = record.spec["backend"] if submission is None else submission.job.spec.backend.model_dump()
        cluster = self.connect(backend.get("context"))
        # A workflow's specification may change once its attempt is claimed, so its start checks the cluster.
        if submission is not None:
            check_cluster(submission, cluster)
        # Known before the job: a launcher that dies in between leaves an attempt that leads to the job.
        name = names.object_name(record.run_id)
        native_id = names.native_id(cluster.name, str(backend.get("namespace", "default")), name)
        yield Attempt.claim(number, native_id, None if submission is None else RunPaths.request_key(number))

    def submit(self, submission: Submission) -> str:
        """Upload the code and create the job; the native id is ``CONTEXT/NAMESPACE/NAME``."""
        from sm_llm.launcher.backends.kubeflow.submit import submit

        options = KubeflowOptions.of(submission.job.spec)
        cluster = self.connect(options.context)
        submit(submission, cluster)
        return names.native_id(cluster.name, options.namespace, names.object_name(submission.job.run_id))

    def submit_workflow(self, run_store: RunStore, attempt: int) -> str:
        """Start a driver in the cluster, which starts each step behind those that it reads from."""
        from sm_llm.launcher.backends.kubeflow.workflows import start

        return start(run_store, attempt, self.connect)

    def render_workflow(
        self, workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str
    ) -> list[Submission]:
        """The manifests of every step, whose run will lie below the workflow's; with the last those of the driver."""
        from sm_llm.launcher.backends.kubeflow.workflows import submissions

        return submissions(workflow, plans, run_id, run_uri)

    def step_run_store(self, run_store: RunStore, step: str) -> RunStore:
        """A folder below the workflow's."""
        return run_store.below(STEPS, step)

    def describe(self, run_store: RunStore) -> NativeState:
        """The state of the run's newest job. One that has ended is settled in the run's record."""
        from sm_llm.launcher.backends.kubeflow import workflows

        record = run_store.record()
        last = record.attempts[-1] if record.attempts else None
        # Only of a step another attempt may have begun that its record does not hold yet.
        is_open = last is not None and (last.state is None or last.state.is_completed)
        workflow = None if is_open else workflows.above(run_store, record)
        if workflow is not None and workflow.attempts:
            cluster = self._cluster_of(workflow.attempts[-1].native_id)
            record = workflows.adopted(run_store, record, workflow, cluster)
            if (waiting := workflows.unbegun(record, workflow)) is not None:
                return waiting
        return super().describe(run_store)

    def open_state(self, run_store: RunStore, record: RunRecord) -> NativeState:
        """From the job, its pods and what their nodes report."""
        cluster = self._cluster_of(record.attempts[-1].native_id)
        if "steps" in record.spec:
            from sm_llm.launcher.backends.kubeflow import workflows

            return workflows.state_of(run_store, record, cluster, self.describe)
        from sm_llm.launcher.backends.kubeflow.jobs import state_of

        return state_of(run_store, record, cluster)

    def logs(
        self, run_store: RunStore, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]
    ) -> Iterator[str]:
        """Wanted lines of all pods, rank 0's first, over all restarts; then new ones while ``still_running``."""
        from sm_llm.launcher.backends.kubeflow.jobs import logs_of

        record = run_store.record()
        native_id = record.attempts[-1].native_id
        return logs_of(run_store, record, attempt, wanted, still_running, lambda: self._cluster_of(native_id))

    def stop(self, run_store: RunStore, attempt: Attempt, *, now: bool = False) -> None:
        """Ask the job to save and stop; one that waits, or with ``now`` any, is deleted."""
        record, cluster = run_store.record(), self._cluster_of(attempt.native_id)
        if "steps" in record.spec:
            from sm_llm.launcher.backends.kubeflow import workflows

            workflows.stop(run_store, record, cluster, self.describe, now=now)
            return
        from sm_llm.launcher.backends.kubeflow.jobs import stop_job

        stop_job(run_store, record, attempt, cluster, now=now)

    def nodes(self, overrides: Sequence[Override], fields: Mapping[str, Any]) -> list[ClusterNode]:
        """The nodes of the cluster, as its API server lists them."""
        from sm_llm.launcher.backends.kubeflow.setup.node_listing import nodes_of
        from sm_llm.spec.loading.backend_settings import backend_settings

        settings = backend_settings(KubeflowAccess, overrides, fields)
        return nodes_of(*self.connect(settings.context).nodes_and_pods())

    def check_cluster(
        self, overrides: Sequence[Override], fields: Mapping[str, Any], tell: Callable[[str], None]
    ) -> Iterator[ClusterCheck]:
        """Rights, operator, plugins, claims, accounts, queue, HyperPod's settings and, by a pod, the image."""
        from sm_llm.launcher.backends.kubeflow.setup.cluster_checks import checks
        from sm_llm.spec.loading.backend_settings import backend_settings

        options = backend_settings(KubeflowOptions, overrides, fields)
        return checks(options, self.connect(options.context), tell, _sagemaker_client)

    def shell_command(self, run_store: RunStore, native_id: str, node: int) -> list[str]:
        """kubectl's command that opens a shell in a pod."""
        from sm_llm.launcher.backends.kubeflow.jobs import shell_command

        return shell_command(run_store, native_id, node, self._cluster_of(native_id))

    def parse_native(self, text: str) -> NativeJob | None:
        """``kubeflow://CONTEXT/NAMESPACE/NAME``."""
        scheme, separator, native = text.partition("://")
        found = names.split_native(native)
        if not separator or scheme != self.name or found is None:
            return None
        _, namespace, name = found

        def find_run() -> str | None:
            from sm_llm.launcher.backends.kubeflow.jobs import first_job
            from sm_llm.launcher.backends.kubeflow.manifest import KINDS

            # A cluster has one of the operators or both; the URI does not name the kind. Job: a workflow's driver.
            job = first_job(self._cluster_of(native), (*KINDS, "Job"), namespace, name)
            location = str(((job or {}).get("metadata") or {}).get("annotations", {}).get(names.RUN_ANNOTATION, ""))
            # An annotation may hold anything; only what has the form of a run's address is taken for one.
            return location if location.startswith(("/", "s3://")) else None

        return NativeJob(text, find_run)

    def _cluster_of(self, native_id: str) -> KubernetesCluster:
        from sm_llm.launcher.backends.kubeflow.jobs import parts

        return self.connect(parts(native_id)[0])
