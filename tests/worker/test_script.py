"""Script jobs: a user's own program, byte-equal arguments, its result, its checkpoints, its failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from worker_jobs import events, job_environment, job_file, result_folder, search_path

from sm_llm.contract.job_file import JOB_ENVIRONMENT, RUN_FOLDER_ENVIRONMENT
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.runs.stopped import StopRecord
from sm_llm.spec.inputs import S3Input, StorageOptions
from sm_llm.storage.publication.publish import list_checkpoints
from sm_llm.storage.publication.retire import retire_all
from sm_llm.storage.uri import open_store
from sm_llm.worker.main import main
from sm_llm.worker.script import script_publisher
from sm_llm.worker.transfer.transfer_agent import TransferAgent

if TYPE_CHECKING:
    from sm_llm.contract.job_file import JobFile

pytestmark = pytest.mark.integration

DUMP = """
import json, os, sys
with open(os.path.join(os.environ["SM_LLM_OUTPUT"], "argv.json"), "w") as stream:
    json.dump(sys.argv[1:], stream)
"""


class Job:
    """One script job in this process. ``run`` may be called again: the next attempt."""

    def __init__(self, tmp_path: Path, program: str = DUMP, *, entry: str = "train.py", **task: Any) -> None:
        self.source = tmp_path / "src"
        self.source.mkdir(exist_ok=True)
        location = self.source / (f"{entry[3:].replace('.', '/')}.py" if entry.startswith("-m") else entry)
        location.parent.mkdir(parents=True, exist_ok=True)
        location.write_text(program)
        self.folder = tmp_path / "run"
        self.task = {"kind": "script", "entry": entry, "source": str(self.source), **task}
        self.environ: dict[str, str] = {}

    def file(self, attempt: int, **spec: Any) -> JobFile:
        job = job_file(self.task, self.folder, 1, attempt)
        return job.model_copy(update={"spec": job.spec.model_copy(update=spec)})

    def run(self, attempt: int = 1, **spec: Any) -> int:
        self.environ = {**job_environment(self.file(attempt, **spec)), "PYTHONPATH": search_path()}
        return main("script", self.environ)

    @property
    def argv(self) -> list[str]:
        return list(json.loads((result_folder(self.folder) / "argv.json").read_text()))

    @property
    def failure(self) -> str:
        return ContainerPaths(Path(self.environ["SAGEMAKER_BASE_DIR"])).failure.read_text()


AWKWARD = ["a b", "it's", '"q"', "$HOME", "a;b", "*", "line\nbreak", "", "--x=1", "{output", "é😀", "\\"]


def test_HP01_every_argument_arrives_byte_for_byte(tmp_path: Path) -> None:
    job = Job(tmp_path, args=AWKWARD)
    assert job.run() == 0
    assert job.argv == AWKWARD
    summary = json.loads((result_folder(job.folder) / "sm_llm.json").read_text())
    assert summary["argv"][2:] == AWKWARD


def test_HP04_a_shell_script_gets_its_arguments(tmp_path: Path) -> None:
    job = Job(
        tmp_path, 'printf "%s\\n" "$@" > "$SM_LLM_OUTPUT/told"', entry="bin/train.sh", args=["--alpha", "one two"]
    )
    assert job.run() == 0
    assert (result_folder(job.folder) / "told").read_text() == "--alpha\none two\n"


def test_SR16_a_module_runs_with_its_package(tmp_path: Path) -> None:
    job = Job(tmp_path, "from pkg.other import X\n" + DUMP, entry="-m pkg.train", args=["1"])
    (job.source / "pkg" / "other.py").write_text("X = 1\n")
    (job.source / "pkg" / "__init__.py").touch()
    assert job.run() == 0
    assert job.argv == ["1"]


def test_HP16_a_strict_parser_refuses_a_misspelt_name_and_is_received(tmp_path: Path) -> None:
    program = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--train-batch-size')\np.parse_args()\n"
    job = Job(tmp_path, program, args={"train_batch_size": 4})
    assert job.run() == 1
    assert "unrecognized arguments: --train_batch_size 4" in job.failure
    assert "exit code 2" in job.failure


def test_LM04_the_programs_own_error_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, "def f():\n    raise ValueError('boom')\nf()\n")
    assert job.run() == 1
    headline, _, traceback = job.failure.partition("\n")
    assert headline == "rank 0: ValueError: boom (train.py ended with exit code 1)"
    assert "in f" in traceback
    assert "ValueError: boom" in capsys.readouterr().err
    assert "sm_llm/worker" not in traceback


def test_a_program_that_a_signal_ended_is_reported_so(tmp_path: Path) -> None:
    job = Job(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert job.run() == 1
    assert "train.py ended with signal 11 (SIGSEGV)" in job.failure


def test_inputs_lie_in_named_folders(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.txt").write_text("here")
    program = DUMP + "assert open(os.path.join(os.environ['SM_LLM_INPUT_CORPUS'], 'x.txt')).read() == 'here'\n"
    job = Job(tmp_path, program, args=["--data={inputs.corpus}", "{inputs.staged}"])
    inputs = {"corpus": str(data), "staged": S3Input(uri=f"file://{data}")}
    assert job.run(inputs=inputs) == 0
    corpus, staged = job.argv
    assert corpus == f"--data={data}"
    assert "scratch" in staged


LINKS = """
import os, pathlib, socket, sys
out, checkpoints = pathlib.Path(os.environ["SM_LLM_OUTPUT"]), pathlib.Path(os.environ["SM_LLM_CHECKPOINTS"])
(out / "step-5").mkdir()
(out / "step-5" / "w").write_text("weights")
(out / "latest").symlink_to("step-5")
(out / "same.bin").symlink_to(out / "step-5" / "w")
(out / "source.py").symlink_to("../train.py")
(out / "outside").symlink_to("/etc/hostname")
(out / "nowhere").symlink_to("gone")
(out / "itself").symlink_to("itself")
(out / "step-5" / "above").symlink_to(out)
os.mkfifo(out / "pipe")
socket.socket(socket.AF_UNIX).bind(os.path.relpath(out / "socket"))
(out / "a\\\\b.bin").write_text("odd")
model = pathlib.Path(sys.argv[1])
model.mkdir(parents=True, exist_ok=True)
(model / "best.bin").write_text("best")
(model / "absolute.bin").symlink_to(model / "best.bin")
folder = checkpoints / "checkpoint-7"
folder.mkdir()
(folder / "w").write_text("weights")
(folder / "again").symlink_to(folder)
(folder / "other").symlink_to(".")
os.mkfifo(folder / "pipe")
"""


def test_links_pipes_and_odd_names_of_a_finished_program_do_not_cost_its_result(tmp_path: Path) -> None:
    job = Job(tmp_path, LINKS)
    job.task["args"] = [str(Path(job_environment(job.file(1))["SAGEMAKER_BASE_DIR"], "model"))]
    assert job.run() == 0
    result = result_folder(job.folder)
    read = {it.relative_to(result).as_posix(): it.read_text() for it in result.rglob("*") if it.is_file()}
    odd = next(name for name in read if name.startswith("renamed/"))
    del read["sm_llm.json"]
    assert odd.endswith("-a_b.bin")
    assert read == {
        "step-5/w": "weights", "latest/w": "weights", "same.bin": "weights", "source.py": LINKS, odd: "odd",
        "best.bin": "best", "absolute.bin": "best",
    }  # fmt: skip
    assert not any(it.is_symlink() for it in result.rglob("*"))
    notices = "\n".join(event["message"] for event in events(job.folder, "notice"))
    for name, words in {
        "outside": "is a link to /etc/hostname, outside the program's folders",
        "nowhere": "is a link that leads nowhere",
        "itself": "is a link that leads nowhere", "step-5/above": "is a link to a folder that holds it",
        "pipe": "is a named pipe, not a file", "socket": "is a socket, not a file",
    }.items():  # fmt: skip
        assert f"output/{name} is not published: it {words}" in notices
    assert "is published as renamed/" in notices
    assert "checkpoint-7/pipe is not published: it is a named pipe" in notices
    (checkpoint,) = list_checkpoints(open_store(job.folder))
    assert checkpoint.step == 7
    assert checkpoint.valid


CHECKPOINTS = """
import os, pathlib, sys, time
import sm_llm
folder = pathlib.Path(os.environ["SM_LLM_CHECKPOINTS"])
start = int(os.environ.get("SM_LLM_RESUME_STEP", 0))
if start:
    assert (pathlib.Path(os.environ["SM_LLM_RESUME_FOLDER"]) / "state").read_text() == str(start)
    assert not list(folder.glob(".sm_llm"))
for step in range(start + 1, 5):
    sm_llm.log(step, loss=1 / step, learning_rate=1e-3)
    if step % 2 == 0:
        save = folder / f"checkpoint-{step}"
        save.mkdir()
        (save / "state").write_text(str(step))
        sm_llm.publish(save, step=step)
        deadline = time.time() + 120
        commit = pathlib.Path(sys.argv[1]) / f"ckpt/commits/step-{step:08d}.json"
        while not commit.exists():
            assert time.time() < deadline
            time.sleep(0.05)
    if step == 3 and not start:
        sys.exit(3)
"""


def test_a_program_continues_from_the_checkpoint_it_handed_over(tmp_path: Path) -> None:
    job = Job(tmp_path, CHECKPOINTS, args=[str(tmp_path / "run")])
    assert job.run() == 1
    assert [it.step for it in list_checkpoints(open_store(job.folder))] == [2]
    assert job.run(attempt=2) == 0
    assert [it.step for it in list_checkpoints(open_store(job.folder))] == [2, 4]
    assert [event["step"] for event in events(job.folder, "logged")] == [1, 2, 3, 3, 4]
    assert [event["source"] for event in events(job.folder, "start_chosen")] == ["scratch", "checkpoint"]
    assert job.run(attempt=3) == 0
    assert "published already" in events(job.folder, "nothing_done")[-1]["reason"]


OVERTAKEN = """
import os, sys
from pathlib import Path
from sm_llm.storage.publication.publish import new_save, publish, seal
from sm_llm.storage.uri import open_store

run, text = sys.argv[1:]
Path(os.environ["SM_LLM_OUTPUT"], "model.bin").write_text("mine")
working = Path(run).with_name("working")
working.mkdir()
(working / "model.bin").write_text(text)
save = new_save(Path(run).name, None, world_size=1, node_count=1)
sealed = seal(working, working.with_name("sealed"))
publish(open_store(run), save, sealed, node=0, leader=True, gather=lambda value: [value])
"""
"""Meanwhile another job at the address of this one ends, and publishes a text."""


def test_a_job_that_another_one_overtakes_fails_and_keeps_its_result(tmp_path: Path) -> None:
    job = Job(tmp_path, OVERTAKEN, args=[str(tmp_path / "run"), "another"])
    assert job.run() == 1
    assert "Two jobs have run at one address. This job's own result is kept: sm-llm sync" in job.failure
    made = {path.read_text() for path in job.folder.glob("final/*/data/model.bin")}
    assert made == {"another", "mine"}
    assert (result_folder(job.folder) / "model.bin").read_text() == "another"


def test_a_job_whose_equal_result_another_one_has_published_ends_well(tmp_path: Path) -> None:
    job = Job(tmp_path, OVERTAKEN, args=[str(tmp_path / "run"), "mine"])
    assert job.run() == 0
    assert "its result is equal to this job's" in events(job.folder, "notice")[-1]["message"]
    assert len(list(job.folder.glob("final/*"))) == 1


def test_I7_a_run_that_published_never_begins_from_scratch_unasked(tmp_path: Path) -> None:
    """Its events report that it published, its storage shows nothing."""
    job = Job(tmp_path, CHECKPOINTS, args=[str(tmp_path / "run")])
    assert job.run() == 1
    (job.folder / "ckpt").rename(tmp_path / "lost")
    assert job.run(attempt=2) == 1
    assert f"an earlier attempt published step 2, but {job.folder} shows no checkpoint" in job.failure
    assert f"Bring ckpt/ back, or begin anew with sm-llm rerun {job.folder}" in job.failure
    assert [event["step"] for event in events(job.folder, "logged")] == [1, 2, 3], "attempt 2 did not start"
    (tmp_path / "lost").rename(job.folder / "ckpt")
    assert job.run(attempt=3) == 0
    assert [event["source"] for event in events(job.folder, "start_chosen")] == ["scratch", "checkpoint"]


def test_a_run_whose_checkpoints_were_quarantined_begins_from_scratch(tmp_path: Path) -> None:
    job = Job(tmp_path, CHECKPOINTS, args=[str(tmp_path / "run")])
    assert job.run() == 1
    retire_all(open_store(job.folder), label="other")
    assert job.run(attempt=2) == 1
    assert [event["source"] for event in events(job.folder, "start_chosen")] == ["scratch", "scratch"]


HANDED_THEN_FAILED = """
import pathlib, sm_llm, sys
for step in (3, 4):
    save = pathlib.Path(f"save-{step}")
    save.mkdir()
    (save / "state").write_text(str(step) * 1_000_000)
    sm_llm.publish(save, step=step)
sys.exit(3)
"""


def test_what_a_program_handed_over_just_before_it_failed_is_published(tmp_path: Path) -> None:
    job = Job(tmp_path, HANDED_THEN_FAILED)
    assert job.run() == 1
    assert "exit code 3" in job.failure
    assert [it.step for it in list_checkpoints(open_store(job.folder))][-1] == 4


def test_what_cannot_be_published_does_not_hold_up_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_publisher, "TURN_SECONDS", 0.5)
    monkeypatch.setattr(script_publisher.ScriptPublisher, "_handed", lambda self: [])  # it never takes the step
    job = Job(tmp_path, HANDED_THEN_FAILED)
    assert job.run() == 1
    assert "exit code 3" in job.failure


def test_what_a_program_leaves_in_its_checkpoint_folder_is_published(tmp_path: Path) -> None:
    program = "import os\nfor n in (5, 40):\n    os.makedirs(f'checkpoints/step_{n}')\n"
    program += "    open(f'checkpoints/step_{n}/w', 'w').write('w')\n"
    job = Job(tmp_path, program)
    assert job.run() == 0
    assert [it.step for it in list_checkpoints(open_store(job.folder))] == [40]


WRITES_THEN = """
import os, signal, sys
os.makedirs("checkpoints/step-5")
open("checkpoints/step-5/w", "w").write("w")
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)", "raise OSError(28, 'disk')"])
def test_C10_what_a_failed_program_wrote_just_before_its_end_is_named(tmp_path: Path, end: str) -> None:
    """It may have failed in the middle of a save."""
    job = Job(tmp_path, WRITES_THEN + end)
    assert job.run() == 1
    assert list_checkpoints(open_store(job.folder)) == []
    (text,) = [it["message"] for it in events(job.folder, "notice") if "step-5" in it["message"]]
    assert "step-5 is not published, changed within 30 s of the end of a program that failed or was stopped" in text


def test_checkpoints_go_to_S3_by_the_nodes_agent_like_the_result(
    tmp_path: Path, bucket: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = DUMP + "os.makedirs('checkpoints/step_5')\nopen('checkpoints/step_5/w', 'w').write('w')\n"
    job, options = Job(tmp_path, program), {"endpoint_url": s3_server.endpoint}
    file = job.file(1).model_copy(update={"run_uri": f"s3://{bucket}/run"})
    file = file.model_copy(update={"spec": file.spec.model_copy(update={"storage_options": StorageOptions(**options)})})
    environ = job_environment(job.file(1)) | {"PYTHONPATH": search_path(), RUN_FOLDER_ENVIRONMENT: str(job.folder)}
    file.write(Path(environ[JOB_ENVIRONMENT]))
    asked: list[str] = []
    ask = TransferAgent._ask

    def spied(agent: TransferAgent, request: Any, progress: Any) -> Any:
        asked.append(request[0].__name__)
        return ask(agent, request, progress)

    monkeypatch.setattr(TransferAgent, "_ask", spied)
    assert main("script", environ) == 0
    assert [it.step for it in list_checkpoints(open_store(file.run_uri, options))] == [5]
    assert asked == ["upload_part", "upload_part"], "the checkpoint and the result"


def test_a_folder_that_does_not_change_is_published_while_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_publisher, "SETTLE_SECONDS", 0.5)
    program = f"""
import os, pathlib, time
os.makedirs("checkpoints/checkpoint-7")
open("checkpoints/checkpoint-7/w", "w").write("w")
deadline = time.time() + 120
while not pathlib.Path({str(tmp_path)!r}, "run/ckpt/commits/step-00000007.json").exists():
    assert time.time() < deadline
    time.sleep(0.05)
"""
    assert Job(tmp_path, program).run() == 0


def test_outside_a_job_the_calls_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sm_llm

    for name in list(os.environ):
        if name.startswith("SM_LLM_"):
            monkeypatch.delenv(name)
    sm_llm.log(1, loss=1.0)
    sm_llm.publish(tmp_path, step=1)
    assert callable(sm_llm.sync)


def test_a_stop_lets_the_program_save_and_publishes_that(tmp_path: Path) -> None:
    program = """
import os, pathlib, signal, sys, time
def save(*_):
    os.makedirs("checkpoints/checkpoint-9")
    open("checkpoints/checkpoint-9/w", "w").write("w")
    import sm_llm
    sm_llm.publish("checkpoints/checkpoint-9", step=9)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
    job = Job(tmp_path, program, args=[str(tmp_path / "up")])
    job.environ = {**job_environment(job.file(1)), "PYTHONPATH": search_path()}
    worker = [sys.executable, "-c", "from sm_llm.worker.main import program; raise SystemExit(program('script'))"]
    process = subprocess.Popen(worker, env=job.environ)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    finally:
        process.kill()
    record = StopRecord.read(ContainerPaths(Path(job.environ["SAGEMAKER_BASE_DIR"])).stopped)
    assert record is not None
    assert record.checkpoint == 9


def test_a_program_finds_the_parameters_of_smp_in_a_file(tmp_path: Path) -> None:
    """On SageMaker the launch parameter mp_parameters holds the same; elsewhere this file is all there is."""
    program = """
import json, os, shutil
shutil.copy(os.environ["SM_LLM_SMP_CONFIG"], os.path.join(os.environ["SM_LLM_OUTPUT"], "smp.json"))
"""
    smp = {"strategy": "smp", "hybrid_shard_degree": 1, "activation_loading_horizon": 3, "random_seed": 7}
    job = Job(tmp_path, program, parallelism=smp)
    assert job.run() == 0
    found = json.loads((result_folder(job.folder) / "smp.json").read_text())
    assert len(found) == 9
    wanted = {"hybrid_shard_degree": 1, "activation_loading_horizon": 3, "random_seed": 7, "tensor_parallel_degree": 1}
    assert wanted.items() <= found.items()
