"""Workflows on the contract double: a driver in a pod starts the steps, by a role that allows nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import sm_llm
from sm_llm.errors import SubmitError
from sm_llm.launcher.api import preview
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.manifest_check import manifest_issues
from sm_llm.runs.run_states import RunState
from tests.launcher.kubeflow.test_jobs import TRAINING, await_, spec

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.kubernetes_double import KubernetesDouble

PREPARE = {"kind": "prepare", "seq_length": 64, "train_tokenizer": {"vocab_size": 300}}
ENDED = ("Complete", "Failed")


def flow(folder: Path, **fields: Any) -> dict[str, Any]:
    """Rows, a program that checks them, and a training that reads the rows once the program has ended well."""
    job = spec(folder)
    claim = folder / "claims" / "fsx"
    (claim / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2_000)
    (folder / "program" / "run.py").write_text(
        "import os, pathlib, sys\n"
        "print('rows', sorted(it.name for it in pathlib.Path(os.environ['SM_CHANNEL_ROWS']).iterdir()))\n"
        f"sys.exit(0 if pathlib.Path({str(claim / 'accepted')!r}).exists() else 'the rows are not accepted')\n"
    )
    data = {"format": "rows", "train": "steps.rows.output/train", "seq_length": 64}
    # So many that a stop comes before the last one.
    train = {**TRAINING, "data": data, "max_steps": 300}
    return {
        "name": "flow",
        "steps": {
            "rows": {"task": {**PREPARE, "sources": [str(claim / "corpus.txt")]}},
            "check": {"task": job["task"], "inputs": {"rows": "steps.rows.output/train"}},
            "train": {"task": train, "after": ["check"]},
        },
        "backend": {**job["backend"], "retry": "none", **fields.pop("backend", {})},
        "storage": job["storage"],
        "environment": {"OMP_NUM_THREADS": "1"},
        **fields,
    }


def test_a_dry_run_shows_the_driver_and_what_it_starts(tmp_path: Path) -> None:
    plans, found = preview(flow(tmp_path, backend={"tolerations": [{"operator": "Exists"}]}))
    assert not [it for plan in plans for it in plan.unsupported if it.code == "backend-without-workflows"]
    assert [it.request["after"] for it in found] == [[], ["rows"], ["rows", "check"]]
    *account, config_map, job = found[2].request["driver"]
    assert [it["kind"] for it in account] == ["ServiceAccount", "Role", "RoleBinding"]
    assert not [issue for it in (*account, config_map, job) for issue in manifest_issues(it)]
    for submission, step in zip(found, ("rows", "check", "train"), strict=True):
        held = json.loads(config_map["data"][f"step-{step}.json"])
        assert held == submission.request["manifests"][1]
        [main] = held["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
        assert {"name": "SM_LLM_POD_MESSAGE", "value": "/dev/termination-log"} in main["env"]
    train = found[2].job
    assert train.spec.task.data.train.endswith("/steps/rows/result/train")  # type: ignore[union-attr]
    assert train.run_id == f"{train.run_uri.split('/')[-3]}-train"
    # Applied as it is printed, it starts no step by itself.
    kinds = [it["kind"] for submission in found for it in yaml.safe_load_all(submission.document)]
    assert kinds == ["ConfigMap"] * 3 + ["ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Job"]


def test_who_may_not_see_roles_uses_the_account_that_is_there(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    """Of the roles that Kubernetes brings, the one for people who create jobs hides roles."""
    hidden = [(verb, it) for verb in ("get", "create") for it in ("roles", "rolebindings")]
    ready_kubernetes.forbid(*hidden)
    ready_kubernetes.bad_images = {"image:1"}
    job = flow(tmp_path)
    with pytest.raises(SubmitError, match=r"Workflows need the Role sm-llm-workflows in team: an administrator"):
        sm_llm.launch(job)
    assert not [key for key in ready_kubernetes.objects if key[0] in ("jobs", "serviceaccounts")]
    metadata = {"name": names.DRIVER, "namespace": "team"}
    ready_kubernetes.objects["serviceaccounts", "team", names.DRIVER] = {"metadata": metadata}
    run = sm_llm.launch(job)
    assert driver(ready_kubernetes) is not None
    run.stop()


def test_a_workflow_that_is_resumed_in_another_namespace_and_context_runs_there(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    ready_kubernetes.bad_images = {"image:1"}
    run = sm_llm.launch(flow(tmp_path))
    name = names.object_name(run.id)
    await_(lambda: "its image cannot be pulled" in str(run.describe()[1]))
    moved = flow(tmp_path, backend={"namespace": "other", "context": "second"})
    with pytest.raises(SubmitError, match="is pending already"):
        sm_llm.launch(moved)
    run.stop(wait=True)

    ready_kubernetes.add_context("second")
    with pytest.raises(SubmitError, match=r"backend\.volumes: other has no persistent volume claim fsx"):
        sm_llm.launch(moved)
    ready_kubernetes.objects["persistentvolumeclaims", "other", "fsx"] = {"metadata": {"name": "fsx"}}
    again = sm_llm.launch(moved)
    assert again.id == run.id
    assert again.attempts[-1].native_id == f"second/other/{name}"
    kinds = ("jobs", "serviceaccounts", "roles", "rolebindings", "configmaps")
    made = {key[:2] for key in ready_kubernetes.objects if key[1] == "other" or key[0] in ("jobs", "configmaps")}
    assert {it for it in made if it[0] in kinds} == {(it, "other") for it in kinds}
    files = ready_kubernetes.objects["configmaps", "other", name]["data"]
    manifests = [json.loads(text) for file, text in files.items() if file.startswith("step-")]
    assert {it["metadata"]["namespace"] for it in manifests} == {"other"}
    await_(lambda: "its image cannot be pulled" in str(again.describe()[1]))
    assert [it.describe()[0] for it in again.steps.values()] == [RunState.PENDING] * 3
    assert again.stop(wait=True) is RunState.STOPPED
    assert driver(ready_kubernetes) is None


def driver(cluster: KubernetesDouble) -> dict[str, Any] | None:
    return next((it for key, it in cluster.objects.items() if key[0] == "jobs"), None)


def has_ended(cluster: KubernetesDouble) -> bool:
    found = driver(cluster)
    return found is not None and any(it["type"] in ENDED for it in found["status"].get("conditions", ()))


def steps(run: Run) -> list[RunState]:
    return [it.state for it in run.status().steps]


def uid(cluster: KubernetesDouble, run: Run) -> str:
    found = cluster.objects["pytorchjobs", "team", names.object_name(run.id)]
    return str(found["metadata"]["uid"])


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("mounted_claim")
def test_prepare_check_train_and_a_launcher_that_is_gone(ready_kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    job = flow(tmp_path)
    run = sm_llm.launch(job)
    # Nothing of ours looks at the run until the driver has ended: it needs no process but its own.
    await_(lambda: has_ended(ready_kubernetes), 600)
    assert run.state is RunState.FAILED
    assert steps(run) == [RunState.COMPLETED, RunState.FAILED, RunState.STOPPED], "\n".join(run.steps["rows"].logs())
    assert str(run.status().reason).startswith("step check: ")
    assert "the rows are not accepted" in "\n".join(run.steps["check"].logs())
    assert run.steps["train"].describe()[1] == "a step before it has no result"
    [attached] = [sm_llm.attach(f"kubeflow://double/team/{names.object_name(run.id)}")]
    assert attached.uri == run.uri

    (tmp_path / "claims" / "fsx" / "accepted").touch()
    first = uid(ready_kubernetes, run.steps["rows"])
    again = sm_llm.launch(job)
    assert (again.id, again.continued_attempt) == (run.id, 2)
    assert again.steps["train"].describe() == (RunState.PENDING, "waits for the steps before it")
    await_(lambda: bool(again.steps["train"].attempts) or again.state.is_final, 600)
    await_(lambda: any(it.valid for it in again.steps["train"].checkpoints()))
    assert again.stop(wait=True) is RunState.INTERRUPTED
    assert driver(ready_kubernetes) is None

    last = sm_llm.launch(job)
    assert last.id == run.id
    assert last.wait() is RunState.COMPLETED
    assert uid(ready_kubernetes, run.steps["rows"]) == first, "a step with a result is not started again"
    assert [len(it.attempts) for it in last.steps.values()] == [1, 2, 2]
    assert any("rows ['" in line for line in last.steps["check"].logs())
    assert [it["step"] for it in last.metrics()] == list(range(1, 301))
    assert (last.root / "result" / "config.json").is_file()
    assert ready_kubernetes.forbidden == []


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mounted_claim")
def test_a_driver_that_may_not_create_jobs_is_the_reason_of_the_end(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    metadata = {"name": names.DRIVER, "namespace": "team"}
    ready_kubernetes.objects["roles", "team", names.DRIVER] = {"metadata": metadata, "rules": []}
    run = sm_llm.launch(flow(tmp_path))
    await_(lambda: run.state.is_final)
    assert run.state is RunState.STOPPED
    assert "step rows: it was never started: its driver: exit code 1: sm_llm: step rows: the cluster refused" in str(
        run.status().reason
    )
    assert ready_kubernetes.forbidden
