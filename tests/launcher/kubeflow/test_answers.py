"""Answers of an API server, or of what stands before it, that are none; credentials that end, kubeconfigs, roles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import sm_llm
from sm_llm.errors import QueryError, SmLlmError, SubmitError
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.cluster import Refused, cluster
from sm_llm.launcher.backends.kubeflow.manifest import config_map
from sm_llm.launcher.tools.clusters import check_cluster
from sm_llm.runs.run_states import RunState
from sm_llm.spec.backends.kubeflow import KubeflowOptions
from tests.fixtures.sampling import pick, sample
from tests.launcher.kubeflow.conftest import TINY, render
from tests.launcher.kubeflow.test_jobs import await_, detail, spec

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.kubernetes_double import KubernetesDouble

PAGE = b"<!DOCTYPE html><html><body>Please log in</body></html>"
ANSWERS: dict[str, int | bytes] = {
    "forbidden": 403,
    "too many requests": 429,
    "an error": 500,
    "a page of HTML": PAGE,
    "nothing": b"",
    "half of it": b'{"kind": "Pod", "metadata": {"na',
    "a list": b"[]",
    "null": b"null",
    "of something else": b'{"error": "login"}',
    "items that are none": b'{"items": [7], "metadata": {"name": "x"}}',
    "metadata that is none": b'{"metadata": 7, "items": 7}',
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_none_is_one_error_of_a_question(kubernetes: KubernetesDouble, name: str) -> None:
    """Each kind; the sweep below draws some of them for every request of a job's life."""
    found = cluster(None)
    kubernetes.faults = {len(kubernetes.requests) + it: ANSWERS[name] for it in range(99)}
    with pytest.raises((Refused, QueryError), match="double") as refused:
        found.job("PyTorchJob", "team", "x")
    assert "\n" not in str(refused.value)


def whole_life(folder: Path) -> None:
    """Launch, state, logs and stop of a job whose pods never begin."""
    run = sm_llm.launch(spec(folder))
    run.describe()
    list(run.logs())
    assert run.stop(wait=True) is RunState.STOPPED


@pytest.mark.integration
@pytest.mark.parametrize("name", sample(list(ANSWERS), 3))
def test_an_answer_that_is_none_at_any_request_is_one_error_or_none(
    ready_kubernetes: KubernetesDouble, tmp_path: Path, name: str
) -> None:
    """And afterwards the same command starts the job, or continues it."""
    ready_kubernetes.bad_images = {"image:1"}
    whole_life(tmp_path)
    count = len(ready_kubernetes.requests)
    assert count > 10
    for at in pick(range(count), 2):
        ready_kubernetes.faults = {len(ready_kubernetes.requests) + at: ANSWERS[name]}
        words = ""
        try:
            whole_life(tmp_path)
        except SmLlmError as error:
            words = str(error)
        if words:
            assert "double" in words, words
            ready_kubernetes.faults = {}
            # A job that may have been created is found; one that was not is created now.
            run = sm_llm.attach(str(max((tmp_path / "claims" / "fsx" / "runs").glob("tiny-*"))))
            if not run.state.is_final:
                run.stop(wait=True)
            whole_life(tmp_path)


def test_an_answer_of_somebody_else_is_shown_and_is_nothing_about_the_job(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    ready_kubernetes.bad_images = {"image:1"}
    run = sm_llm.launch(spec(tmp_path))
    await_(lambda: "cannot be pulled" in detail(run))
    ready_kubernetes.faults = {len(ready_kubernetes.requests): PAGE}
    assert run.state is RunState.PENDING, "asked again"
    ready_kubernetes.faults = {len(ready_kubernetes.requests) + it: PAGE for it in range(9)}
    with pytest.raises(QueryError, match=r"is no object of Kubernetes and begins with '<!DOCTYPE html>.*NO_PROXY"):
        run.describe()
    ready_kubernetes.faults = {}
    assert run.attempts[0].state is None
    run.stop()


def test_a_token_that_ends_is_renewed_by_the_command_of_its_user(kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    """Tokens of EKS last 15 minutes, and a follower of logs days."""
    kubernetes.expired = {"token-0"}
    credential = {"apiVersion": "client.authentication.k8s.io/v1beta1", "kind": "ExecCredential"}
    script = tmp_path / "token"
    script.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/asked\nn=$(wc -l < {tmp_path}/asked)\n"
        f"echo '{json.dumps({**credential, 'status': {'token': 'NUMBER'}})}' | sed s/NUMBER/token-$n/\n"
    )
    script.chmod(0o755)
    held = json.loads((tmp_path / "kubeconfig").read_text())
    command = {"apiVersion": credential["apiVersion"], "command": str(script), "args": [], "interactiveMode": "Never"}
    held["users"] = [{"name": "u", "user": {"exec": command}}]
    (tmp_path / "kubeconfig").write_text(json.dumps(held))
    found = cluster(None)
    assert found.job("PyTorchJob", "team", "x") is None
    kubernetes.expired = {"token-1"}
    [map_, _] = render(TINY).request["manifests"]
    found.put_config_map({**map_, "metadata": {**map_["metadata"], "namespace": "team"}})
    kubernetes.expired = {"token-1", "token-2"}
    assert found.pods("team", "x") == []
    assert (tmp_path / "asked").read_text().count("x") == 3, "asked when a token had ended, and not before"
    kubernetes.expired |= {"token-3", "token-4"}
    with pytest.raises(Refused, match=r"Unauthorized\. The credentials of this context are not accepted: log in again"):
        found.pods("team", "x")


CONFIGS = {
    "not YAML": ("a: [", "the kubeconfig cannot be read: while parsing"),
    "a list": ("[]", "the kubeconfig cannot be read: "),
    "a text": ("hello", "the kubeconfig cannot be read: "),
    "not text": ("\xff\x00", "the kubeconfig cannot be read: "),
    "no file": ("", "is not set, and there is no current context .*update-kubeconfig"),
    "no current context": ('"current-context": "double"', '"x": 1', "is not set, and there is no current context"),
    "another current context": ('"double"', '"other"', "is not set, and there is no current context"),
    "a command that is not there": (
        '{"token": "t"}', '{"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "/no/aws"}}',
        "double has no credentials: .*'/no/aws'. Log in again",
    ),
    "a command that fails": (
        '{"token": "t"}', '{"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "false"}}',
        "double has no credentials: exec: process returned 1. Log in again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_kubeconfig_that_cannot_be_used_is_one_error(kubernetes: KubernetesDouble, tmp_path: Path, name: str) -> None:
    *change, words = CONFIGS[name]
    file = tmp_path / "kubeconfig"
    text = change[0] if len(change) == 1 else file.read_text().replace(change[0], change[1], 1)
    file.write_text(text, encoding="latin-1")
    cluster.cache_clear()
    with pytest.raises(SubmitError, match=f"^backend.context: {words}"):
        cluster(None).job("PyTorchJob", "team", "x")


def test_a_context_is_used_where_none_is_the_current_one(kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(file.read_text().replace('"current-context": "double"', '"x": 1'))
    cluster.cache_clear()
    assert cluster("double").job("PyTorchJob", "team", "x") is None
    with pytest.raises(SubmitError, match=r"backend\.context: prod cannot be used: .*prod"):
        cluster("prod").job("PyTorchJob", "team", "x")


def test_a_config_map_of_another_run_is_left_alone(kubernetes: KubernetesDouble) -> None:
    """Two users of a namespace whose runs have one name."""
    submission = render(TINY)
    map_ = config_map(submission.job, "tiny-1", KubeflowOptions.of(submission.job.spec))
    found = cluster(None)
    found.put_config_map(map_)
    found.put_config_map(map_)
    other = submission.job.model_copy(update={"run_uri": "s3://other/runs/tiny-1"})
    theirs = config_map(other, "tiny-1", KubeflowOptions.of(submission.job.spec))
    with pytest.raises(Refused, match=r"team has a ConfigMap tiny-1 that is not of s3://other/runs/tiny-1\. Delete it"):
        found.put_config_map(theirs)
    assert kubernetes.objects["configmaps", "team", "tiny-1"]["data"] == map_["data"]


def test_who_may_not_list_jobs_or_see_events_can_run_them(ready_kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    ready_kubernetes.forbid(("list", "pytorchjobs"), ("list", "events"), ("get", "hyperpodpytorchjobs"))
    ready_kubernetes.bad_images = {"image:1"}
    run = sm_llm.launch(spec(tmp_path))
    await_(lambda: "its image cannot be pulled" in detail(run))
    name = names.object_name(run.id)
    assert sm_llm.attach(f"kubeflow://double/team/{name}").uri == run.uri
    assert cluster("double").events(ready_kubernetes.objects["pytorchjobs", "team", name]) == []
    run.stop()
    # The job goes after its pods, so that its end is theirs.
    assert any(it.startswith("DELETE") and "propagationPolicy=Foreground" in it for it in ready_kubernetes.requests)
    ready_kubernetes.forbid(("get", "pytorchjobs"), ("get", "hyperpodpytorchjobs"))
    with pytest.raises(SubmitError, match="forbidden"):
        sm_llm.attach(f"kubeflow://double/team/{names.object_name(run.id)}")


@pytest.mark.parametrize("name", sample([it for it in ANSWERS if isinstance(ANSWERS[it], bytes)], 2))
def test_answers_that_are_none_to_the_checks_of_a_cluster(
    kubernetes: KubernetesDouble, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("sm_llm.launcher.backends.kubeflow.setup.check_pod.SECONDS", 0.0)
    kubernetes.nodes = [{"metadata": {"name": "n1"}}]
    options = ("backend.image=image:1", "backend.namespace=team", "backend.service_account=a", "backend.queue=q")
    check_cluster("kubeflow", *options)
    for at in range(len(kubernetes.requests)):
        begin = len(kubernetes.requests)
        # For ever, from one request on.
        kubernetes.faults = {begin + it: ANSWERS[name] for it in range(at, 200)}
        found = check_cluster("kubeflow", *options).checks
        assert (found[0].outcome == "failed") == (at == 0)
        kubernetes.faults = {}
