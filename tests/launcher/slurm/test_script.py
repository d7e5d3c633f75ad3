"""The sbatch script: one quoting that bash and Slurm read alike, whatever a value holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm_llm.launcher.backends.slurm.batch_script import BatchScript, quoted

if TYPE_CHECKING:
    from pathlib import Path

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
HOSTILE = "a b'c\"d $HOME `id` $(id) \\ \\\\ é 日本 # ; & | > * ? [x] ~ {a,b} ! %j \t end\\"
SCRIPT = BatchScript(
    run_id="run-1",
    attempt=1,
    options=[("job-name", "run-1")],
    step_options=[("kill-on-bad-exit", "1")],
    environment=[("NAME", "value")],
    code="/shared/code",
    folder="/shared/jobs/run-1/attempt-1",
    python="/venv/bin/python",
    processes=8,
    entry="train.py",
    absent="it is not there",
    no_python="Make one",
)


def bash(script: str, *arguments: str) -> str:
    done = subprocess.run(["bash", "-c", script, "bash", *arguments], capture_output=True, check=True, timeout=300)
    return done.stdout.decode("utf-8")


@given(st.lists(TEXT, min_size=1, max_size=30))
def test_bash_reads_back_what_was_quoted(values: list[str]) -> None:
    words = " ".join(quoted(value) for value in values)
    assert bash(f"printf '%s\\0' {words}").split("\0")[:-1] == values


def test_NUL_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quoted("a\0b")


@given(TEXT.filter(str.isprintable))
def test_slurms_reading_is_that_of_bash(value: str) -> None:
    assert slurm_word(quoted(value)) == value


def slurm_word(text: str) -> str:
    """How sbatch 22.05 reads the value of an option: ``test_cluster`` compares it with sbatch itself."""
    found, quote, escaped = "", "", False
    for character in text:
        if escaped:
            found, escaped = found + character, False
        elif character == "\\":
            escaped = True
        elif quote == character:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        elif not quote and character.isspace():
            break
        else:
            found += character
    return found


def run(script: BatchScript, folder: Path, **variables: str) -> int:
    """Run the script as Slurm does, what it prints in its log; returns its exit code."""
    (folder / "job.sh").write_text(script.text(), encoding="utf-8")
    with open(folder / "job.log", "a") as log:
        command = ["bash", folder / "job.sh"]
        return subprocess.run(command, env={**os.environ, **variables}, stdout=log, stderr=log, timeout=300).returncode


def test_hostile_values_stay_values(stubs: Path, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    lines = f"{HOSTILE}\n$(touch {tmp_path}/executed)"
    hostile = replace(
        SCRIPT, options=[("comment", HOSTILE.replace("\t", ""))], step_options=[("container-mounts", lines)],
        environment=[("NAME", lines)], code=lines, folder=str(folder), python=lines, entry=lines, absent=lines,
        no_python=lines, run_id=lines, auto_resume=True, requeues=True, time_limit=True, max_requeues=3,
    )  # fmt: skip
    assert run(hostile, tmp_path) == 7, (tmp_path / "job.log").read_text()
    argv = (stubs / "argv").read_bytes().decode().split("\0")
    assert argv[0] == f"--container-mounts={lines}"
    assert argv[-8:-1] == ["step", lines, lines, lines, lines, f"{folder}/failure-0", lines]
    assert (stubs / "name").read_bytes().decode() == lines
    assert json.loads((folder / "outcome-0.json").read_text())["exit_code"] == 7
    assert not (tmp_path / "executed").exists()


def test_a_carriage_return_is_written_as_an_escape(stubs: Path, tmp_path: Path) -> None:
    """sbatch 22.05: "Batch script contains DOS line breaks"."""
    value = "a\r\nb\r\r$c\r"
    script = replace(SCRIPT, folder=str(tmp_path), environment=[("NAME", value)])
    assert "\r" not in script.text()
    run(script, tmp_path)
    assert (stubs / "name").read_bytes().decode() == value


def test_an_interpreter_that_is_not_there_is_named_with_its_node(stubs: Path, tmp_path: Path) -> None:
    """The node waits until the script has ended the step: srun's own end misses nodes that are only just starting."""
    programs = stubs.parent / "bin"
    (programs / "srun").write_text('#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n')
    waiting = f'[ "$1" != 60 ] || until [ -e {stubs}/scancel ]; do read -rt 0.1; done'
    (programs / "sleep").write_text(f"#!/bin/bash\n{waiting}\n")
    (programs / "scancel").write_text(f'#!/bin/bash\necho "$@" > {stubs}/scancel\n')
    for name in ("sleep", "scancel"):
        (programs / name).chmod(0o700)
    code = tmp_path / "code"
    (code / "sm_llm/worker/slurm").mkdir(parents=True)
    (code / "sm_llm/worker/slurm/node.py").write_text("raise SystemExit(5)")
    script = replace(SCRIPT, folder=str(tmp_path), code=str(code), python="/nowhere/venv/bin/python")
    variables = {"SLURMD_NODENAME": "node2", "SLURM_NODEID": "1"}
    reported = "node node2: the interpreter /nowhere/venv/bin/python is not there. Make one\n"
    assert (run(script, tmp_path, **variables), (tmp_path / "failure-0-1").read_text()) == (78, reported)
    assert (stubs / "scancel").read_text() == "5.0\n"
    assert run(replace(script, python=sys.executable), tmp_path, **variables) == 5


@pytest.mark.parametrize(
    ("cause", "is_requeued"), [("", False), ("DUE TO TIME LIMIT ", True), ("DUE TO PREEMPTION ", True)]
)
@pytest.mark.parametrize("left", ["yield-0 stopped-0", "unfit-0-1 fit-0-0", "port-taken-0"])
def test_a_job_that_its_user_cancelled_is_not_requeued(
    left: str, stubs: Path, tmp_path: Path, cause: str, is_requeued: bool
) -> None:
    """``scontrol requeue`` would take it, and it would start again."""
    notice = f"slurmstepd-node1: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-30T03:02:05 {cause}***"
    noted = f"for it in {left}; do echo node2 > {tmp_path}/$it; done"
    signalled = f'echo "{notice}"; {noted}; kill -TERM $PPID; /bin/sleep 0.3'
    (stubs.parent / "bin" / "srun").write_text(f"#!/bin/bash\n{signalled}\n")
    script = replace(SCRIPT, folder=str(tmp_path), requeues=True, time_limit=True)
    (tmp_path / "job.log").write_text("a line that a lost node did not end")
    assert run(script, tmp_path) == 0
    assert "the job is asked to end" in (tmp_path / "job.log").read_text()
    assert (stubs / "scontrol").exists() is is_requeued


def test_a_start_whose_port_was_taken_is_requeued_with_all_nodes(stubs: Path, tmp_path: Path) -> None:
    (tmp_path / "port-taken-0").touch()
    assert run(replace(SCRIPT, folder=str(tmp_path)), tmp_path) == 7
    assert not (stubs / "scontrol").exists()
    assert run(replace(SCRIPT, folder=str(tmp_path), requeues=True), tmp_path) == 0
    assert (stubs / "scontrol").read_text() == "requeue 5 "


def test_SL12_a_job_that_yielded_is_requeued_and_no_other(stubs: Path, tmp_path: Path) -> None:
    script = replace(SCRIPT, folder=str(tmp_path), requeues=True, time_limit=True)
    assert run(script, tmp_path) == 7
    (tmp_path / "stopped-0").touch()
    assert run(script, tmp_path) == 7
    assert not (stubs / "scontrol").exists()
    (tmp_path / "yield-0").touch()
    assert run(script, tmp_path) == 0
    assert (stubs / "scontrol").read_text() == "requeue 5 "
    assert json.loads((tmp_path / "outcome-0.json").read_text())["requeued"] is True
    (tmp_path / "stop").touch()
    (stubs / "argv").unlink()
    assert run(script, tmp_path) == 0
    assert not (stubs / "argv").exists(), "a run that was asked to stop does not start again"


def test_SL31_requeues_are_bounded(stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    script = replace(SCRIPT, folder=str(tmp_path), requeues=True, max_requeues=2)
    assert run(script, tmp_path) == 1
    assert "restart 3 is not allowed: backend.max_requeues is 2" in (tmp_path / "job.log").read_text()
    assert not (stubs / "argv").exists()


def test_SL23_auto_resume_is_left_out_where_no_hyperpod_is(stubs: Path, tmp_path: Path) -> None:
    script = replace(SCRIPT, folder=str(tmp_path), auto_resume=True)
    run(script, tmp_path)
    assert b"--auto-resume" not in (stubs / "argv").read_bytes()
    text = script.text().replace("/opt/sagemaker_cluster", str(tmp_path))
    (tmp_path / "on-hyperpod.sh").write_text(text)
    subprocess.run(["bash", tmp_path / "on-hyperpod.sh"], capture_output=True, timeout=300, check=False)
    assert (stubs / "argv").read_bytes().startswith(b"--auto-resume=1\0")


def test_a_line_of_options_holds_no_newline() -> None:
    with pytest.raises(ValueError, match="--comment cannot hold"):
        replace(SCRIPT, options=[("comment", "a\n#SBATCH --partition=other")]).text()
