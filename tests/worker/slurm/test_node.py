"""One task of a Slurm job, with a program of the test in torchrun's place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sm_llm.contract.hosts import Hosts
from sm_llm.contract.image_packages import WHOLE_ENVIRONMENT
from sm_llm.worker.node_setup import forking_torchrun
from sm_llm.worker.slurm.node import BAD_NODE, Node

ROOT = Path(__file__).parents[3]


def job(folder: Path, **fields: Any) -> dict[str, str]:
    """Slurm's variables of the second of three nodes, with job.json in ``folder``."""
    backend = {"scratch_folder": str(folder / "scratch"), "stop_seconds": 5.0, "container_image": None}
    spec = {"backend": backend, "task": {"kind": "train"}}
    text = json.dumps({"run_id": "run-1", "run_uri": str(folder / "run"), "spec": spec, **fields})
    (folder / "job.json").write_text(text)
    (folder / "run").mkdir(exist_ok=True)
    return {
        "SM_LLM_JOB_FILE": str(folder / "job.json"),
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[10,9],m1",
        "SLURM_JOB_NODELIST": "n[1-8]",
        "SLURMD_NODENAME": "n9",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
    }


def test_DL16_DL17_SL23_rank_0_is_on_the_first_node_of_the_step(tmp_path: Path) -> None:
    """DL16, DL17: the first compute node by its own name, wherever the job was submitted, and a static rendezvous."""
    node = Node(job(tmp_path), 8, "train.py")
    assert node.names == ["m1", "n9", "n10"]
    assert (node.index, node.restart) == (1, 0)
    command = node.command()
    for part in ("--nnodes=3", "--node-rank=1", "--master-addr=m1", "--rdzv-backend=static", "--nproc-per-node=8"):
        assert part in command
    assert not any("10.0.0.99" in part for part in command)


def test_DL18_SL14_the_rendezvous_is_another_for_every_start_and_job(tmp_path: Path) -> None:
    """DL18, and facebookincubator/submitit#1613: an earlier start's processes meet nobody of this one."""
    variables = job(tmp_path)
    starts = [
        Node({**variables, **more}, 1, "train.py").rendezvous
        for more in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "18"}, {"SLURM_STEP_ID": "1"})
    ]
    assert len({name for name, _ in starts}) == 4
    assert len({port for _, port in starts[:3]}) == 3
    assert all(10_000 <= port < 30_000 for _, port in starts)


def test_nodes_that_stay_keep_their_ranks_over_a_restart(tmp_path: Path) -> None:
    (tmp_path / "attempt").mkdir()
    variables = job(tmp_path / "attempt")
    node = Node({**variables, "SM_LLM_NODES": "n10,lost,n9"}, 1, "train.py")
    assert node.names == ["n10", "m1", "n9"]
    assert "--master-addr=n10" in node.command()
    first = Node({**variables, "SM_LLM_NODES": "n10,lost,n9", "SLURMD_NODENAME": "n10"}, 1, "train.py")
    first.lay_out()
    assert (tmp_path / "nodes").read_text() == "n10,m1,n9"
    hosts = Hosts.read(first.base / "input/config/resourceconfig.json")
    assert hosts is not None
    assert (hosts.leader, hosts.names) == ("n10", ("n10", "m1", "n9"))


@pytest.mark.parametrize(("kind", "forks"), [("train", True), ("script", False)])
def test_the_processes_of_a_training_share_one_import_of_torch(kind: str, forks: bool, tmp_path: Path) -> None:
    backend = {"scratch_folder": str(tmp_path / "scratch"), "stop_seconds": 5.0, "container_image": None}
    command = Node(job(tmp_path, spec={"backend": backend, "task": {"kind": kind}}), 1, "train.py").command()
    assert (forking_torchrun.__name__ in command, "torch.distributed.run" in command) == (forks, not forks)


def run(folder: Path, program: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """The node program, whose torchrun is ``program``."""
    package = folder / "fake" / "torch" / "distributed"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").touch()
    (package / "run.py").write_text(program)
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables = {**own, **environ, "PYTHONPATH": f"{folder / 'fake'}:{ROOT}"}
    argv = [sys.executable, "-P", str(ROOT / "sm_llm/worker/slurm/node.py"), "2", "train.py"]
    return subprocess.Popen(argv, env=variables, cwd=folder)


def test_a_node_runs_torchrun_and_returns_its_code(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "base = pathlib.Path(os.environ['SAGEMAKER_BASE_DIR'])\n"
        "print(os.environ['OMP_NUM_THREADS'], (base / 'input/config/resourceconfig.json').read_text())\n"
        "(base / 'output/failure').write_text('out of memory')\n"
        "sys.exit(3)\n"
    )
    assert run(tmp_path, program, {**job(tmp_path), "SLURM_CPUS_ON_NODE": "8"}).wait(60) == 3
    log = (tmp_path / "node-1.log").read_text()
    assert "job 17, restart 0: node 1 of 3 is n9; rendezvous 17-0-0 at m1:" in log
    assert '4 {"current_host": "n9", "hosts": ["m1", "n9", "n10"]' in log
    assert (tmp_path / "failure-0-1").read_text() == "out of memory"


STOPS = """
import os, pathlib, signal, sys, time
base = pathlib.Path(os.environ['SAGEMAKER_BASE_DIR'])
def stop(*_):
    (base / 'output/stopped').write_text('{}')
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
(base / 'ready').touch()
stops = pathlib.Path(%r)
while not stops.exists():
    time.sleep(0.05)
stop()
"""


def until(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_SL13_SIGTERM_reaches_torchrun_once_and_a_stop_in_order_is_not_a_failure(tmp_path: Path) -> None:
    process = run(tmp_path, STOPS % str(tmp_path / "never"), {**job(tmp_path), "SLURMD_NODENAME": "m1"})
    until(tmp_path / f"scratch/sm-llm-{os.geteuid()}/run-1/node-m1/ready", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert (tmp_path / "stopped-0").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("request_file", ["stop", "yield-2"])
def test_a_request_becomes_the_workers_stop_file(tmp_path: Path, request_file: str) -> None:
    environ = {**job(tmp_path), "SLURMD_NODENAME": "m1", "SLURM_RESTART_COUNT": "2"}
    (tmp_path / "run/stop").touch()
    (tmp_path / "yield-1").touch()
    process = run(tmp_path, STOPS % str(tmp_path / "run/stop"), environ)
    until(tmp_path / f"scratch/sm-llm-{os.geteuid()}/run-1/node-m1/ready", process)
    assert not (tmp_path / "run/stop").exists(), "an earlier start was asked by it"
    (tmp_path / request_file).touch()
    assert process.wait(60) == 0
    assert (tmp_path / "stopped-2").exists()


def test_programs_of_the_virtual_environment_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``neuron_parallel_compile``, the compiler, and python in a shell script."""
    node = Node({**job(tmp_path), "PATH": "/usr/bin:/bin"}, 1, "train.py")
    monkeypatch.setattr(sys, "prefix", "/fsx/venv")
    variables = node.variables()
    assert (variables["PATH"], variables["VIRTUAL_ENV"]) == ("/fsx/venv/bin:/usr/bin:/bin", "/fsx/venv")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert node.variables()["PATH"] == "/usr/bin:/bin"


@pytest.mark.parametrize("image", [None, "x.sqsh"])
def test_the_lock_of_images_is_installed_in_containers_alone(image: str | None, tmp_path: Path) -> None:
    backend = {"scratch_folder": str(tmp_path), "stop_seconds": 5.0, "container_image": image}
    node = Node(job(tmp_path, spec={"backend": backend, "task": {"kind": "train"}}), 1, "train.py")
    assert (WHOLE_ENVIRONMENT in node.variables()) == (image is None)


def test_folders_that_the_task_writes_to_are_checked(tmp_path: Path) -> None:
    backend = {"scratch_folder": str(tmp_path / "scratch"), "stop_seconds": 5.0, "container_image": "x.sqsh"}
    spec = {"backend": backend, "task": {"kind": "train"}}
    environ = {**job(tmp_path, spec=spec), "SM_LLM_SLURM_OUTPUTS": '["/fsx/board"]'}
    expected = Node(environ, 1, "train.py").expected()
    assert Path("/fsx/board") in expected.writable
    assert Path("/fsx/board") in expected.mounted


def test_an_unfit_node_is_named(tmp_path: Path) -> None:
    environ = {**job(tmp_path), "SM_LLM_SLURM_DEVICES": "neuron:16"}
    (tmp_path / "fit-0-0").touch()
    (tmp_path / "unfit-0-2").touch()  # all have judged themselves, so this one waits for nobody
    assert run(tmp_path, "raise SystemExit('started')", environ).wait(60) == BAD_NODE
    text = (tmp_path / "failure-0-1").read_text()
    assert text == "node n9 is unfit: 0 neuron devices are visible, and 16 are expected"
    assert (tmp_path / "unfit-0-1").read_text() == "n9\n"
    assert not (tmp_path / "fit-0-1").exists()


def test_a_port_that_another_program_listens_on_is_named_and_left(tmp_path: Path) -> None:
    environ = {**job(tmp_path), "SLURMD_NODENAME": "m1", "SLURM_JOB_ID": str(os.getpid())}  # a port of its own
    for name in ("fit-0-1", "fit-0-2"):
        (tmp_path / name).touch()
    _, port = Node(environ, 1, "train.py").rendezvous
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert run(tmp_path, "raise SystemExit('started')", environ).wait(60) == BAD_NODE
    assert (tmp_path / "failure-0-0").read_text() == (
        f"node m1: port {port}, at which the processes of the job meet, cannot be used: Address already in use"
    )
    assert (tmp_path / "port-taken-0").exists()
    assert (tmp_path / "fit-0-0").exists(), "the next start may have this node"


def test_a_node_that_cannot_write_its_log_is_checked_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A shared folder that one node cannot write: its reason goes to the job's own log."""
    (tmp_path / "node-1.log").mkdir()
    (tmp_path / "fit-0-0").touch()
    (tmp_path / "fit-0-2").touch()
    environ = {**job(tmp_path), "SM_LLM_SLURM_DEVICES": "neuron:16"}
    assert run(tmp_path, "raise SystemExit('started')", environ).wait(60) == BAD_NODE
    assert "sm_llm: node n9 is unfit: 0 neuron devices are visible" in capfd.readouterr().out
