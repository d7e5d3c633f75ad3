"""Manifests as values, against golden files, and what the pods get."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import sm_llm
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.manifest import FETCH_SCRIPT, fetch_script
from sm_llm.launcher.backends.kubeflow.manifest_check import manifest_issues
from sm_llm.launcher.backends.kubeflow.render import document
from sm_llm.runs.events.events import Step, Throughput
from sm_llm.spec.backends.kubeflow import KubeflowOptions
from sm_llm.worker.inputs.secrets import K8S_MOUNT
from tests.launcher.kubeflow.conftest import BACKEND, TINY, job_of, pod_of, render, tiny

GOLDEN = Path(__file__).parents[2] / "golden" / "kubeflow"
SMP_IMAGE = "658645717510.dkr.ecr.us-west-2.amazonaws.com/smdistributed-modelparallel:2.5.1-gpu-py311-cu124"
NEURON_IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training-neuronx:2.9.0"
NAMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-2-7b-fsdp-p5": (
        "llama-2-7b-fsdp",
        {
            "backend": {
                **BACKEND,
                "namespace": "hyperpod-ns-research",
                "service_account": "training",
                "retry": "auto-resume",
                "max_restarts": 10,
                "node_health": "schedulable",
                "queue": "hyperpod-ns-research-localqueue",
                "priority": "high-priority",
                "topology": "topology.k8s.aws/network-node-layer-3",
                "volumes": [{"claim": "fsx", "path": "/fsx"}],
                "node_folder": "/opt/dlami/nvme",
            },
            "compute": {"instance_type": "ml.p5.48xlarge", "instance_count": 2},
            "storage": "s3://bucket/runs",
            "environment": {"NCCL_DEBUG": "INFO", "NOTE": "two words"},
            "secrets": {"HF_TOKEN": "k8s:hub/token"},
        },
    ),
    "llama-2-7b-fsdp-g5": (
        "llama-2-7b-fsdp",
        {
            # G5 has EFA from 8xlarge on; this one has none.
            "backend": {**BACKEND, "instance_label": "ec2", "tolerations": [{"operator": "Exists"}]},
            "compute": {"instance_type": "ml.g5.4xlarge", "instance_count": 16},
            "storage": "s3://bucket/runs",
        },
    ),
    "llama-2-70b-smp": (
        "llama-2-70b-smp",
        {
            "backend": {**BACKEND, "image": SMP_IMAGE, "resource": "HyperPodPyTorchJob", "node_health": "deep-checked"},
            "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 8},
            "task": {"parallelism": {"hybrid_shard_degree": 32}},
            "storage": "s3://bucket/runs",
        },
    ),
    "llama-3-8b-nxd": (
        "llama-3-8b-nxd",
        {
            "backend": {**BACKEND, "image": NEURON_IMAGE, "shared_memory_gib": 64},
            "compute": {"instance_type": "ml.trn1.32xlarge", "instance_count": 4},
            "storage": "s3://bucket/runs",
        },
    ),
    "prepare": (
        {
            "name": "prepare",
            "task": {
                "kind": "prepare", "sources": ["s3://bucket/text"], "seq_length": 1024, "tokenizer": "s3://bucket/tok",
            },
        },
        {
            "backend": {**BACKEND, "cpus_per_pod": 14, "memory_gib_per_pod": 48, "image_pull_secrets": ["registry"]},
            "compute": {"instance_type": "ml.m5.4xlarge"},
            "storage": "s3://bucket/runs",
        },
    ),
}  # fmt: skip


def manifest(name: str) -> str:
    source, fields = NAMES[name]
    text = document([job_of(render(source, **fields))])
    return re.sub(r"[0-9a-f]{64}", "0" * 64, text)


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_is_the_golden_one_and_passes_its_check(name: str) -> None:
    assert manifest(name) == (GOLDEN / f"{name}.yaml").read_text()
    source, fields = NAMES[name]
    assert [manifest_issues(it) for it in render(source, **fields).request["manifests"]] == [[], []]


def test_equal_jobs_give_equal_submissions() -> None:
    first, second = render(TINY), render(TINY)
    assert first.request == second.request
    assert dict(first.uploads) == dict(second.uploads)


def test_the_printed_manifests_are_what_is_sent() -> None:
    """kubectl's YAML has more words for numbers and booleans than Python's: every text is quoted."""
    environment = {"A": "1e3", "B": "yes", "C": "0o17", "D": "a\nb\n", "E": " lead\n", "F": "é\u2028\x07", "G": "\x85"}
    submission = render({**TINY, "environment": environment})
    assert list(yaml.safe_load_all(submission.document)) == submission.request["manifests"]
    # Text that YAML breaks into lines at more characters than line feeds.
    broken = render({**TINY, "environment": {"A": "x\ny\x85z\n", "B": "x\u2029\n"}})
    assert list(yaml.safe_load_all(broken.document)) == broken.request["manifests"]
    for line in submission.document.splitlines():
        value = re.match(r"\s+value: (.*)", line)
        assert value is None or value[1].startswith(('"', "|")), line


def test_job_json_and_the_fetch_script_are_in_the_config_map() -> None:
    submission = render(TINY, attempt=3)
    data = submission.request["manifests"][0]["data"]
    assert json.loads(data["job.json"]) == json.loads(submission.job.model_dump_json())
    assert data[FETCH_SCRIPT] == fetch_script()
    [(address, archive)] = submission.uploads.items()
    [init] = pod_of(submission)["initContainers"]
    assert init["args"][0] == address
    assert init["args"][1] in address
    assert archive


def test_the_fetched_code_is_compared_with_its_digest(tmp_path: Path) -> None:
    submission = render(TINY)
    [(_, archive)] = submission.uploads.items()
    digest = pod_of(submission)["initContainers"][0]["args"][1]
    (tmp_path / FETCH_SCRIPT).write_text(fetch_script())
    (tmp_path / "bundle").write_bytes(archive)
    (tmp_path / "code" / "old").mkdir(parents=True)

    def fetch(digest: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-P", str(tmp_path / FETCH_SCRIPT), str(tmp_path / "bundle"), digest]
        argv += [str(tmp_path / "code"), "job.json"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=300)

    assert fetch("0" * 64).stderr.startswith("sm_llm: the code bundle ")
    assert f"and {'0' * 64} is expected" in fetch("0" * 64).stderr
    done = fetch(digest)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "code/train.py").is_file()
    assert (tmp_path / "code/sm_llm/worker/kubeflow/node.py").is_file()
    assert not (tmp_path / "code/old").exists()
    (tmp_path / "bundle").write_bytes(archive[:1000])
    assert "is damaged" in fetch(digest).stderr
    (tmp_path / "bundle").unlink()
    assert "cannot fetch the code bundle" in fetch(digest).stderr


def test_a_program_travels_in_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    task = {"kind": "script", "entry": "train.py", "source": str(tmp_path)}
    submission = render({**TINY, "task": task})
    assert submission.job.spec.task.source == "/opt/sm_llm/code/source"


def variables(submission: Any) -> dict[str, str]:
    return {it["name"]: it.get("value") for it in pod_of(submission)["containers"][0]["env"]}


def test_nothing_in_a_value_is_expanded_by_kubernetes() -> None:
    hostile = {"A": "$(PATH)", "B": "$$(PATH)", "C": "`id` $HOME \"'\\", "D": "a\nb\u2028", "PYTHONPATH": "/own"}
    found = variables(render({**TINY, "environment": hostile}))
    assert {name: found[name].replace("$$", "$") for name in hostile if name != "PYTHONPATH"} == {
        name: value for name, value in hostile.items() if name != "PYTHONPATH"
    }
    assert found["A"] == "$$(PATH)"
    assert found["PYTHONPATH"] == "/opt/sm_llm/code:/own"


def test_secrets_are_mounted_where_the_worker_reads_them() -> None:
    assert str(K8S_MOUNT) == names.SECRETS
    pod = pod_of(render({**TINY, "secrets": {"A": "k8s:one/a", "B": "k8s:one/b", "C": "k8s:two.x/c"}}))
    mounted = {it["mountPath"]: it["name"] for it in pod["containers"][0]["volumeMounts"]}
    volumes = {it["name"]: it.get("secret", {}).get("secretName") for it in pod["volumes"]}
    found = {path: volumes[name] for path, name in mounted.items() if path.startswith(names.SECRETS)}
    assert found == {f"{names.SECRETS}/one": "one", f"{names.SECRETS}/two.x": "two.x"}


def test_the_rules_for_the_log_match_our_training_line() -> None:
    source, fields = NAMES["llama-2-70b-smp"]
    [plan] = sm_llm.plan(source, **fields)
    [rule] = job_of(render(source, **fields))["spec"]["runPolicy"]["logMonitoringConfiguration"]
    total = plan.derived.total_steps if plan.derived else 0
    line = "[rank 0] " + a_training_line(7, total)
    match = re.match(rule["logPattern"], line)
    assert match is not None
    assert float(match[1]) == 3.25
    assert not re.match(rule["stopPattern"], line)
    assert re.match(rule["stopPattern"], "[rank 0] " + a_training_line(total, total))


def a_training_line(step: int, total: int) -> str:
    """The real one, of the worker."""
    from sm_llm.worker.device import CpuDevice
    from sm_llm.worker.training.step_metrics import Costs, ThroughputMeter

    meter = ThroughputMeter(Costs(1, 6.0, "6N", None, 1), CpuDevice(), 0)
    return meter.line(Step(step, 3.25, 1.0, 1e-4, 1), Throughput(step, 1.0, 1.0, None, 1.0, 0.0, None, 1), total)


ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TAKEN = (
    ACCOUNT, f"{ACCOUNT}/x", "/var/run/secrets", "/var", "/run", "/run/secrets/x", "/dev", "/dev/termination-log",
    "/dev/nvidia0", "/proc", "/proc/1", "/sys", "/sys/class", "/etc", "/etc/hosts",
)  # fmt: skip
HIDDEN = ("/bin", "/lib64", "/usr/local/bin")


def mounted(path: str) -> dict[str, Any]:
    return {"volumes": [{"claim": "fsx", "path": path}]}


def refusal(job: dict[str, Any]) -> str:
    with pytest.raises((PlanError, SpecError)) as refused:
        render(job)
    return str(refused.value).replace(" (Python)", "")


@pytest.mark.parametrize(
    ("options", "issue"),
    [
        ({"retry": "auto-resume"}, "backend.namespace: must be kubeflow, or begin with hyperpod"),
        ({"retry": "auto-resume", "namespace": "kubeflow"}, "backend.node_health: must be schedulable or deep-checked"),
        ({"retry": "auto-resume", "resource": "HyperPodPyTorchJob"}, "backend.retry: is of PyTorchJobs"),
        ({"retry": "none", "max_restarts": 3}, "backend.max_restarts: has no effect without backend.retry"),
        ({"priority": "high"}, "backend.priority: has no effect without backend.queue"),
        ({"topology": "topology.k8s.aws/ultraserver-id"}, "backend.topology: has no effect without backend.queue"),
        ({"topology_mode": "preferred"}, "backend.topology_mode: has no effect without backend.topology"),
        ({"topology": "topology.k8s.aws/rack", "queue": "q"}, "backend.topology"),
        ({"hang_minutes": 5}, "backend.hang_minutes: has no effect without backend.resource=HyperPodPyTorchJob"),
        ({"accelerator_resource": "amd.com/gpu"}, "backend.accelerator_resource: has no effect without accelerators"),
        ({"tolerations": [{"operator": "Equal"}]}, "backend.tolerations.0.operator: must be Exists without a key"),
        ({"tolerations": [{"operator": "Exists", "value": "x"}]}, "backend.tolerations.0.value: must be left out"),
        ({"volumes": [{"claim": "fsx", "path": "/opt/sm_llm"}]}, "backend.volumes.0.path: is taken"),
        ({"volumes": [{"claim": "fsx", "path": "/"}]}, "backend.volumes.0.path: is taken"),
        *((mounted(it), f"backend.volumes.0.path: is taken: /.* is there .got '{it}'") for it in TAKEN),
        *((mounted(it), f"backend.volumes.0.path: would hide {it}, and no program would start") for it in HIDDEN),
        (mounted("/./dev//shm/."), "backend.volumes.0.path: is taken"),
        ({"volumes": [{"claim": "a", "path": "/x"}, {"claim": "b", "path": "/./x"}]}, "backend.volumes.1.path: is giv"),
        ({"node_folder": "/etc"}, "backend.node_folder: is taken: /etc/hosts is there"),
        ({"node_folder": "/usr"}, "backend.node_folder: would hide /usr/bin"),
        ({"volumes": [{"claim": "a", "path": "/x"}, {"claim": "b", "path": "/x/"}]}, "backend.volumes.1.path: is giv"),
        ({"volumes": [{"claim": "fsx", "path": "relative"}]}, "backend.volumes.0.path: .*absolute path"),
        ({"image": "a b"}, "backend.image: .*REGISTRY/REPOSITORY:TAG"),
        ({"image": "-x"}, "backend.image"),
        ({"namespace": "Team_A"}, "backend.namespace"),
        ({"namespace": "a/b"}, "backend.namespace"),
        ({"namespace": "a\n"}, "backend.namespace"),
        ({"service_account": "a b"}, "backend.service_account"),
        ({"node_selector": {"a b": "c"}}, "backend.node_selector"),
        ({"node_selector": {"a": "-"}}, "backend.node_selector"),
        ({"queue": "$(x)"}, "backend.queue"),
        ({"context": "a\nb"}, "backend.context"),
        ({"node_folder": "/a:b"}, "backend.node_folder"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_or_has_no_effect_is_refused(options: dict[str, Any], issue: str) -> None:
    assert re.search(issue, refusal(tiny(**options)))


FSX = {"volumes": [{"claim": "fsx", "path": "/fsx"}]}
ROWS = {"format": "rows", "seq_length": 64}


@pytest.mark.parametrize(
    ("fields", "issue"),
    [
        ({"storage": "/runs"}, "storage: lies on no volume of the pods, and is lost with them"),
        ({"storage": "./runs"}, "storage: lies on no volume of the pods"),
        ({"storage": "/fsxother/runs", "backend": {**BACKEND, **FSX}}, "storage: lies on no volume"),
        ({"storage": "/fsx/runs", "backend": {**BACKEND, "volumes": [{**FSX["volumes"][0], "read_only": True}]}},
         "storage: lies on a volume that is mounted read-only"),
        ({"environment": {"SM_LLM_SCRATCH_DISK": "/scratch"}}, "environment.SM_LLM_SCRATCH_DISK: lies on no volume"),
        ({"task": {**TINY["task"], "data": {**ROWS, "train": "/data/rows"}}}, "task.data.train: lies on no volume"),
        ({"task": {**TINY["task"], "data": {**ROWS, "train": "rows"}}}, "task.data.train: is a folder of this machine"),
        ({"secrets": {"HF_TOKEN": "env:HF_TOKEN"}}, "secrets.HF_TOKEN: cannot be read by a pod"),
        ({"secrets": {"HF_TOKEN": "file:/home/me/token"}}, "secrets.HF_TOKEN: lies on no volume"),
    ],
    ids=["storage", "relative", "beside", "read-only", "scratch", "data", "local-data", "env", "file"],
)  # fmt: skip
def test_SL24_places_that_the_pods_do_not_see_are_refused(fields: dict[str, Any], issue: str) -> None:
    assert re.search(issue, refusal({**TINY, **fields}))


def test_places_on_a_claim_are_taken() -> None:
    fields = {"storage": "/fsx/runs", "environment": {"SM_LLM_SCRATCH_DISK": "/fsx/scratch"}}
    submission = render({**TINY, **fields, "backend": {**BACKEND, **FSX}})
    [address] = submission.uploads
    assert address.startswith("/fsx/runs/bundles/")
    for free in ("/var/lib/data", "/mnt", "/home", "/tmp", "/usr/local/share/data", "/devices", "/etc/data"):
        assert pod_of(render(tiny(**mounted(free))))


def compute(instance_type: str, count: int = 2, processes: int | None = None) -> dict[str, Any]:
    return {"instance_type": instance_type, "instance_count": count, "processes_per_instance": processes}


def limits(submission: Any) -> dict[str, str]:
    found: dict[str, str] = pod_of(submission)["containers"][0].get("resources", {}).get("limits", {})
    return found


def test_DL19_the_world_size_is_pods_times_processes() -> None:
    """kubeflow/trainer#1947: the operator's own WORLD_SIZE counted pods; nothing of ours reads it."""
    [plan] = sm_llm.plan({**TINY, "compute": {"instance_count": 2, "processes_per_instance": 2}})
    assert plan.world_size == 4
    assert plan.command == tuple(
        ("torchrun", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", "train.py") for node in range(2)
    )
    submission = render({**TINY, "compute": {"instance_count": 2, "processes_per_instance": 2}})
    spec = job_of(submission)["spec"]
    assert spec["nprocPerNode"] == "2"
    assert sum(it["replicas"] for it in spec["pytorchReplicaSpecs"].values()) == 2
    assert pod_of(submission)["containers"][0]["args"] == ["torchrun", "2", "2", "train.py"]


def test_DL23_shared_memory_is_always_a_volume_in_memory() -> None:
    """NVIDIA/nccl#525: containers get 64 MiB of shared memory otherwise."""
    for source, fields in NAMES.values():
        pod = pod_of(render(source, **fields))
        mounts = {it["mountPath"]: it["name"] for it in pod["containers"][0]["volumeMounts"]}
        [volume] = [it for it in pod["volumes"] if it["name"] == mounts["/dev/shm"]]
        assert volume["emptyDir"]["medium"] == "Memory"
    assert "8Gi" in str(pod_of(render(tiny(shared_memory_gib=8)))["volumes"])


def test_DL25_SL29_a_number_of_nodes_beside_accelerators() -> None:
    """aws/sagemaker-hyperpod-cli#315, #383: both are accepted; each of the pods gets so many accelerators."""
    submission = render({**tiny(accelerators_per_pod=4), "compute": compute("ml.g5.12xlarge")})
    assert limits(submission) == {"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "1"}
    half = render({**tiny(accelerators_per_pod=2), "compute": compute("ml.g5.12xlarge", processes=2)})
    assert limits(half) == {"nvidia.com/gpu": "2"}, "pods that share a node leave its EFA interface to others"
    issue = "compute.processes_per_instance: must be at most 2, what a pod of 2 nvidia.com/gpu can run"
    assert issue in refusal({**tiny(accelerators_per_pod=2), "compute": compute("ml.g5.12xlarge")})
    issue = "backend.accelerators_per_pod: must be at most 4"
    assert issue in refusal({**tiny(accelerators_per_pod=8), "compute": compute("ml.g5.12xlarge")})


def test_DL27_instance_types_that_no_table_knows_pass_with_the_facts_that_the_user_gives() -> None:
    """aws/sagemaker-hyperpod-cli#42: an allow-list refused new types."""
    for known in ("ml.p4d.24xlarge", "ml.p5en.48xlarge"):
        assert limits(render({**tiny(), "compute": compute(known)}))
    unknown = {**tiny(accelerators_per_pod=8, efa_per_pod=8), "compute": compute("ml.p9.48xlarge", processes=8)}
    assert limits(render(unknown)) == {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "8"}
    assert pod_of(render(unknown))["nodeSelector"] == {names.INSTANCE_LABEL: "ml.p9.48xlarge"}
    assert variables(render(unknown))["FI_PROVIDER"] == "efa"
    assert "compute.instance_type: is not in the table" in refusal({**tiny(), "compute": compute("ml.p9.48xlarge")})
    [plan] = sm_llm.plan({**tiny(), "compute": compute("ml.p9.48xlarge", processes=8)})
    assert any("the pods ask for no accelerators" in str(it) for it in plan.issues)


def test_SL30_a_pod_without_an_EFA_interface_is_not_set_to_use_one() -> None:
    job = {**tiny(efa_per_pod=0), "compute": compute("ml.p5.48xlarge")}
    assert not [name for name in variables(render(job)) if name.startswith("FI_")]
    assert variables(render({**tiny(), "compute": compute("ml.p5.48xlarge")}))["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in variables(render({**tiny(), "compute": compute("ml.p5.48xlarge", count=1)}))


def test_SL31_SL32_retries_are_bounded_and_of_one_layer() -> None:
    """snakemake-executor-plugin-slurm#284: retries inside times retries outside."""
    spec = job_of(render(tiny()))["spec"]
    # The operator counts the restarts of both pods together, and ends the job once it has counted so many.
    assert spec["runPolicy"]["backoffLimit"] == 20 * 2 + 1
    assert {it["restartPolicy"] for it in spec["pytorchReplicaSpecs"].values()} == {"OnFailure"}
    spec = job_of(render(tiny(retry="none")))["spec"]
    assert "backoffLimit" not in spec["runPolicy"]
    assert {it["restartPolicy"] for it in spec["pytorchReplicaSpecs"].values()} == {"Never"}
    spec = job_of(render(tiny(resource="HyperPodPyTorchJob", retry="none")))["spec"]
    assert spec["runPolicy"]["jobMaxRetryCount"] == 0


def test_every_option_is_read() -> None:
    """One that nothing reads would be silently ignored."""
    folder = Path(names.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    unread = {it for it in KubeflowOptions.model_fields if not re.search(rf"\boptions\.{it}\b", text)}
    assert unread == {"name"}


def test_SL03_no_scheduler_is_imposed() -> None:
    """meta-pytorch/torchx#660: Volcano kept a cluster from growing."""
    for source, fields in NAMES.values():
        submission = render(source, **fields)
        assert "schedulerName" not in pod_of(submission)
        assert "schedulingPolicy" not in job_of(submission)["spec"]["runPolicy"]
