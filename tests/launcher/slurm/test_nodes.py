"""Nodes of a cluster, a shell on one of them, and the checks before a first job."""

from __future__ import annotations

import inspect
import json
import os
import pty
import select
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError, SpecError, SubmitError
from sm_llm.launcher.backend import ClusterCheck, ClusterNode
from sm_llm.launcher.backends.slurm.backend import SlurmBackend
from sm_llm.launcher.backends.slurm.cluster import Cluster
from sm_llm.launcher.backends.slurm.jobs import shell_command
from sm_llm.launcher.backends.slurm.nodes import node_of
from sm_llm.launcher.backends.slurm.paths import ClusterPaths
from sm_llm.launcher.backends.slurm.setup import doctor
from sm_llm.launcher.backends.slurm.setup.setup_job import JobEnd
from sm_llm.launcher.backends.slurm.submit import check_cluster
from sm_llm.launcher.backends.slurm.transport import CommandResult, LocalTransport, SshTransport
from sm_llm.launcher.tools import clusters
from sm_llm.spec.backends.slurm import SlurmAccess, SlurmOptions
from tests.fixtures.slurm import NODES, stand_in_image
from tests.launcher.slurm.test_jobs import Scripted, a_run, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.launcher.backends.slurm.setup.setup_job import SetupJob
    from tests.fixtures.slurm import SlurmCluster, SlurmOverSsh

NAMES = [f"node{it + 1}" for it in range(NODES)]


@pytest.mark.parametrize(
    ("fields", "node"),
    [
        (["n1", "idle", "gpu:8", "gpu:0", "none"], ClusterNode("n1", "idle", "", 8, 8)),
        (["n1", "mixed", "gpu:h100:8(S:0-1)", "gpu:h100:3(IDX:0-2)", "none"], ClusterNode("n1", "mixed", "", 8, 5)),
        (["n1", "mixed", "gpu:a:4,gpu:b:2,nic:9", "gpu:a:1(IDX:0),gpu:b:0", ""], ClusterNode("n1", "mixed", "", 6, 5)),
        (["n1", "allocated", "neuron:16", "neuron:16", "none"], ClusterNode("n1", "allocated", "", 16, 0)),
        (["n1", "idle", "(null)", "gpu:0", "none"], ClusterNode("n1", "idle")),
        (["n1", "idle*", "gpu:8", "gpu:0", "none"], ClusterNode("n1", "idle*", "", 8, 0)),
        (["n1", "drained", "gpu:8", "gpu:0", "bad fan"], ClusterNode("n1", "drained", "bad fan", 8, 0)),
        (["n1", "fail", "gpu:8", "gpu:0", "Action:Replace"],
         ClusterNode("n1", "fail", "Action:Replace", 8, 0, "being replaced")),
        (["n1", "down", "gpu:8", "gpu:0", "action:reboot [root]"],
         ClusterNode("n1", "down", "action:reboot [root]", 8, 0, "being rebooted")),
    ],
    ids=lambda it: it[2] + it[1] + it[4] if isinstance(it, list) else "",
)  # fmt: skip
def test_a_line_of_sinfo(fields: list[str], node: ClusterNode) -> None:
    assert node_of(fields) == node


def test_only_a_cluster_has_nodes_and_its_options_are_checked() -> None:
    with pytest.raises(PlanError, match="backend: has no nodes to list"):
        clusters.nodes("local")
    with pytest.raises(PlanError, match="there is no such backend"):
        clusters.check_cluster("slrum")
    with pytest.raises(SpecError) as refused:
        clusters.nodes("slurm", "backend.ssh_hots=login", "partition=p5", backend={"partition": "two words"})
    text = str(refused.value)
    for words in (
        "backend.ssh_hots",
        "ssh_host",
        "Write backend.partition=VALUE",
        "must be one word",
    ):
        assert words in text
    with pytest.raises(SpecError, match=r"backend\.shared_folder"):
        clusters.check_cluster("slurm")


def test_a_shell_is_a_step_of_the_running_job(tmp_path: Path) -> None:
    @dataclass
    class Login(Scripted):
        def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
            return CommandResult(0, b"n10\nn9\n", "") if argv[0] == "scontrol" else super().run(argv, stdin=stdin)

        def interactive(self, argv: Sequence[str]) -> list[str]:
            return LocalTransport().interactive(argv)

    cluster = Cluster(Login(listed("RUNNING")))
    _, record = a_run(tmp_path, "7")
    attempt = record.attempts[0]
    argv = shell_command(record, attempt, 1, cluster)
    assert argv[:4] == ["srun", "--overlap", "--pty", "--jobid=7"]
    assert "--nodelist=n10" in argv  # as ranks are counted: n9 has rank 0
    order = Path(ClusterPaths(str(tmp_path)).attempt(record.run_id, attempt.number)).parent / "nodes"
    order.parent.mkdir(parents=True)
    order.write_text("n10,n9")  # of a later start: n10 replaced the node of rank 0, and n9 kept its own
    assert "--nodelist=n9" in shell_command(record, attempt, 1, cluster)
    order.write_text("n8,n9")  # of the start before, until the new one has noted its own
    assert "--nodelist=n10" in shell_command(record, attempt, 1, cluster)
    with pytest.raises(SubmitError, match="--node must be at most 1: job 7 runs on n9, n10"):
        shell_command(record, attempt, 2, cluster)
    with pytest.raises(SubmitError, match="job 7 is not running: it is waiting"):
        shell_command(record, attempt, 0, Cluster(Login(listed("PENDING"))))
    with pytest.raises(SubmitError, match=r"jobs of a workflow\. Name the run of one of its steps"):
        shell_command(record, attempt.model_copy(update={"native_id": "localhost/7,8"}), 0, cluster)
    command = SshTransport("login").interactive(["srun", "a b"])
    assert (command[:2], command[-3:-1]) == (["ssh", "-t"], ["--", "login"])
    assert shlex.split(command[-1]) == ["bash", "-lc", 'exec "$@"', "shell", "srun", "a b"]


def options(**fields: Any) -> SlurmOptions:
    return SlurmOptions(**({"shared_folder": "/fsx", "virtual_environment": "/venv"} | fields))


@dataclass
class Doctored(Scripted):
    """A login node with two nodes, with or without plugins."""

    help: str = ""
    folders: tuple[str, ...] = ()
    gres: str = "(null)"
    busy: tuple[str, ...] = ()
    """Lines of further nodes."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        if argv[0] == "sinfo":
            lines = (f"n1 idle {self.gres} gpu:0 none", *self.busy)
            return CommandResult(0, "".join(f"{it} \n".replace(" ", "\x1f") for it in lines).encode(), "")
        if list(argv[:2]) == ["scontrol", "show"]:
            types = "(null)" if self.gres == "(null)" else "gpu"
            return CommandResult(0, f"ClusterName             = ml\nGresTypes               = {types}\n".encode(), "")
        if argv[0] == "srun":
            return CommandResult(0, self.help.encode(), "")
        if argv[0] == "test":
            return CommandResult(0 if argv[-1] in self.folders else 1, b"", "")
        return super().run(argv, stdin=stdin)


def found(login: Doctored, **fields: Any) -> dict[str, ClusterCheck]:
    return {it.name: it for it in doctor.checks(options(**fields), Cluster(login), lambda text: None)}


def test_what_a_login_node_shows() -> None:
    bare = Doctored(listed("RUNNING"))
    plain = found(bare)
    assert {name: it.outcome for name, it in plain.items()} == {
        "slurm": "ok", "nodes": "ok", "accounting": "warning", "HyperPod": "ok", "pyxis": "warning",
        "shared folder": "failed",
    }  # fmt: skip
    image = "658645717510.dkr.ecr.us-west-2.amazonaws.com#smdistributed-modelparallel:2.5.1-gpu-py311-cu124"
    asked = {"virtual_environment": None, "container_image": image, "retry": "auto-resume"}
    lacking = found(bare, **asked)
    assert (lacking["pyxis"].outcome, lacking["HyperPod"].outcome) == ("failed", "failed")
    hyperpod = replace(bare, help="--container-image=IMAGE", folders=("/opt/sagemaker_cluster",), gres="gpu:8")
    there = found(hyperpod, **asked)
    assert (there["auto-resume"].outcome, "the nodes have GRES" in there["auto-resume"].detail) == ("warning", True)
    policy = there["image in ECR"].policy
    assert policy is not None
    resource = "arn:aws:ecr:us-west-2:658645717510:repository/smdistributed-modelparallel"
    assert policy["Statement"][0]["Resource"] == resource
    assert found(replace(hyperpod, gres="(null)"), **asked)["auto-resume"].outcome == "ok"
    # The rule of SageMaker's execution roles for such names does not hold for a cluster's role.
    named = image.replace("smdistributed-modelparallel", "team/SageMaker-train")
    assert found(hyperpod, **{**asked, "container_image": named})["image in ECR"].policy is not None


@pytest.mark.parametrize("gres", ["(null)", "gpu:8"])
def test_DL32_auto_resume_on_a_cluster_with_GRES_is_warned_of_at_launch(
    gres: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """DL32: awslabs/awsome-distributed-ai#197."""
    login = Doctored(listed("RUNNING"), folders=("/fsx", "/opt/sagemaker_cluster"), gres=gres)
    check_cluster(options(retry="auto-resume"), Cluster(login))
    printed = capsys.readouterr().err
    assert ("the cluster configures GRES (gpu)" in printed) == (gres != "(null)")
    check_cluster(options(), Cluster(login))
    assert not capsys.readouterr().err


def test_SL28_every_verb_takes_the_same_options() -> None:
    """aws/sagemaker-hyperpod-cli#352: one sub-command lacked options of another."""
    for name, field in SlurmAccess.model_fields.items():
        assert field.annotation == SlurmOptions.model_fields[name].annotation
    for verb in (clusters.check_cluster, clusters.nodes, clusters.create_environment, clusters.import_image):
        assert {"overrides", "fields"} <= set(inspect.signature(verb).parameters)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_folder_of_the_nodes_own_at_the_path_of_the_shared_one_is_noticed(is_shared: bool, tmp_path: Path) -> None:
    """Only what the login node wrote proves that a folder is the same one."""
    (tmp_path / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    if is_shared:
        (tmp_path / "job.sh").touch()  # of ``run_job``, whose job works in its folder
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1"}
    argv = ["bash", "-c", doctor.NODES, "check", str(tmp_path), str(tmp_path), "", "", "/opt/x"]
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert f"node n1 shared={'yes' if is_shared else 'no'} scratch=yes" in done.stdout


@pytest.mark.parametrize("starts", [True, False])
def test_nodes_that_were_not_checked_are_named_with_the_reason(
    starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(job: SetupJob, *arguments: object, **more: object) -> JobEnd:
        assert job.nodes == 1
        if not starts:
            raise SubmitError("job 7 has not started within 60 s: it is waiting")
        return JobEnd(True, "node n1 shared=yes scratch=yes python=yes enroot=no\n")

    monkeypatch.setattr(doctor, "run_job", run_job)
    busy = ("n2 allocated gpu:8 gpu:8 none", "n3 mixed gpu:8 gpu:1 none", "n4 allocated gpu:8 gpu:8 none",
            "n5 drained gpu:8 gpu:0 bad_fan")  # fmt: skip
    login = Doctored(listed("RUNNING"), folders=(str(tmp_path),), busy=busy)
    checks = found(login, shared_folder=str(tmp_path))
    words = "n2, n4 (allocated); n3 (mixed); n5 (drained: bad_fan)"
    if starts:
        assert checks["nodes not checked"] == ClusterCheck("nodes not checked", "skipped", words)
        assert checks["shared folder"].outcome == "ok"
    else:
        assert checks["what nodes see"].detail.endswith(f"Nodes: n1 (idle, but it printed nothing); {words}")


def test_a_controller_that_does_not_answer_is_the_only_finding() -> None:
    silent = Scripted(CommandResult(1, b"", "no controller"))
    cluster = Cluster(replace(silent))
    cluster.__dict__["name"] = "ml"
    [only] = list(doctor.checks(options(), cluster, lambda text: None))
    assert (only.name, only.outcome) == ("slurm", "failed")


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_checks_of_a_real_cluster(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    given: dict[str, Any] = {"shared_folder": str(tmp_path / "shared"), "scratch_folder": str(tmp_path)}
    report = clusters.check_cluster("slurm", backend={**given, "virtual_environment": sys.prefix})
    assert report.ok, report.text()
    outcomes = {it.name: (it.outcome, it.detail) for it in report.checks}
    assert outcomes["shared folder"] == ("ok", f"on {NODES} nodes")
    assert outcomes["virtual environment"] == ("ok", f"on {NODES} nodes")
    assert outcomes["accounting"][0] == "warning"
    assert list((tmp_path / "shared" / "setup").iterdir()) == [], "a job that ended well leaves nothing"

    absent = {**given, "container_image": "/fsx/x.sqsh", "scratch_folder": str(tmp_path / "absent")}
    report = clusters.check_cluster("slurm", backend=absent)
    outcomes = {it.name: (it.outcome, it.detail) for it in report.checks}
    assert not report.ok
    assert outcomes["scratch folder"] == (
        "failed", f"{tmp_path}/absent cannot be written on {', '.join(NAMES)}",
    )  # fmt: skip
    # For an image that is not there the stand-ins take pyxis' options and start no container, as some clusters do.
    assert outcomes["container"][1].startswith("pyxis takes the option and starts no container")
    there = {**given, "container_image": stand_in_image(tmp_path / "image.sqsh")}
    checks = {it.name: it for it in clusters.check_cluster("slurm", backend=there).checks}
    assert (checks["container"].outcome, checks["enroot"].outcome) == ("ok", "failed"), checks
    assert json.dumps(report.to_json())


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_nodes_and_a_shell_over_ssh(slurm_over_ssh: SlurmOverSsh, tmp_path: Path) -> None:
    slurm = slurm_over_ssh.cluster
    slurm.run("scontrol", "update", "nodename=node4", "state=drain", "reason=Action:Replace")
    try:
        rows = {it.name: it for it in clusters.nodes(None, backend={"ssh_host": slurm_over_ssh.host})}
        assert sorted(rows) == NAMES
        assert (rows["node1"].free, rows["node1"].accelerators) == (2, 2)
        assert (rows["node4"].state, rows["node4"].free) == ("drained", 0)
        assert (rows["node4"].reason, rows["node4"].health) == ("Action:Replace", "being replaced")
    finally:
        slurm.run("scontrol", "update", "nodename=node4", "state=resume")
    cluster = SlurmBackend().connect(slurm_over_ssh.host)
    # A job is the run's own by its folder.
    folder = Path(ClusterPaths(str(tmp_path)).attempt("tiny-1", 1))
    folder.mkdir(parents=True)
    job_id = slurm.run("sbatch", "--parsable", "-N2", f"--chdir={folder}", "--wrap", "sleep 300").strip()
    _, record = a_run(tmp_path, job_id)
    try:
        slurm.await_state(lambda: getattr(cluster.job(job_id), "state", "") == "RUNNING")
        argv = shell_command(record, record.attempts[0], 1, cluster)
        assert "in-the-job " + job_id + " " + slurm.nodes_of(job_id)[1] in typed(
            argv, "echo in-the-job $SLURM_JOB_ID $(hostname); exit\n"
        )
    finally:
        slurm.run("scancel", job_id)


def typed(argv: list[str], text: str, seconds: float = 60) -> str:
    """What a terminal shows of a program in which ``text`` is typed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"})
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + seconds
    try:
        os.write(ours, text.encode())
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                shown += os.read(ours, 4096)
            elif process.poll() is not None:
                break
    except OSError:  # Linux reports the end of a terminal as an error
        pass
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode("utf-8", "replace").replace("\r\n", "\n")
