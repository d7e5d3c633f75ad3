"""The driver of a workflow: a small Job inside of the cluster that starts the steps' jobs, and what it may do there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.manifest import KINDS, equal, identity, pod_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.spec.backends.kubeflow import KubeflowOptions

SCRIPT = "start_steps.py"
_RETRIES = 6
_RESOURCES = {"cpu": "500m", "memory": "256Mi"}


def account_objects(namespace: str) -> list[dict[str, Any]]:
    """The service account of drivers, and what it may do: create jobs of ours, and read them and pods."""
    metadata = {"name": names.DRIVER, "namespace": namespace, "labels": {names.MANAGER_LABEL: names.MANAGER}}
    rules = [
        *({"apiGroups": [it.group], "resources": [it.plural], "verbs": ["create", "get"]} for it in KINDS.values()),
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": names.DRIVER},
            "subjects": [{"kind": "ServiceAccount", "name": names.DRIVER, "namespace": namespace}],
        },
    ]


def driver_objects(
    name: str, run_uri: str, attempt: int, options: KubeflowOptions,
    steps: Mapping[str, Sequence[str]], jobs: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """ConfigMap and Job of a driver.

    Args:
        name: of both.
        run_uri: address of the workflow's run.
        attempt: of the workflow.
        options: of the workflow.
        steps: those without a result, in order, each with the steps among them that it waits for.
        jobs: step -> manifest of its job.
    """
    marks = identity(run_uri, attempt, name)
    metadata = {"name": name, "namespace": options.namespace, **marks}
    rows = [{"name": step, "after": list(after)} for step, after in steps.items()]
    data = {SCRIPT: pod_script(SCRIPT), "steps.json": json.dumps(rows) + "\n"}
    data |= {f"step-{step}.json": json.dumps(jobs[step], indent=2) + "\n" for step in steps}
    container = {
        "name": "driver",
        "image": options.image,
        "command": ["python3", "-P", f"{names.WORKFLOW}/{SCRIPT}"],
        "args": [names.WORKFLOW, names.ACCOUNT],
        "volumeMounts": [{"name": "workflow", "mountPath": names.WORKFLOW, "readOnly": True}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": equal(_RESOURCES),
    }
    pod = {
        "serviceAccountName": names.DRIVER,
        **({"imagePullSecrets": [{"name": it} for it in options.image_pull_secrets]} if options.image_pull_secrets
           else {}),
        **({"tolerations": [it.model_dump(exclude_none=True) for it in options.tolerations]} if options.tolerations
           else {}),
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": [{"name": "workflow", "configMap": {"name": name}}],
    }  # fmt: skip
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": _RETRIES,
            "ttlSecondsAfterFinished": 60 * options.keep_minutes,
            "template": {"metadata": marks, "spec": pod},
        },
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}, job
