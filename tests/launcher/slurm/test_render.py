"""Scripts as values, against golden files, and what lies beside them on the shared file system."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sm_llm import cli
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.api import preview
from tests.launcher.slurm.conftest import TINY, VENV, render

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm"
IMAGE = "658645717510.dkr.ecr.us-west-2.amazonaws.com#smdistributed-modelparallel:2.5.1-gpu-py311-cu124"
NAMES: dict[str, dict[str, Any]] = {
    "llama-2-70b-smp": {
        "backend": {
            "name": "slurm",
            "shared_folder": "/fsx/sm_llm",
            "container_image": IMAGE,
            "scratch_folder": "/opt/dlami/nvme",
            "retry": "auto-resume",
            "partition": "p4d",
        },
        "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 8},
        "task": {"parallelism": {"hybrid_shard_degree": 32}},
        "storage": "s3://bucket/runs",
    },
    "llama-2-7b-fsdp": {
        "backend": {
            "name": "slurm",
            "shared_folder": "/fsx/sm_llm",
            "virtual_environment": "/fsx/envs/fsdp",
            "account": "research",
            "qos": "normal",
            "time_limit_minutes": 2880,
            "max_requeues": 10,
        },
        "compute": {"instance_type": "ml.p5.48xlarge", "instance_count": 2},
        "storage": "/fsx/runs",
        "environment": {"NCCL_DEBUG": "INFO", "NOTE": "two words"},
    },
}


FLOWS: dict[str, dict[str, Any]] = {
    "llama-3-70b-cpt-trn1": {
        "backend": {
            "name": "slurm",
            "shared_folder": "/fsx/sm_llm",
            "virtual_environment": "/fsx/envs/neuron",
            "scratch_folder": "/opt/dlami/nvme",
            "retry": "auto-resume",
        },
        "storage": "/fsx/runs",
    },
    "llama-2-70b-finetune-smp-slurm": {},
}
STEPS = [
    *(f"llama-3-70b-cpt-trn1/{it}" for it in ("model", "text", "prepare", "convert", "precompile", "train", "back")),
    *(f"llama-2-70b-finetune-smp-slurm/{it}" for it in ("model", "train")),
]


@cache
def step_scripts(name: str) -> dict[str, str]:
    _, found = preview(name, **FLOWS[name])
    return {f"{name}/{it.job.run_id.rpartition('-')[2]}": fixed(it.request["script"]) for it in found}


def script(name: str) -> str:
    if "/" in name:
        return step_scripts(name.partition("/")[0])[name]
    return fixed(render(name, **NAMES[name]).request["script"])


def fixed(text: str) -> str:
    """A script with what differs from call to call replaced."""
    text = re.sub(r"bundles/[0-9a-f]{64}", f"bundles/{'0' * 64}", text)
    return re.sub(r"-[0-9]{8}-[0-9]{6}-[0-9a-f]{4}", "-20261128-040000-ab12", text)


@pytest.mark.parametrize("name", [*NAMES, *STEPS])
def test_the_script_is_the_golden_one(name: str) -> None:
    assert script(name) == (GOLDEN / f"{name}.sh").read_text()


BACKENDS: dict[str, dict[str, Any]] = {
    "sagemaker": {
        "name": "sagemaker", "role": "arn:aws:iam::123456789012:role/SageMaker", "region": "us-west-2",
        "max_run_seconds": 3600,
    },
    "container": {"name": "slurm", "shared_folder": "/fsx/sm_llm", "container_image": "/fsx/x.sqsh"},
    "virtual environment": VENV,
    "kubeflow": {"name": "kubeflow", "image": "registry.example.com/train:1", "namespace": "team"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["train", "script"])
def test_all_backends_get_the_same_bundle(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    task = TINY["task"] if kind == "train" else {"kind": "script", "source": str(tmp_path), "entry": "train.py"}
    compute = {"instance_type": "ml.p5.48xlarge", "instance_count": 2}
    job = {**TINY, "task": task, "compute": compute, "storage": "s3://bucket/runs"}
    found: dict[str, str] = {}
    for name, options in BACKENDS.items():
        _, [submission] = preview({**job, "backend": options})
        found |= {
            match[1]: name
            for uri in submission.uploads
            if (match := re.search(r"bundles/([0-9a-f]{64})", uri)) is not None
        }
        assert name in found.values(), submission.uploads.keys()
    assert len(found) == 1


def test_every_step_has_a_golden_script() -> None:
    assert [step for name in FLOWS for step in step_scripts(name)] == STEPS


def test_a_dry_run_prints_the_script_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**TINY, "storage": str(tmp_path / "runs")}))

    def printed(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["sm-llm", "fit", str(tmp_path / "job.yaml"), "--dry-run", *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr().out

    lines = printed().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=2" in lines
    [submission] = json.loads(printed("--json"))
    assert fixed(submission["request"]["script"]).splitlines() == fixed("\n".join(lines)).splitlines()


def test_SL15_SL16_one_task_a_node_runs_torchrun_and_no_node_waits_for_one_that_failed() -> None:
    text = script("llama-2-70b-smp")
    batch, step = (line for line in text.split("\nsrun "))
    assert "#SBATCH --ntasks-per-node=1\n" in batch
    assert "--container" not in batch, "pyxis' options are those of srun"
    assert "--container-image=" in step
    assert "--kill-on-bad-exit=1" in step
    assert "--wait=600" in step


@pytest.mark.parametrize(
    ("retry", "requeues", "resumes"), [("requeue", True, False), ("auto-resume", False, True), ("none", False, False)]
)
def test_SL32_exactly_one_layer_starts_a_job_again(retry: str, requeues: bool, resumes: bool) -> None:
    text = render(TINY, backend={**VENV, "retry": retry}).request["script"]
    assert ("#SBATCH --requeue\n" in text, "#SBATCH --no-requeue\n" in text) == (requeues, not requeues)
    assert ("--auto-resume=1" in text) == resumes
    assert ("scontrol requeue" in text) == requeues


@pytest.mark.integration
def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    scripts = map(str, GOLDEN.rglob("*.sh"))
    done = subprocess.run(["shellcheck", "--shell=bash", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_equal_jobs_give_equal_submissions() -> None:
    first, second = render(TINY), render(TINY)
    assert first.request == second.request
    assert dict(first.uploads) == dict(second.uploads)


def test_job_json_is_what_the_nodes_read() -> None:
    submission = render(TINY, attempt=3)
    folder = "/fsx/sm_llm/jobs/tiny-20261128-040000-ab12/attempt-3"
    body = submission.uploads[f"{folder}/job.json"]
    assert json.loads(body) == json.loads(submission.job.model_dump_json())
    assert f"export SM_LLM_JOB_FILE={folder}/job.json" in submission.request["script"]


def test_SL08_a_program_travels_in_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    task = {"kind": "script", "entry": "train.py", "source": str(tmp_path)}
    submission = render({**TINY, "task": task})
    assert submission.job.spec.task.source == f"/fsx/sm_llm/bundles/{submission.request['bundle']}/source"
    inside = render({**TINY, "task": task, "backend": container()})
    assert inside.job.spec.task.source == "/opt/sm_llm/source"


ROWS = {"format": "rows", "train": "rows/train", "seq_length": 64}


def container(**options: Any) -> dict[str, Any]:
    return {"name": "slurm", "shared_folder": "/fsx/sm_llm", "container_image": "/fsx/x.sqsh", **options}


def test_a_container_sees_every_folder_that_the_specification_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    task = {"kind": "script", "entry": "train.py", "args": ["inputs.rows/a"]}
    backend = container(container_mounts=["/opt/own:/own:ro", "/data"])
    submission = render({**TINY, "task": task, "inputs": {"rows": "/data/rows"}, "backend": backend})
    mounts = re.search(r"--container-mounts=(\S+)", submission.request["script"])
    assert mounts is not None
    bundle = f"/fsx/sm_llm/bundles/{submission.request['bundle']}:/opt/sm_llm:ro"
    expected = ["/fsx/sm_llm", "/tmp", "/fsx/runs", "/data/rows"]
    assert mounts[1].split(",") == [*(f"{it}:{it}" for it in expected), bundle, "/opt/own:/own:ro", "/data:/data"]


def test_trackers_secrets_and_relative_places_are_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "state.json").write_text('{"_data_files": [{"filename": "rows.arrow"}]}')
    (tmp_path / "rows" / "dataset_info.json").write_text("{}")
    (tmp_path / "rows" / "rows.arrow").write_text("rows")
    (tmp_path / "rows" / "rows.json").write_text(
        '{"seq_length": 64, "rows": 9, "columns": ["input_ids"], "vocab_size": 300}'
    )
    task = {
        **TINY["task"],
        "logging": {"sinks": {"tensorboard": {"folder": "/fsx/board"}, "mlflow": {"tracking_uri": "/fsx/mlflow"}}},
        "data": {"format": "rows", "train": "rows", "seq_length": 64},
    }
    fields = {"secrets": {"HF_TOKEN": "file:/keys/hub"}, "task": task}
    mounts = re.search(
        r"--container-mounts=(\S+)",
        render({**TINY, **fields, "backend": container(scratch_folder="/scratch")}).request["script"],
    )
    assert mounts is not None
    for folder in ("/fsx/board", "/fsx/mlflow", "/keys/hub", str(tmp_path / "rows")):
        assert f"{folder}:{folder}" in mounts[1].split(","), folder


def mounted(submission: Any) -> list[str]:
    """Folders that the container of a job sees at their own paths."""
    found = re.search(r"--container-mounts=(\S+)", submission.request["script"])
    assert found is not None
    pairs = (it.split(":") for it in found[1].split(","))
    return [source for source, location, *_ in pairs if source == location]


LONG = {"preset": "tiny", "config": {"max_position_embeddings": 2048}}
TRAINIUM = {"instance_type": "ml.trn1.32xlarge", "instance_count": 1}


@pytest.mark.parametrize("kind", ["train", "precompile"])
def test_what_a_task_writes_beside_its_storage_is_made_mounted_and_checked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c4" / "part-1").mkdir(parents=True)
    (tmp_path / "c4" / "part-1" / "x.json").write_text('{"text": "a"}\n')
    training = {
        **TINY["task"],
        "model": LONG,
        "parallelism": {"strategy": "nxd", "tensor_parallel_degree": 2, "compile_cache": "graphs"},
        "logging": {"sinks": {"tensorboard": {"folder": "/fsx/sm_llm/board"}}},
        "data": {
            "format": "stream", "dataset": "json", "data_files": [f"{tmp_path}/c4/part-*/x.json"], "seq_length": 2048,
        },
    }  # fmt: skip
    task = training if kind == "train" else {"kind": kind, "training": training}
    submission = render({**TINY, "task": task, "compute": TRAINIUM, "backend": container(scratch_folder="/scratch")})
    cache = str(tmp_path / "graphs")
    assert mounted(submission)[:5] == ["/fsx/sm_llm", "/scratch", "/fsx/runs", f"{tmp_path}/c4", cache]
    text = submission.request["script"]
    assert f"mkdir -p -- {cache}\n" in text
    assert f'export SM_LLM_SLURM_OUTPUTS="[\\"{cache}\\"]"\n' in text
    assert f"export NEURON_COMPILE_CACHE_URL={cache}\n" in text


def test_graphs_lie_below_a_storage_that_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker works in another folder than the launcher."""
    monkeypatch.chdir(tmp_path)
    task = {**TINY["task"], "parallelism": {"strategy": "nxd", "tensor_parallel_degree": 2}}
    task |= {"model": LONG, "data": {**TINY["task"]["data"], "seq_length": 2048}}
    text = render({**TINY, "task": task, "compute": TRAINIUM, "storage": "./runs"}).request["script"]
    assert f"export NEURON_COMPILE_CACHE_URL={tmp_path}/runs/neuron-compile-cache\n" in text


def test_a_strategy_for_neuron_has_its_variables_without_an_instance_type() -> None:
    task = {**TINY["task"], "model": LONG, "parallelism": {"strategy": "nxd", "tensor_parallel_degree": 2}}
    task |= {"data": {**TINY["task"]["data"], "seq_length": 2048}}
    compute = {"processes_per_instance": 2}
    text = render({**TINY, "task": task, "compute": compute}).request["script"]
    assert "export NEURON_COMPILE_CACHE_URL=/fsx/runs/neuron-compile-cache\n" in text
    assert "NEURON_" not in render({**TINY, "compute": compute}).request["script"]


def test_a_packed_program_is_not_mounted_and_may_be_relative_over_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text("print('trained')\n")
    task = {"kind": "script", "entry": "train.py", "source": "own"}
    assert mounted(render({**TINY, "task": task, "backend": container(scratch_folder="/scratch")})) == [
        "/fsx/sm_llm", "/scratch", "/fsx/runs",
    ]  # fmt: skip
    over_ssh = render({**TINY, "task": task, "storage": "s3://bucket/runs", "backend": {**VENV, "ssh_host": "login"}})
    assert over_ssh.request["host"] == "login"


def test_paths_of_arguments_and_variables_on_no_mount_are_warned_of() -> None:
    import sm_llm

    task = {"kind": "script", "entry": "-m train", "args": ["--rows=/data/rows", "/fsx/runs/x", "/own/y", "--lr", "1"]}
    environment = {"AWS_CONFIG_FILE": "/home/me/aws", "LD_LIBRARY_PATH": "/opt/lib", "MANY": "/a:/b"}
    job = {**TINY, "task": task, "environment": environment}
    [plan] = sm_llm.plan({**job, "backend": container(container_mounts=["/opt/own:/own"])})
    warned = [it.path for it in plan.issues if it.code == "path-on-no-mount"]
    assert warned == ["task.args.0", "environment.AWS_CONFIG_FILE"]
    [plan] = sm_llm.plan({**job, "backend": VENV})
    assert not [it for it in plan.issues if it.code == "path-on-no-mount"]


def test_SL03_no_partition_account_or_feature_is_imposed() -> None:
    """meta-pytorch/torchx#660: what a job does not ask for is left to the cluster."""
    lines = [it for it in render(TINY).request["script"].splitlines() if it.startswith("#SBATCH")]
    named = {it.removeprefix("#SBATCH --").partition("=")[0] for it in lines}
    assert named == {
        "job-name", "comment", "nodes", "ntasks-per-node", "exclusive", "mem", "requeue", "output", "open-mode",
    }  # fmt: skip


def test_SL29_no_default_stands_against_an_option() -> None:
    """aws/sagemaker-hyperpod-cli#253: a default node count clashed with another way to give it."""
    shared = {**VENV, "exclusive": False, "gpus_per_node": 2, "cpus_per_node": 8, "retry": "none"}
    text = render(TINY, backend=shared).request["script"]
    for line in ("--gpus-per-node=2", "--cpus-per-task=8", "--no-requeue"):
        assert f"#SBATCH {line}\n" in text
    assert "--exclusive" not in text
    assert "--mem" not in text


HOSTILE_WORD = "a b'c\"d $HOME `touch executed` $(touch executed) é 日本 # ; & | > * ? [x] ~ !"


def test_hostile_values_in_every_field_stay_values(stubs: Path, tmp_path: Path) -> None:
    """Every field of a job that reaches its script and takes any text; words and paths are checked before that."""
    shared = tmp_path / HOSTILE_WORD
    backend = {
        "name": "slurm", "shared_folder": str(shared), "virtual_environment": f"/venv {HOSTILE_WORD}",
        "scratch_folder": f"/scratch {HOSTILE_WORD}", "time_limit_minutes": 60,
    }  # fmt: skip
    environment = {"NAME": f"{HOSTILE_WORD}\nsecond line\\", "PYTHONPATH": HOSTILE_WORD}
    submission = render({**TINY, "backend": backend, "environment": environment, "storage": f"/fsx/{HOSTILE_WORD}"})
    script = tmp_path / "job.sh"
    script.write_text(submission.request["script"], encoding="utf-8")
    Path(next(it for it in submission.uploads if it.endswith("job.json"))).parent.mkdir(parents=True)
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, timeout=300, check=False)
    assert done.returncode == 7, done.stderr  # of the stub of srun
    assert (stubs / "name").read_bytes().decode() == environment["NAME"]
    argv = (stubs / "argv").read_bytes().decode().split("\0")
    assert f"/venv {HOSTILE_WORD}/bin/python" in argv
    assert not list(tmp_path.rglob("executed"))
    if shutil.which("shellcheck") is not None:
        # The two excluded only warn of quotes in the text of a value.
        command = ["shellcheck", "--shell=bash", "--exclude=SC2089,SC2090", str(script)]
        checked = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert checked.returncode == 0, checked.stdout


def test_a_path_of_the_user_comes_after_the_bundle() -> None:
    submission = render({**TINY, "environment": {"PYTHONPATH": "/own"}})
    bundle = f"/fsx/sm_llm/bundles/{submission.request['bundle']}"
    assert f"export PYTHONPATH={bundle}:/own\n" in submission.request["script"]


def refusal(job: dict[str, Any]) -> str:
    with pytest.raises((PlanError, SpecError)) as refused:
        render(job)
    return str(refused.value).replace(" (Python)", "")


@pytest.mark.parametrize(
    ("options", "issue"),
    [
        ({"virtual_environment": None}, "backend.container_image: is not set"),
        ({"container_image": "/fsx/x.sqsh"}, "backend.container_image: cannot be set beside"),
        ({"container_mounts": ["/data"]}, "backend.container_mounts: has no effect without backend.container_image"),
        ({"signal_seconds": 90}, "backend.signal_seconds: has no effect without backend.time_limit_minutes"),
        ({"time_limit_minutes": 5}, "backend.signal_seconds: must be at most half of the time limit"),
        ({"retry": "none", "max_requeues": 3}, "backend.max_requeues: has no effect without backend.retry=requeue"),
        ({"gpus_per_node": 8}, "backend.gpus_per_node: has no effect without backend.exclusive=false"),
        ({"ssh_host": "login"}, "storage: is a folder of this machine"),
        ({"container_image": "123.dkr.ecr.us-west-2.amazonaws.com/repo:tag"}, "must have # between registry"),
        ({"container_image": "/fsx/x.tar"}, r"must end with \.sqsh"),
        ({"signal_seconds": 59, "time_limit_minutes": 60}, "backend.signal_seconds"),
        ({"partition": "two words"}, "backend.partition"),
        ({"ssh_host": "-oProxyCommand=x"}, "backend.ssh_host"),
        ({"shared_folder": "relative"}, "backend.shared_folder: .*absolute path"),
        ({"shared_folder": "/fsx/a\nb"}, "backend.shared_folder"),
        ({"shared_folder": "/fsx/a:b"}, "backend.shared_folder"),
    ],
    ids=str,
)
def test_what_cannot_be_or_has_no_effect_is_refused(options: dict[str, Any], issue: str) -> None:
    assert re.search(issue, refusal({**TINY, "backend": {**VENV, **options}}))


@pytest.mark.parametrize(
    ("fields", "issue"),
    [
        ({"secrets": {"HF_TOKEN": "env:HF_TOKEN"}}, "secrets.HF_TOKEN: cannot be read by a job"),
        ({"backend": {**VENV, "ssh_host": "login"}, "task": {**TINY["task"], "data": ROWS}},
         "task.data.train: is a folder of this machine, and the job runs on login"),
        ({"storage": "/fsx/a\nb"}, "storage: holds characters that no line of a batch script can"),
        ({"backend": container(), "storage": "/fsx/a b"}, "storage: cannot be mounted into a container: .* no ' '"),
        ({"backend": container(shared_folder="/fsx/a$b")}, "backend.shared_folder: cannot be mounted into a container"),
        ({"backend": container(container_mounts=["/a b:/c"])}, "backend.container_mounts.0: cannot be mounted"),
        ({"backend": container(), "storage": "/fsx/a,b"}, "storage: cannot be mounted into a container"),
        ({"backend": container(), "inputs": {"rows": "/a:b"}, "task": {"kind": "script", "entry": "-m x"}},
         "inputs.rows: cannot be mounted into a container"),
        ({"backend": container(), "secrets": {"A": "file:/k,x"}}, "secrets.A: cannot be mounted into a container"),
        ({"backend": container(), "task": {**TINY["task"], "logging": {"sinks": {"tensorboard": {"folder": "/a,b"}}}}},
         r"task\.logging\.sinks\.tensorboard\.folder: cannot be mounted into a container"),
        ({"backend": {**VENV, "ssh_host": "login"}, "storage": "s3://bucket/runs",
          "task": {**TINY["task"], "logging": {"sinks": {"tensorboard": {"folder": "board"}}}}},
         r"task\.logging\.sinks\.tensorboard\.folder: is a folder of this machine"),
    ],
    ids=lambda it: "" if isinstance(it, dict) else it[:40],
)  # fmt: skip
def test_places_that_the_nodes_do_not_see_are_refused(fields: dict[str, Any], issue: str) -> None:
    assert re.search(issue, refusal({**TINY, **fields}))


def test_DL32_auto_resume_with_GRES_is_warned_of() -> None:
    """DL32: HyperPod's auto-resume does nothing for jobs that ask for GRES."""
    import sm_llm

    backend = {**VENV, "exclusive": False, "gpus_per_node": 8, "retry": "auto-resume"}
    [plan] = sm_llm.plan({**TINY, "backend": backend})
    assert any("auto-resume does nothing for jobs that ask for GRES" in str(it) for it in plan.issues)
