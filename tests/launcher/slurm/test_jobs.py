"""How jobs ended, with and without Slurm's own answer, and what a cluster lacks."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import sm_llm
from sm_llm import cli
from sm_llm.errors import RunFailed, SubmitError
from sm_llm.launcher.backends.slurm import jobs, submit
from sm_llm.launcher.backends.slurm.cluster import Cluster
from sm_llm.launcher.backends.slurm.paths import ClusterPaths
from sm_llm.launcher.backends.slurm.transport import CommandResult, LocalTransport, NoAnswer, SshTransport
from sm_llm.launcher.log_filter import LogFilter
from sm_llm.launcher.observe.follow import final_state
from sm_llm.launcher.submission import MayRun
from sm_llm.runs.run_record import Attempt, RunRecord
from sm_llm.runs.run_states import EXIT_CODES, RunState
from sm_llm.runs.run_store import run_store_at
from tests.launcher.slurm.conftest import TINY, VENV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.runs.run_store import RunStore
    from tests.fixtures.slurm import SlurmCluster, SlurmOverSsh


def a_run(folder: Path, job_id: str = "4000000") -> tuple[RunStore, RunRecord]:
    """A run whose only attempt is this job."""
    spec = {"backend": {"name": "slurm", "shared_folder": str(folder)}, "task": {"kind": "train"}}
    attempt = Attempt(number=1, native_id=f"localhost/{job_id}", started=1.0)
    record = RunRecord(run_id="tiny-1", name="tiny", created=1.0, spec=spec, spec_digest="d", attempts=(attempt,))
    run_store = run_store_at(folder / "tiny-1")
    run_store.create(record)
    return run_store, record


def left(folder: Path, **files: str) -> None:
    """What the job left in its folder."""
    location = Path(ClusterPaths(str(folder)).attempt("tiny-1", 1))
    location.mkdir(parents=True)
    for name, text in files.items():
        (location / name.replace("__", ".").replace("_", "-")).write_text(text)


@dataclass
class Scripted:
    """A login node whose squeue gives one answer; files are those of this machine."""

    squeue: CommandResult
    where: str = "login"
    asked: list[Sequence[str]] = field(default_factory=list)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        self.asked.append(argv)
        if argv[0] == "sacct":
            return CommandResult(1, b"", "Slurm accounting storage is disabled")
        if argv[0] in ("scancel", "sbatch"):
            return CommandResult(0, b"", "")
        return self.squeue if argv[0] == "squeue" else LocalTransport().run(argv, stdin=stdin)


@dataclass
class Accounting(Scripted):
    """A login node whose accounting database has these rows."""

    rows: str = ""
    folder: str = "/jobs/tiny-1/attempt-1"

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        if argv[0] == "sacct":
            self.asked.append(argv)
            rows = "".join(f"{it}|{self.folder}\n" for it in self.rows.splitlines())
            return CommandResult(0, rows.encode(), "")
        return super().run(argv, stdin=stdin)


def listed(state: str, reason: str = "None", restarts: int = 0) -> CommandResult:
    fields = ("7", state, reason, str(restarts), "N/A", "node[1-2]", "", "/jobs/tiny-1/attempt-1")
    return CommandResult(0, "".join(f"{it}\x1f" for it in fields).encode() + b"\n", "")


FORGOTTEN = CommandResult(1, b"", "slurm_load_jobs error: Invalid job id specified")


@pytest.mark.parametrize(
    ("files", "state", "reason"),
    [
        ({"outcome_0__json": '{"exit_code": 1}', "job__log": "a\nsrun: error: task 1\n"}, RunState.FAILED,
         "exit code 1: srun: error: task 1"),
        ({"outcome_0__json": '{"exit_code": 78}', "failure_0_2": "node n3 is unfit: no disk"}, RunState.FAILED,
         "node n3 is unfit: no disk"),
        ({"outcome_0__json": '{"exit_code": 0}'}, RunState.COMPLETED_UNPUBLISHED, "ended without an error"),
        ({"outcome_0__json": '{"exit_code": 0}', "stopped_0": ""}, RunState.STOPPED, "asked to stop"),
        ({"outcome_0__json": '{"exit_code": 0, "requeued": true}'}, RunState.UNKNOWN, "no longer knows job 7"),
        ({"outcome_0__json": '{"exit_'}, RunState.UNKNOWN, "no longer knows job 7"),
        ({}, RunState.UNKNOWN, "no longer knows job 7"),
    ],
    ids=["failed", "unfit", "completed", "stopped", "requeued", "damaged", "nothing"],
)  # fmt: skip
def test_SL01_a_job_that_slurm_has_forgotten(
    files: dict[str, str], state: RunState, reason: str, tmp_path: Path
) -> None:
    run_store, record = a_run(tmp_path, "7")
    left(tmp_path, **files)
    native = jobs.state_of(run_store, record, Cluster(Scripted(FORGOTTEN)))
    assert native.state is state
    assert reason in native.detail
    assert (run_store.record().attempts[0].state is None) == (state is RunState.UNKNOWN), "nothing is guessed"


@pytest.mark.parametrize(
    ("native", "state"),
    [
        ("NODE_FAIL", RunState.FAILED),
        ("CANCELLED", RunState.STOPPED),
        ("TIMEOUT", RunState.STOPPED),
        ("COMPLETED", RunState.COMPLETED_UNPUBLISHED),
    ],
)
def test_the_state_decides_and_not_exit_code_0(native: str, state: RunState, tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path, "7")
    left(tmp_path, outcome_0__json='{"exit_code": 0}')
    assert jobs.state_of(run_store, record, Cluster(Scripted(listed(native)))).state is state
    assert run_store.record().attempts[0].state is state


@pytest.mark.parametrize(("retry", "state"), [("requeue", RunState.RESTARTING), ("none", RunState.STOPPED)])
def test_to_be_preempted_is_the_end_of_a_job_that_is_not_requeued(retry: str, state: RunState, tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path, "7")
    record = run_store.update(lambda it: it.model_copy(update={"spec": {**it.spec, "backend": {
        **it.spec["backend"], "retry": retry,
    }}}))  # fmt: skip
    left(tmp_path)
    assert jobs.state_of(run_store, record, Cluster(Scripted(listed("PREEMPTED")))).state is state
    # Once squeue has forgotten it nobody starts it again, whatever was asked for.
    run_store, record = a_run(tmp_path / "b", "7")
    left(tmp_path / "b")
    login = Accounting(FORGOTTEN, rows="7|PREEMPTED|2026-11-29T13:48:14|n1\n")
    assert jobs.state_of(run_store, record, Cluster(login)).state is RunState.STOPPED


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("7\n", "7"),
        ("7;cluster\n", "7"),
        ("Welcome\n12 users\n7\n", "7"),
        ("queued\n", None),
        ("", None),
    ],
)
def test_what_sbatch_prints_beside_the_number(printed: str, job_id: str | None) -> None:
    """A site's sbatch may be a script of its own; without a number nobody knows whether a job was submitted."""

    class Login(Scripted):
        def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
            return CommandResult(0, printed.encode(), "")

    cluster = Cluster(Login(FORGOTTEN))
    if job_id is not None:
        assert cluster.submit("/jobs", "job.sh") == job_id
    else:
        with pytest.raises(NoAnswer, match="printed no number of a job"):
            cluster.submit("/jobs", "job.sh")


def test_a_login_node_without_slurm_is_named_before_anything_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    backend = {**VENV, "shared_folder": str(tmp_path)}
    with pytest.raises(SubmitError, match=r"sbatch is not on this machine\. Work on a login node"):
        sm_llm.launch({**TINY, "backend": backend, "storage": str(tmp_path / "runs")})
    assert not list((tmp_path / "runs").glob("*/attempts/*"))


@pytest.mark.parametrize("native", ["PREEMPTED", "REQUEUED", "COMPLETING", "BRAND_NEW"])
def test_what_is_not_an_end_settles_nothing(native: str, tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path, "7")
    assert not jobs.state_of(run_store, record, Cluster(Scripted(listed(native)))).state.is_final
    assert run_store.record() == record


# As sacct of Slurm 22.05 with slurmdbd printed them for jobs of a real cluster, with another job's number.
RECORDED = {
    "completed": ("7|COMPLETED|2026-11-29T13:48:14|node1\n", RunState.COMPLETED_UNPUBLISHED, "ended without an error"),
    "failed": ("7|FAILED|2026-11-29T13:48:14|node1\n", RunState.FAILED, "the job failed"),
    "cancelled with exit code 0": ("7|CANCELLED by 0|2026-11-29T13:48:14|node2\n", RunState.STOPPED, "cancelled"),
    "node lost with exit code 0": ("7|NODE_FAIL|2026-11-29T13:48:32|node2\n", RunState.FAILED, "a node failed"),
    "requeued": (
        "7|REQUEUED|2026-11-29T13:48:14|node2\n7|COMPLETED|2026-11-29T13:48:15|node1\n",
        RunState.COMPLETED_UNPUBLISHED, "ended without an error",
    ),
    "requeued after a lost node": (
        "7|NODE_FAIL|2026-11-29T13:48:32|node2\n7|COMPLETED|2026-11-29T13:49:01|node2\n",
        RunState.COMPLETED_UNPUBLISHED, "ended without an error",
    ),
    "none": ("", RunState.UNKNOWN, "no longer knows job 7"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "state", "reason"), RECORDED.values(), ids=RECORDED)
def test_SL18_the_newest_row_of_the_accounting_is_the_end(
    rows: str, state: RunState, reason: str, tmp_path: Path
) -> None:
    """MFlowCode/MFC#1311: without -D sacct may keep the state of a start that was requeued."""
    run_store, record = a_run(tmp_path, "7")
    left(tmp_path)
    login = Accounting(FORGOTTEN, rows=rows)
    native = jobs.state_of(run_store, record, Cluster(login))
    assert native.state is state
    assert reason in native.detail
    asked = next(argv for argv in login.asked if argv[0] == "sacct")
    assert {"-X", "-D"} <= set(asked)


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        ("7|RUNNING|2026-11-29T13:48:14|node1\n", RunState.UNKNOWN),
        ("7|FAILED|2026-11-29T13:48:15|n1\n7|PREEMPTED|2026-11-29T13:48:14|n1\n", RunState.FAILED),
        ("70|FAILED|2026-11-29T13:48:14|n1\n7.batch|FAILED|2026-11-29T13:48:14|n1\n7|\n", RunState.UNKNOWN),
    ],
    ids=["runaway", "order", "others"],
)
def test_rows_of_the_accounting_that_are_no_end(rows: str, state: RunState, tmp_path: Path) -> None:
    """A job whose end never reached the database stays RUNNING there."""
    run_store, record = a_run(tmp_path, "7")
    left(tmp_path)
    assert jobs.state_of(run_store, record, Cluster(Accounting(FORGOTTEN, rows=rows))).state is state


def test_the_accounting_comes_before_what_the_script_left(tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path, "7")
    left(tmp_path, outcome_0__json='{"exit_code": 0}')
    login = Accounting(FORGOTTEN, rows=RECORDED["node lost with exit code 0"][0])
    assert jobs.state_of(run_store, record, Cluster(login)).state is RunState.FAILED


@dataclass
class Submits(Accounting):
    """A login node that takes a job, which fails at once."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        if argv[:2] == ["sh", "-c"] and "sbatch" in argv[2]:
            # It works in the folder that it was submitted with.
            self.squeue = CommandResult(0, self.squeue.output.replace(b"/jobs/tiny-1/attempt-1", argv[4].encode()), "")
            return CommandResult(0, b"7\n", "")
        return super().run(argv, stdin=stdin)


def test_SL05_a_launch_returns_the_run_and_a_failed_wait_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA-NeMo/Run#289: ``run()`` returned None, and did not raise where the job failed."""
    login = Submits(listed("FAILED", "NonZeroExitCode"))
    monkeypatch.setattr("sm_llm.launcher.backends.slurm.cluster.cluster", lambda host: Cluster(login))
    backend = {**VENV, "shared_folder": str(tmp_path), "scratch_folder": str(tmp_path)}
    job = {**TINY, "backend": backend, "storage": str(tmp_path / "runs")}
    run = sm_llm.launch(job)
    assert run.attempts[-1].native_id == "localhost/7"
    with pytest.raises(RunFailed, match="the job failed"):
        run.wait()
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    login.squeue = listed("FAILED", "NonZeroExitCode")
    monkeypatch.setattr(sys, "argv", ["sm-llm", "fit", str(file), "--wait", "--new"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == EXIT_CODES[RunState.FAILED]


def test_a_wait_for_a_job_that_nobody_knows_prints_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would wait for good, and print nothing."""
    states = iter([*3 * [(RunState.UNKNOWN, "Slurm no longer knows job 7")], (RunState.FAILED, None)])
    run: Any = SimpleNamespace(id="tiny-1", run_store=run_store_at(tmp_path), describe=lambda: next(states))
    assert final_state(run, 1.0, lambda _: None) is RunState.FAILED
    assert capsys.readouterr().err == ("tiny-1: Slurm no longer knows job 7. Its state is not known; still waiting\n")


def test_SL25_no_text_of_a_log_decides_how_a_job_ended(tmp_path: Path) -> None:
    """awslabs/awsome-distributed-ai#1033: CancelledError is printed at a clean end."""
    run_store, record = a_run(tmp_path, "7")
    left(
        tmp_path, outcome_0__json='{"exit_code": 0}', job__log="Traceback\nCancelledError: slurmstepd: error: FAILED\n"
    )
    assert jobs.state_of(run_store, record, Cluster(Scripted(FORGOTTEN))).state is RunState.COMPLETED_UNPUBLISHED


OTHER = b"/fsx/sm_llm/jobs/other-20261101-000000-aaaa/attempt-1"


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETED", "FAILED"])
def test_a_job_of_another_cluster_that_has_the_same_number_is_left_alone(state: str, tmp_path: Path) -> None:
    """Every cluster counts from 1, and every login node is ``localhost`` to itself."""
    run_store, record = a_run(tmp_path, "7")
    login = Scripted(CommandResult(0, listed(state).output.replace(b"/jobs/tiny-1/attempt-1", OTHER), ""))
    native = jobs.state_of(run_store, record, Cluster(login))
    assert native.state is RunState.UNKNOWN
    assert f"job 7 of login is another one, in {OTHER.decode()}" in native.detail
    assert run_store.record() == record, "nothing is settled"
    for now in (True, False):
        with pytest.raises(SubmitError, match="job 7 of login is another one"):
            jobs.stop_job(record, record.attempts[0], Cluster(login), now=now)
    with pytest.raises(SubmitError, match="job 7 of login is another one"):
        jobs.shell_command(record, record.attempts[0], 0, Cluster(login))
    assert not any(argv[0] == "scancel" for argv in login.asked)
    left(tmp_path, outcome_0__json='{"exit_code": 1}', failure_0_0="out of memory")
    assert jobs.state_of(run_store, record, Cluster(login)).detail == "node 0: out of memory", "what it left is its own"


def test_a_row_of_the_accounting_is_compared_as_well(tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path, "7")
    left(tmp_path)
    login = Accounting(FORGOTTEN, rows="7|FAILED|2026-11-29T13:48:14|n1")
    record = record.model_copy(update={"run_id": "tiny-2"})
    assert jobs.state_of(run_store, record, Cluster(login)).state is RunState.UNKNOWN


def test_a_row_of_an_accounting_that_keeps_no_folder_counts(tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path, "7")
    login = Accounting(FORGOTTEN, rows="7|FAILED|2026-11-29T13:48:14|n1", folder="")
    assert jobs.state_of(run_store, record, Cluster(login)).state is RunState.FAILED


def test_a_job_that_left_nothing_names_the_shared_folder(tmp_path: Path) -> None:
    """Nodes that do not see the folder, or a file system without space, leave no log to read the reason from."""
    run_store, record = a_run(tmp_path, "7")
    native = jobs.state_of(run_store, record, Cluster(Scripted(listed("FAILED", "NonZeroExitCode"))))
    assert native.state is RunState.FAILED
    assert "its nodes see backend.shared_folder at the same path" in native.detail


@pytest.mark.parametrize("error", ["Unable to contact slurm controller", "Socket timed out on send/recv operation"])
def test_SL10_a_query_that_fails_is_not_a_failure_of_the_run(error: str, tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path, "7")
    with pytest.raises(NoAnswer, match=error):
        jobs.state_of(run_store, record, Cluster(Scripted(CommandResult(1, b"", error))))
    assert run_store.record() == record


def test_one_question_serves_all_jobs() -> None:
    login = Scripted(CommandResult(0, listed("RUNNING").output + listed("PENDING").output.replace(b"7", b"8", 1), ""))
    cluster = Cluster(login)
    assert [cluster.job(it).state for it in ("7", "8", "7")] == ["RUNNING", "PENDING", "RUNNING"]  # type: ignore[union-attr]
    assert len(login.asked) == 1


@dataclass
class Lost(Scripted):
    """A connection that ends before sbatch has answered."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        if argv[:2] == ["sh", "-c"] and "sbatch" in argv[2]:
            raise NoAnswer("login does not answer over ssh")
        return super().run(argv, stdin=stdin)


def test_a_lost_answer_of_sbatch_is_looked_up() -> None:
    submitted = submit._submitted
    cluster = Cluster(Lost(listed("PENDING")))
    assert submitted(cluster, "/jobs/tiny-1/attempt-1", "job.sh", "/runs/tiny-1") == "7"
    with pytest.raises(NoAnswer):
        submitted(cluster, "/jobs/tiny-1/attempt-2", "job.sh", "/runs/tiny-1")
    with pytest.raises(MayRun, match="A job may have been submitted all the same"):
        submitted(
            Cluster(Lost(CommandResult(1, b"", "no controller"))), "/jobs/tiny-1/attempt-1", "job.sh", "/runs/tiny-1"
        )


@pytest.mark.parametrize("age", [0, 10_000])
def test_SL06_a_job_that_no_launcher_recorded_is_found_by_its_folder(age: float, tmp_path: Path) -> None:
    run_store, record = a_run(tmp_path)
    claim = record.attempts[0].model_copy(update={"native_id": "", "started": time.time() - age})
    record = run_store.update(lambda held: held.with_attempt(claim))
    nothing = jobs.state_of_claim(run_store, record, Cluster(Scripted(CommandResult(0, b"", ""))))
    if age:
        assert (nothing.state, nothing.detail) == (RunState.STOPPED, "its job was never submitted")
        return
    assert (nothing.state, nothing.detail) == (RunState.PENDING, "its job is being submitted")
    row = listed("RUNNING").output.replace(b"/jobs/tiny-1/attempt-1", str(jobs.attempt_folder(record, 1)).encode())
    assert (
        jobs.state_of_claim(run_store, record, Cluster(Scripted(CommandResult(0, row, "")))).state is RunState.RUNNING
    )
    assert run_store.record().attempts[0].native_id == "localhost/7"


def test_a_stop_of_a_waiting_job_cancels_it(tmp_path: Path) -> None:
    _, record = a_run(tmp_path, "7")
    for native, cancels in (("RUNNING", False), ("PENDING", True)):
        login = Scripted(listed(native))
        jobs.stop_job(record, record.attempts[0], Cluster(login), now=False)
        assert (Path(ClusterPaths(str(tmp_path)).attempt("tiny-1", 1)) / "stop").is_file()
        assert any(argv[0] == "scancel" for argv in login.asked) == cancels


def test_SL09_what_slurm_and_the_script_print_is_in_the_logs(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Speech#12615: a job crashed, and nobody was shown where its output was."""
    run_store, record = a_run(tmp_path, "7")
    left(tmp_path, job__log="srun: error: Node failure on n2\n", node_0__log="step 1\n", node_1__log="step 1 here\n")

    def lines(wanted: LogFilter) -> list[str]:
        return list(jobs.logs_of(run_store, record, 1, wanted, lambda: False, Cluster(LocalTransport())))

    of_job = "[job] srun: error: Node failure on n2"
    assert lines(LogFilter()) == ["[node 0] step 1", "[node 1] step 1 here", of_job]
    assert lines(LogFilter(tail=0)) == []
    assert lines(LogFilter(node=1)) == ["step 1 here"]
    for node in range(2):
        (run_store.paths.node_log(1, node)).unlink()
        (Path(jobs.attempt_folder(record, 1)) / f"node-{node}.log").unlink()
    assert lines(LogFilter()) == [of_job], "of a job whose nodes never began"


def test_two_readers_of_a_log_copy_it_once(tmp_path: Path) -> None:
    """``logs`` and ``status`` of one run may run at the same time."""
    _, record = a_run(tmp_path, "7")
    left(tmp_path, node_0__log="step 1\nstep 2\n")
    source, folder = str(jobs.attempt_folder(record, 1)), tmp_path / "copy"
    other = jobs.LogCopy(Cluster(LocalTransport()), source, folder)

    class Overtaken(LocalTransport):
        def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
            answer = super().run(argv, stdin=stdin)
            other.pull()
            return answer

    jobs.LogCopy(Cluster(Overtaken()), source, folder).pull()
    assert (folder / "node-0.log").read_text() == "step 1\nstep 2\n"


@pytest.mark.parametrize("length", [20, 48, 200])
def test_SL09_calls_share_a_connection_in_any_TMPDIR(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path is short; macOS's TMPDIR has 48 characters."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as short:
        folder = Path(short) / ("x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        command = SshTransport("login").interactive(["true"])
    assert "ControlMaster=auto" in command
    [socket] = [it.removeprefix("ControlPath=") for it in command if it.startswith("ControlPath=")]
    assert len(socket.replace("%C", "0" * 40)) <= 100
    assert Path(socket).parent.is_dir() or length == 20


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_SL01_SL30_real_jobs_that_slurm_has_forgotten(bare_slurm: SlurmCluster, tmp_path: Path) -> None:
    for name in ("program", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "program" / "fails.sh").write_text("exit 3\n")
    (tmp_path / "program" / "ends.sh").write_text("exit 0\n")
    backend = {
        "name": "slurm", "shared_folder": str(tmp_path), "virtual_environment": sys.prefix,
        "scratch_folder": str(tmp_path / "scratch"),
    }  # fmt: skip
    runs = {}
    for name in ("fails", "ends"):
        task = {"kind": "script", "source": str(tmp_path / "program"), "entry": f"{name}.sh"}
        job = {"name": name, "task": task, "compute": {"processes_per_instance": 1}, "backend": backend}
        runs[name] = sm_llm.launch({**job, "storage": str(tmp_path / "runs")})

    def states() -> list[str]:
        return sorted(bare_slurm.run("squeue", "-h", "-t", "all", "-o", "%T").split())

    bare_slurm.await_state(lambda: states() == ["COMPLETED", "FAILED"], 300)
    bare_slurm.forget()
    assert states() == []
    assert runs["ends"].state is RunState.COMPLETED
    assert runs["fails"].state is RunState.FAILED
    assert "ended with exit code 3" in str(runs["fails"].status().reason)


@pytest.mark.integration
def test_SL26_a_cluster_without_pyxis_is_named_before_anything_is_submitted(
    bare_slurm: SlurmCluster, tmp_path: Path
) -> None:
    backend = {"name": "slurm", "shared_folder": str(tmp_path), "container_image": "/fsx/x.sqsh"}
    with pytest.raises(SubmitError, match="srun on this machine has no --container-image, so pyxis is not installed"):
        sm_llm.launch({**TINY, "backend": backend, "storage": str(tmp_path / "runs")})
    assert bare_slurm.run("squeue", "-h", "-t", "all") == ""
    backend = {"name": "slurm", "shared_folder": str(tmp_path), "virtual_environment": "/venv", "retry": "auto-resume"}
    with pytest.raises(SubmitError, match="it is not of a HyperPod cluster"):
        sm_llm.launch({**TINY, "backend": backend, "storage": str(tmp_path / "runs")}, new=True)


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_SL26_a_container_that_is_silently_ignored_is_noticed(slurm: SlurmCluster, tmp_path: Path) -> None:
    """aws-samples/sample-physical-ai-scaffolding-kit#5: the job ran on the bare host."""
    backend = {
        "name": "slurm", "shared_folder": str(tmp_path), "container_image": "/fsx/x.sqsh",
        "scratch_folder": str(tmp_path),
    }  # fmt: skip
    run = sm_llm.launch({**TINY, "backend": backend, "storage": str(tmp_path / "runs")})
    problem = r"node node\d: /opt/sm_llm is not there: the container was not started"
    with pytest.raises(RunFailed, match=problem):
        run.wait()
    assert any(re.search(problem, line) for line in run.logs())


@pytest.mark.integration
def test_SL09_ssh_has_one_connection_and_checks_host_keys(slurm_over_ssh: SlurmOverSsh) -> None:
    transport = SshTransport(slurm_over_ssh.host)
    for word in ("two words", "$HOME `id`", "é"):
        assert transport.run(["printf", "%s", word]).text == word
    log = (slurm_over_ssh.ssh_folder / "log").read_text()
    assert log.count("Accepted publickey") == 1
    assert Cluster(transport).name == "local"

    known = slurm_over_ssh.ssh_folder / "known_hosts"
    host, kind, _ = known.read_text().split()
    other = (slurm_over_ssh.ssh_folder / "user.pub").read_text().split()[1]
    for text, problem in (
        ("", "compare the fingerprint and accept it: ssh login"),
        (f"{host} {kind} {other}\n", r"its host key is not the one that is known\. .*Only then remove the old key"),
    ):
        slurm_over_ssh.disconnect()
        known.write_text(text)
        with pytest.raises(NoAnswer, match=problem) as refused:
            transport.run(["true"])
        assert "\n" not in str(refused.value)


@pytest.mark.integration
def test_a_login_shell_may_print_and_set_the_path(
    slurm_over_ssh: SlurmOverSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HyperPod and ParallelCluster put Slurm's commands on the PATH in /etc/profile.d alone."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sinfo-of-test").write_text("#!/bin/sh\ncat; exit 3\n")
    (tmp_path / "bin" / "sinfo-of-test").chmod(0o700)
    (tmp_path / ".bash_profile").write_text(f"echo Welcome 5\nPATH=$PATH:{tmp_path}/bin\n")
    shell = ("env", f"HOME={tmp_path}", "bash", "-lc")
    monkeypatch.setattr("sm_llm.launcher.backends.slurm.transport._LOGIN_SHELL", shell)
    answer = SshTransport(slurm_over_ssh.host).run(["sinfo-of-test"], stdin=b"a\nb")
    assert (answer.code, answer.text) == (3, "a\nb")
