"""Every name of a run in a cluster: of its objects and pods, labels, annotations, mount points, and its native id."""

from __future__ import annotations

import hashlib
import re

MOST_CHARACTERS = 45
"""Of a job's name. Its pods and their services get ``-worker-9999`` behind it, and may have 63 in all."""
_DIGITS = 8
_FORBIDDEN = re.compile(r"[^a-z0-9-]+")

MANAGER_LABEL, MANAGER = "app.kubernetes.io/managed-by", "sm-llm"
JOB_LABEL = "sm-llm/job"
"""Of a job and its pods: the job's name. The operators' own labels differ."""
ELASTIC_LABEL = "sm-llm/elastic"
"""Of pods whose number may change: there is no master, and the first worker is pod 0."""
RUN_ANNOTATION = "sm-llm/run"
"""Address of the run that a job is an attempt of."""
ATTEMPT_ANNOTATION = "sm-llm/attempt"
BUNDLE_ANNOTATION = "sm-llm/code-bundle"
"""Address of the code bundle."""

QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
INSTANCE_LABEL = "node.kubernetes.io/instance-type"
HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
DEEP_CHECK_LABEL = "sagemaker.amazonaws.com/deep-health-check-status"
RESUME_ANNOTATION = "sagemaker.amazonaws.com/enable-job-auto-resume"
RETRIES_ANNOTATION = "sagemaker.amazonaws.com/job-max-retry-count"

CONTAINER = "pytorch"
"""The operator's webhook refuses a job without a container of this name."""
PACKAGE_PATH = "/opt/sm_llm"
"""Below it a container sees what is ours; no image has the folder."""
CODE, JOB, SCRATCH = f"{PACKAGE_PATH}/code", f"{PACKAGE_PATH}/job", f"{PACKAGE_PATH}/scratch"
WORKFLOW = f"{PACKAGE_PATH}/workflow"
"""Where the driver of a workflow sees the manifests of its steps."""
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes mounts a pod's own service account."""
MESSAGE = "/dev/termination-log"
"""What a container leaves there, Kubernetes keeps as the message of its end."""
DRIVER = "sm-llm-workflows"
"""Service account, role and role binding of the drivers of workflows; one of each in a namespace."""
SHARED_MEMORY = "/dev/shm"
SECRETS = "/var/run/secrets/sm-llm"
"""As ``worker.inputs.secrets`` reads them; a test compares the two."""
RUNTIME = ("/dev", "/proc", "/sys", "/run/secrets", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
"""What the kernel, the container runtime and the kubelet make in every container."""
IMAGE = (
    "/bin", "/lib", "/lib64", "/sbin", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin", "/usr/local/bin",
    "/usr/local/lib",
)  # fmt: skip
"""Folders of an image without which its programs do not start."""
IN_CLUSTER = "in-cluster"
"""Stands for the context in the native id of a job that was started from inside the cluster."""


def object_name(run_id: str) -> str:
    """The name of a run's objects, the same for all its attempts: a DNS-1035 label, different for different runs.

    A run id that has to be changed or shortened ends with a hash of the whole id.
    """
    # Different characters may become the same, so what is changed gets a hash below.
    name = _FORBIDDEN.sub("-", run_id.lower()).strip("-")
    # DNS-1035 names begin with a letter, and services are named after pods.
    if not name[:1].isalpha():
        name = f"r-{name}".rstrip("-")
    if name == run_id and len(name) <= MOST_CHARACTERS:
        return name
    tail = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return f"{name[: MOST_CHARACTERS - _DIGITS - 1].rstrip('-')}-{tail}"


def native_id(context: str, namespace: str, name: str) -> str:
    """``CONTEXT/NAMESPACE/NAME``. A context may hold slashes (an EKS ARN does), the others may not."""
    return f"{context}/{namespace}/{name}"


def split_native(text: str) -> tuple[str, str, str] | None:
    """The parts of ``native_id``; None for a text that has not its form."""
    # From the right: names and namespaces hold no slash.
    context, _, rest = text.rpartition("/")
    context, _, namespace = context.rpartition("/")
    is_name = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?").fullmatch
    return (context, namespace, rest) if context and is_name(namespace) and is_name(rest) else None
