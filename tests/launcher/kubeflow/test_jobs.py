"""Jobs on the contract double of a cluster: submit, states, logs, stops, names that are used again."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.errors import RunFailed, SubmitError
from sm_llm.launcher.backends.kubeflow import cluster as adapter
from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster, cluster
from sm_llm.launcher.backends.kubeflow.names import object_name
from sm_llm.launcher.backends.kubeflow.submit import dropped_fields
from sm_llm.launcher.tools.shell import shell_command
from sm_llm.runs.run_states import RunState
from tests.fixtures.kubernetes_double import MOUNT_ERROR, PREEMPTED, PULL_ERROR
from tests.launcher.kubeflow.conftest import TINY, job_of, render

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.kubernetes_double import KubernetesDouble

SECONDS = 600


def spec(folder: Path, program: str = "print('done')", **fields: Any) -> dict[str, Any]:
    """A program in one pod, whose runs lie on a claim that this machine sees."""
    (folder / "program").mkdir(exist_ok=True)
    (folder / "program" / "run.py").write_text(program)
    claim = folder / "claims" / "fsx"
    claim.mkdir(parents=True, exist_ok=True)
    backend = {
        "name": "kubeflow", "image": "image:1", "namespace": "team", "stop_seconds": 5,
        "volumes": [{"claim": "fsx", "path": str(claim)}],
    }  # fmt: skip
    return {
        "name": "tiny",
        "task": {"kind": "script", "entry": "run.py", "source": str(folder / "program")},
        "backend": {**backend, **fields.pop("backend", {})},
        "storage": str(claim / "runs"),
        **fields,
    }


def await_(is_reached: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def detail(run: Any) -> str:
    return str(run.describe()[1])


def test_what_the_cluster_lacks_is_named_before_anything_is_created(
    kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    job = spec(tmp_path)
    with pytest.raises(SubmitError, match=r"backend\.volumes: team has no persistent volume claim fsx"):
        sm_llm.launch(job)
    kubernetes.objects["persistentvolumeclaims", "team", "fsx"] = {"metadata": {"name": "fsx"}}
    kubernetes.drop_fields("nprocPerNode")
    with pytest.raises(SubmitError, match=r"would drop spec\.nprocPerNode of the PyTorchJob"):
        sm_llm.launch(job, new=True)
    kubernetes.remove_kinds()
    with pytest.raises(SubmitError, match=r"has no PyTorchJob\. Install its operator: kubectl apply"):
        sm_llm.launch(job, new=True)
    assert not [key for key in kubernetes.objects if key[0] in ("pytorchjobs", "configmaps")]


def test_SL02_an_image_that_cannot_be_pulled_is_shown_as_that(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    """meta-pytorch/torchx#207: the job stayed pending without a word."""
    ready_kubernetes.bad_images = {"image:1"}
    run = sm_llm.launch(spec(tmp_path))
    await_(lambda: "its image cannot be pulled" in detail(run), 30)
    assert run.state is RunState.PENDING
    assert PULL_ERROR in detail(run)
    assert "Check backend.image" in detail(run)
    assert run.stop(wait=True) is RunState.STOPPED
    assert not [key for key in ready_kubernetes.objects if key[0] == "pytorchjobs"], "a job that waits is deleted"


def test_quota_and_nodes_that_a_job_waits_for(ready_kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    ready_kubernetes.suspends, ready_kubernetes.capacity = True, 0
    run = sm_llm.launch(spec(tmp_path))
    await_(
        lambda: (
            f"waiting for quota: the queue has not admitted the job (Created Workload: {object_name(run.id)}"
            in detail(run)
        )
    )
    ready_kubernetes.admit(object_name(run.id))
    await_(lambda: "waiting for nodes" in detail(run))
    assert "Insufficient nvidia.com/gpu" in detail(run)
    assert run.state is RunState.PENDING
    run.stop()


def test_what_keeps_pods_from_being_created_or_begun_is_in_events(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    """Neither the job nor a pod states it: the namespace's ResourceQuota, and a file system that does not answer."""
    ready_kubernetes.pod_quota, ready_kubernetes.unmountable = 0, {"fsx"}
    run = sm_llm.launch(spec(tmp_path))
    await_(lambda: "its pods are being created (Error creating: pods" in detail(run))
    assert "exceeded quota" in detail(run)
    ready_kubernetes.pod_quota = 1
    await_(lambda: MOUNT_ERROR in detail(run))
    assert detail(run) == f"1 pod pending; {object_name(run.id)}-master-0 ({MOUNT_ERROR})"
    assert run.state is RunState.PENDING
    run.stop()


def an_object(kubernetes: KubernetesDouble, **labels: str) -> dict[str, Any]:
    """One that events can be of."""
    body = {"metadata": {"name": "tiny", "namespace": "team", "labels": labels}, "data": {}}
    [map_, _] = render(TINY).request["manifests"]
    cluster(None).put_config_map({**map_, **body, "metadata": {**map_["metadata"], **body["metadata"]}})
    return kubernetes.objects["configmaps", "team", "tiny"]


def test_events_are_those_of_the_object_not_of_an_earlier_one_of_its_name(kubernetes: KubernetesDouble) -> None:
    first = an_object(kubernetes)
    kubernetes.report(first, "Old", "of the attempt before")
    assert [it["message"] for it in cluster(None).events(first)] == ["of the attempt before"]
    del kubernetes.objects["configmaps", "team", "tiny"]
    second = an_object(kubernetes)
    assert cluster(None).events(second) == []
    # Newer controllers leave lastTimestamp out, and would come first without a time.
    author = {"reportingComponent": "default-scheduler", "reportingInstance": "s1", "action": "Scheduling"}
    kubernetes.report(second, "Newer", "newer", eventTime="2026-11-29T10:00:01.500000Z", **author)
    kubernetes.report(second, "Older", "older", lastTimestamp="2026-11-29T10:00:01Z")
    assert [it["message"] for it in cluster(None).events(second)] == ["older", "newer"]


def events_in_pages(kubernetes: KubernetesDouble, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """List five events two at a time; returns whether each request had a limit, and a place to continue at."""
    monkeypatch.setattr(adapter, "_PAGE_ITEMS", 2)
    held = an_object(kubernetes)
    for number in range(5):
        kubernetes.report(held, f"R{number}", f"event {number}")
    begin = len(kubernetes.requests)
    found = [it["message"] for it in cluster(None).events(held)]
    assert sorted(found) == [f"event {number}" for number in range(5)]
    asked = [it for it in kubernetes.requests[begin:] if "/events?" in it]
    return [("limit=" in it, "continue=" in it) for it in asked]


def test_a_long_list_comes_in_pages(kubernetes: KubernetesDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    assert events_in_pages(kubernetes, monkeypatch) == [(True, False), (True, True), (True, True)]


def test_a_list_whose_pages_the_cluster_has_forgotten_is_asked_for_anew(
    kubernetes: KubernetesDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """410 Expired: etcd has compacted the state that the first page was of."""
    ask = KubernetesCluster._call

    def call(self: KubernetesCluster, method: str, path: str, query: Any = None, *args: Any, **named: Any) -> Any:
        found = ask(self, method, path, query, *args, **named)
        if "limit" in (query or {}) and "continue" not in query:
            kubernetes.forget_pages()
        return found

    monkeypatch.setattr(KubernetesCluster, "_call", call)
    asked = [(True, False), (True, True), (False, False)]
    assert events_in_pages(kubernetes, monkeypatch) == asked, "a page, the one that is refused, and the whole"


def test_SL10_a_cluster_that_does_not_answer_is_not_a_failure_of_the_run(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    """NVIDIA-NeMo/Run #460: one failed call ended a healthy run's watch."""
    ready_kubernetes.bad_images = {"image:1"}
    run = sm_llm.launch(spec(tmp_path))
    await_(lambda: "cannot be pulled" in detail(run))
    ready_kubernetes.fail(503, 500)
    assert run.state is RunState.PENDING, "asked again"
    ready_kubernetes.fail(*[503] * 8)
    with pytest.raises(SubmitError, match="does not answer: the server is currently unable"):
        run.describe()
    ready_kubernetes.fail()
    assert run.state is RunState.PENDING
    assert run.attempts[0].state is None
    run.stop()


def test_a_name_that_is_somebody_elses_is_refused(ready_kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    other = KubernetesCluster("double", cluster(None).connect)
    body = job_of(render(TINY, run_id="tiny"))
    ready_kubernetes.suspends = True
    other.create(body)
    with pytest.raises(SubmitError, match="already exists"):
        other.create(body)
    assert other.job("PyTorchJob", "team", "none") is None
    other.delete_job("PyTorchJob", "team", "tiny")
    other.await_deleted("PyTorchJob", "team", "tiny", 30)


def test_contexts_that_are_not_there(kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match=r"the kubeconfig has no context 'prod'. It has: double"):
        sm_llm.launch(spec(tmp_path, backend={"context": "prod"}))


def test_DL29_another_version_of_the_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """aws/sagemaker-hyperpod-cli PR#62: a release of a dependency broke the launcher."""
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    monkeypatch.setattr(adapter.metadata, "version", lambda name: "37.0.2")
    adapter.cluster.cache_clear()
    with pytest.raises(SubmitError, match=r"kubernetes 37\.0\.2 is installed, and versions 35 to 35 are supported"):
        adapter.cluster(None)


def test_DL29_the_version_of_the_client_is_in_the_runs_record(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    ready_kubernetes.bad_images = {"image:1"}
    run = sm_llm.launch(spec(tmp_path))
    versions = json.loads((run.root / "run.json").read_text())["versions"]
    for name in ("kubernetes", "boto3"):
        assert versions[name] == adapter.metadata.version(name)
    run.stop()


def test_fields_that_the_cluster_dropped() -> None:
    sent = {"a": 1, "b": {"c": [1, {"d": "x"}], "e": {}}, "f": []}
    assert list(dropped_fields(sent, sent)) == []
    held = {"a": 2, "b": {"c": [1, {}]}}
    assert list(dropped_fields(sent, held)) == ["b.c.1.d"]


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mounted_claim")
def test_SL06_SL08_a_program_in_one_pod_from_launch_to_its_logs(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    program = "import os; print('in', os.environ['NOTE'], os.environ['WORLD_SIZE'])\n"
    run = sm_llm.launch(spec(tmp_path, program, environment={"NOTE": "$(PATH) $$ 'x'"}))
    assert run.wait() is not RunState.FAILED
    lines = list(run.logs())
    assert "in $(PATH) $$ 'x' 1" in lines, lines
    [attached] = [sm_llm.attach(f"kubeflow://double/team/{object_name(run.id)}")]
    assert attached.uri == run.uri


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mounted_claim")
def test_a_log_is_followed_as_it_is_printed(
    ready_kubernetes: KubernetesDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one request that lasts as long as the container, with nothing asked in between."""
    program = (
        "import pathlib, time\nfor it in range(3):\n    print('line', it, flush=True)\n"
        "    while not pathlib.Path({!r} + str(it)).exists():\n        time.sleep(0.05)\n"
    ).format(str(tmp_path / "seen-"))
    run = sm_llm.launch(spec(tmp_path, program))
    await_(lambda: run.state is RunState.RUNNING)
    # No second copy: what comes is streamed.
    monkeypatch.setattr("sm_llm.launcher.observe.logs.COPY_SECONDS", 3_600.0)
    log = run.logs(follow=True)
    for it in range(3):
        assert any(line == f"line {it}" for line in log)
        (tmp_path / f"seen-{it}").touch()
    log.close()
    asked: list[str] = []

    def is_audited() -> bool:
        # A real server lists a request once its answer has ended.
        asked[:] = [it for it in ready_kubernetes.requests if "/log?" in it]
        return any("follow=true" in it for it in asked)

    await_(is_audited)
    assert len(asked) == 2, "what was there before, and what came"
    assert run.wait() is not RunState.FAILED


TRAINING = {
    "kind": "train",
    "model": {"preset": "tiny", "config": {"vocab_size": 300, "num_hidden_layers": 2}},
    "data": {"format": "synthetic", "seq_length": 64, "rows": 2_000},
    "max_steps": 200,
    "checkpoint": {"every_steps": 5},
    "logging": {"every_steps": 1},
}


def jobs(cluster: KubernetesDouble) -> list[dict[str, Any]]:
    return [it for key, it in cluster.objects.items() if key[0] == "pytorchjobs"]


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("mounted_claim")
def test_pods_stop_and_the_same_command_continues_under_the_same_name(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    compute = {"instance_count": 2, "processes_per_instance": 1}
    job = spec(tmp_path, task=TRAINING, compute=compute, environment={"OMP_NUM_THREADS": "1"})
    run = sm_llm.launch(job)
    await_(lambda: any(it.valid for it in run.checkpoints()))
    with pytest.raises(SubmitError, match="is running already"):
        sm_llm.launch(job)
    assert run.stop(wait=True) is RunState.INTERRUPTED
    [first] = jobs(ready_kubernetes)
    stopped_at = max(it["step"] for it in run.metrics())
    assert stopped_at < 200

    again = sm_llm.launch(job)
    assert (again.id, again.continued_attempt) == (run.id, 2)
    deletion = ready_kubernetes.requests.index(
        next(it for it in ready_kubernetes.requests if it.startswith("DELETE") and "pytorchjobs" in it)
    )
    after = [it for it in ready_kubernetes.requests[deletion:] if object_name(run.id) in it or it.startswith("POST")]
    assert any(it.startswith("GET") for it in after[: after.index(next(x for x in after if x.startswith("POST")))])
    [second] = jobs(ready_kubernetes)
    assert second["metadata"]["name"] == first["metadata"]["name"]
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert second["metadata"]["annotations"]["sm-llm/attempt"] == "2"
    [map_] = [it for key, it in ready_kubernetes.objects.items() if key[0] == "configmaps"]
    assert '"attempt": 2' in map_["data"]["job.json"]
    assert again.wait() is RunState.COMPLETED
    assert [it.state for it in again.attempts] == [RunState.INTERRUPTED, RunState.COMPLETED]
    assert [it["step"] for it in again.metrics()] == list(range(1, 201))
    assert any("pod 0 of 2" in line for line in again.logs(attempt=1)), "copied before its pods were deleted"
    assert (again.root / "result" / "config.json").is_file()


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mounted_claim")
def test_a_job_that_loses_its_quota_begins_again_and_one_that_somebody_deletes_has_ended(
    ready_kubernetes: KubernetesDouble, tmp_path: Path
) -> None:
    program = (
        "import pathlib, time\nseen = pathlib.Path({!r})\nprint('begins again' if seen.exists() else 'begins')\n"
        "print('10%\\r50%\\rgrößer', flush=True)\nseen.touch()\ntime.sleep(600)\n"
    ).format(str(tmp_path / "seen"))
    run = sm_llm.launch(spec(tmp_path, program))
    name = object_name(run.id)
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(run.logs(follow=True)), daemon=True)
    follower.start()
    await_(lambda: (tmp_path / "seen").exists())
    await_(lambda: any("größer" in it for it in run.logs()))
    ready_kubernetes.suspend(name)
    await_(lambda: f"waiting for quota: the queue has not admitted the job ({PREEMPTED})" in detail(run))
    assert run.state is RunState.PENDING
    assert not ready_kubernetes.pods or all(it.is_deleted for it in ready_kubernetes.pods.values())
    ready_kubernetes.admit(name)
    await_(lambda: any("begins again" in it for it in run.logs()))
    assert run.state is RunState.RUNNING
    assert len(run.attempts) == 1
    ready_kubernetes.delete_job(name)
    with pytest.raises(RunFailed, match="is stopped: its job was deleted"):
        run.wait()
    follower.join(60)
    assert not follower.is_alive()
    assert sum("50%" in it and "größer" in it for it in lines) == 2, lines


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mounted_claim")
def test_stop_now_ends_pods_that_would_not_end(ready_kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    run = sm_llm.launch(spec(tmp_path, program))
    await_(lambda: any("up" in line for line in run.logs()))
    context = ["kubectl", "--context", "double", "--namespace", "team", "exec", "-it"]
    pod = f"{object_name(run.id)}-master-0"
    assert shell_command(run) == [*context, pod, "--container", "pytorch", "--", "bash"]
    with pytest.raises(SubmitError, match=r"has no pod for node 1. Pods: 0"):
        shell_command(run, 1)
    assert run.stop(now=True, wait=True) is RunState.STOPPED
    assert not jobs(ready_kubernetes)
    assert not ready_kubernetes.pods
    assert "up" in list(run.logs()), "copied before its pods were deleted"
