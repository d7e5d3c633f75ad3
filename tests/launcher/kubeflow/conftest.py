"""Plans and manifests for Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sm_llm
from sm_llm.contract.job_file import JobFile
from sm_llm.launcher.backends.kubeflow.backend import KubeflowBackend
from sm_llm.storage.uri import join

if TYPE_CHECKING:
    from sm_llm.launcher.backend import Submission

BACKEND: dict[str, Any] = {"name": "kubeflow", "image": "registry.example.com/train:1", "namespace": "team"}
TINY: dict[str, Any] = {
    "name": "tiny",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 64, "rows": 100},
        "max_steps": 2,
    },
    "compute": {"instance_count": 2, "processes_per_instance": 1},
    "storage": "s3://bucket/runs",
    "backend": BACKEND,
}


def tiny(**options: Any) -> dict[str, Any]:
    """The tiny job with these options of the backend."""
    return {**TINY, "backend": {**BACKEND, **options}}


def render(source: Any, attempt: int = 1, *, run_id: str = "", **fields: Any) -> Submission:
    """What would be submitted for a job whose run has a fixed id."""
    [plan] = sm_llm.plan(source, **fields)
    run_id = run_id or f"{plan.job.name}-20261128-040000-ab12"
    job = JobFile(
        run_id=run_id, attempt=attempt, run_uri=join(plan.job.storage, run_id), spec=plan.job, spec_digest=plan.digest
    )
    return KubeflowBackend().render(plan, job)


def job_of(submission: Submission) -> dict[str, Any]:
    """The custom resource."""
    found: dict[str, Any] = submission.request["manifests"][1]
    return found


def pod_of(submission: Submission, kind: str = "Master") -> dict[str, Any]:
    """The specification of the first pod."""
    spec = job_of(submission)["spec"]
    replicas = spec["pytorchReplicaSpecs"][kind] if "pytorchReplicaSpecs" in spec else spec["replicaSpecs"][0]
    found: dict[str, Any] = replicas["template"]["spec"]
    return found
