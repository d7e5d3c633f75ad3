"""Slurm's own commands, against a real cluster of virtual nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sm_llm.errors import SubmitError
from sm_llm.launcher.backends.slurm.batch_script import quoted
from sm_llm.launcher.backends.slurm.cluster import Cluster
from sm_llm.launcher.backends.slurm.states import native_state
from sm_llm.launcher.backends.slurm.transport import LocalTransport
from sm_llm.launcher.planning.bundle import make_bundle
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.slurm import SlurmCluster

HOSTILE = "a b'c\"d $HOME `id` $(id) \\ \\\\ é 日本 # ; & | > * ? [x] ~ {a,b} ! %j end\\"

pytestmark = pytest.mark.integration


def clusters() -> Cluster:
    return Cluster(LocalTransport())


def submitted(folder: Path, body: str, *options: str) -> str:
    script = folder / "job.sh"
    lines = [f"#SBATCH --{it}" for it in ("output=/dev/null", *options)]
    script.write_text("\n".join(["#!/bin/bash", *lines, body]) + "\n")
    return clusters().submit(str(folder), str(script))


def state(job_id: str) -> RunState:
    row = clusters().job(job_id)
    assert row is not None
    return native_state(row).state


def test_state_of_a_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = submitted(tmp_path, "exit 0", "comment=/some/run")
    failed = submitted(tmp_path, "exit 7")
    slurm.await_state(lambda: state(done) is RunState.COMPLETED and state(failed) is RunState.FAILED)
    row = clusters().job(done)
    assert row is not None
    assert row.comment == "/some/run"


def test_cancelled_with_exit_code_0_is_stopped(slurm: SlurmCluster, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    job = submitted(tmp_path, f"trap 'exit 0' TERM; touch {ready}; while :; do sleep 0.1; done")
    slurm.await_state(ready.exists)
    clusters().cancel(job)
    slurm.await_state(lambda: state(job) is RunState.STOPPED)
    assert "ExitCode=0:0" in slurm.run("scontrol", "show", "job", "-o", job)


def test_a_job_gets_nothing_of_the_submitting_shell(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SECRET_OF_THE_SHELL", "x")
    job = submitted(tmp_path, f"env > {tmp_path}/env")
    slurm.await_state(lambda: state(job) is RunState.COMPLETED)
    assert "SECRET_OF_THE_SHELL" not in (tmp_path / "env").read_text()


def test_slurm_reads_back_what_was_quoted(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submitted(tmp_path, "exit 0", f"comment={quoted(HOSTILE)}")
    row = clusters().job(job)
    assert row is not None
    assert row.comment == HOSTILE


def test_unknown_job_and_no_accounting(slurm: SlurmCluster) -> None:
    assert clusters().job("4000000") is None
    assert clusters().accounted("4000000") is None


def test_refused_script(slurm: SlurmCluster, tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="invalid partition"):
        submitted(tmp_path, "exit 0", "partition=nowhere")


def test_options_of_plugins(slurm: SlurmCluster) -> None:
    assert clusters().has_option("container-image")
    assert not clusters().has_option("container-imagination")


def test_bundle_is_unpacked_once_and_read_only(slurm: SlurmCluster, tmp_path: Path) -> None:
    bundle = make_bundle()
    folder = tmp_path / "bundles" / bundle.digest
    for _ in range(2):
        clusters().unpack(bundle.archive, bundle.digest, str(folder))
    assert (folder / "sm_llm" / "__init__.py").is_file()
    assert not folder.stat().st_mode & 0o222
    assert [it.name for it in folder.parent.iterdir()] == [bundle.digest]


def test_damaged_bundle_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    bundle = make_bundle()
    with pytest.raises(SubmitError, match="arrived damaged"):
        clusters().unpack(bundle.archive, "0" * 64, str(tmp_path / "bundles" / "x"))
    assert list((tmp_path / "bundles").iterdir()) == []


def test_logs_by_offset(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_bytes(b"one\ntwo \xff\n")
    (tmp_path / "node-1.log").write_bytes(b"")
    (tmp_path / "node-x.log").write_bytes(b"no log of ours")
    assert clusters().logs(str(tmp_path), {}) == {"node-0.log": b"one\ntwo \xff\n"}
    assert clusters().logs(str(tmp_path), {"node-0.log": 4}) == {"node-0.log": b"two \xff\n"}
    assert clusters().logs(str(tmp_path), {"node-0.log": 10}) == {}


def test_ends(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "outcome-0.json").write_text('{"exit_code": 1, "restart": 0}')
    (tmp_path / "outcome-1.json").write_text('{"exit_code": 0, "restart": 1}')
    (tmp_path / "stopped-1").touch()
    (tmp_path / "failure-0-2").write_text("of an earlier start")
    ends = clusters().ends(str(tmp_path))
    assert ends.outcome == {"exit_code": 0, "restart": 1}
    assert ends.stopped
    assert not ends.failures
