"""The run record: whole, exact, and kept by several writers at once."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.runs.events.checkpoints import CheckpointPublished
from sm_llm.runs.events.events import EventWriter, FirstStep, Logged, Notice, StartChosen
from sm_llm.runs.git_state import git_state
from sm_llm.runs.outcome import Outcome, recorded_end, with_end
from sm_llm.runs.reader import RunReader
from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_record import Attempt, RequestedRun, RunRecord, host_facts, package_versions
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import run_store_at
from sm_llm.spec.job import JobSpec, WorkflowSpec

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.runs.run_store import RunStore

PREPARE = {"kind": "prepare", "sources": ["builtin:python-docs"], "seq_length": 64}


def record(spec: Any = None, **changes: Any) -> RunRecord:
    values = {
        "run_id": "tiny-1",
        "name": "tiny",
        "created": 1753000000.125,
        "spec": (spec or JobSpec.model_validate({"name": "tiny", "task": PREPARE})).model_dump(mode="json"),
        "spec_digest": "ab" * 32,
        "origins": {"task.kind": "job.yaml:3"},
        "plan": [{"world_size": 2}],
    }
    return RunRecord.model_validate(values | changes)


def attempt(number: int, state: RunState | None = None, **more: Any) -> Attempt:
    return Attempt(number=number, native_id=f"pid-{number}", started=float(number), state=state, **more)


def test_a_record_reads_back_as_it_was(tmp_path: Path) -> None:
    written = record(versions={"python": "3.11"}, host={"name": "größe"}).with_attempt(
        attempt(1, RunState.FAILED, ended=2.0, reason="disk full")
    )
    written.write(tmp_path / "run" / "run.json")
    assert RunRecord.read(tmp_path / "run" / "run.json") == written
    assert [it.name for it in (tmp_path / "run").iterdir()] == ["run.json"]


def test_outcome_and_number_follow_the_attempts() -> None:
    run = record()
    assert (run.next_attempt, run.outcome) == (1, None)
    run = run.with_attempt(attempt(1))
    assert (run.next_attempt, run.outcome) == (2, None)
    run = run.with_attempt(attempt(1, RunState.INTERRUPTED, ended=3.0))
    assert (len(run.attempts), run.outcome) == (1, None), "it can be continued"
    run = run.with_attempt(attempt(2, RunState.COMPLETED, ended=9.0))
    assert (run.next_attempt, run.outcome) == (3, RunState.COMPLETED)
    assert run.with_attempt(attempt(3)).outcome is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{", "cannot read the run record"),
        ("[]", "record version None is not known"),
        ('{"version": 9}', "record version 9 is not known to this release"),
        ('{"version": 1}', "run_id: Field required"),
    ],
)
def test_a_record_that_cannot_be_used_is_reported_without_a_traceback(tmp_path: Path, body: str, reason: str) -> None:
    (tmp_path / "run.json").write_text(body)
    with pytest.raises(StorageError, match=reason):
        RunRecord.read(tmp_path / "run.json")
    with pytest.raises(StorageError, match="there is no run record here"):
        RunRecord.read(tmp_path / "other.json")


def test_writers_do_not_lose_each_others_changes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record().write(path)

    def add(first: int) -> None:
        for number in range(first, first + 10):
            RunRecord.update(path, lambda held, number=number: held.with_attempt(attempt(number)))

    threads = [threading.Thread(target=add, args=(first,)) for first in (1, 11, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [it.number for it in RunRecord.read(path).attempts] == list(range(1, 31))


def test_the_specification_comes_back_as_the_object_it_was() -> None:
    job = JobSpec.model_validate({"name": "tiny", "task": PREPARE})
    assert record(job).load_spec() == job
    workflow = WorkflowSpec.model_validate({"name": "tiny", "steps": {"prepare": {"task": PREPARE}}})
    assert record(workflow).load_spec() == workflow
    json.dumps(record(job).model_dump(mode="json"), allow_nan=False)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_checkout_is_recorded_with_what_was_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-qm", "first")
    clean = git_state(tmp_path)
    assert clean is not None
    assert (len(clean.commit), clean.diff, clean.diff_is_cut) == (40, "", False)
    (tmp_path / "a.txt").write_text(("two " * 20 + "\n") * 20_000)
    (tmp_path / "sub").mkdir()
    changed = git_state(tmp_path / "sub")
    assert changed is not None
    assert changed.commit == clean.commit
    assert "-one" in changed.diff
    assert (len(changed.diff), changed.diff_is_cut) == (1 << 20, True)


def test_s07_the_recorded_diff_holds_no_secret(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    names = ["settings.yaml", "hub.yaml", ".env", "conf/prod.env", "notes.txt", "train.py"]
    (tmp_path / "conf").mkdir()
    for name in names:
        (tmp_path / name).write_text("x: 1\n")
    git(tmp_path, "add", "-f", *names)
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "settings.yaml").write_text("db_password: CANARY1\nrate: 3\n")
    (tmp_path / "hub.yaml").write_text(f"api: hf_{'CANARY2' * 4}\n")
    (tmp_path / ".env").write_text("X=CANARY3\n")
    (tmp_path / "conf" / "prod.env").write_text("X=CANARY4\n")
    (tmp_path / "notes.txt").write_text("-----BEGIN OPENSSH " + "PRIVATE KEY-----\nCANARY5\n")
    (tmp_path / "train.py").write_text("url = 'redis://:CANARY6@host'\ntoken = tokenizer.encode(text)\n")
    found = git_state(tmp_path / "conf")
    assert found is not None
    assert "CANARY" not in found.model_dump_json()
    assert set(found.left_out) == {"hub.yaml", ".env", "conf/prod.env", "notes.txt"}
    assert "+rate: 3" in found.diff
    assert "+token = tokenizer.encode(text)" in found.diff
    without = git_state(tmp_path, with_diff=False)
    assert without is not None
    assert (without.commit, without.diff) == (found.commit, "")


@pytest.mark.parametrize(
    "setting",
    [
        "core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command", "filter.evil.clean",
        "filter.evil.process", "filter.a=b.clean", "core.pager",
    ],
)  # fmt: skip
def test_s04_recording_a_checkout_starts_no_program_of_its_configuration(tmp_path: Path, setting: str) -> None:
    git(tmp_path, "init", "-q")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one\n")
    (tmp_path / ".gitattributes").write_text("*.txt diff=evil filter=evil\nb.txt filter=a=b\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("two\n")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    git(tmp_path, "config", setting, str(program))
    found = git_state(tmp_path)
    assert found is not None
    assert "+two" in found.diff
    assert not (tmp_path / "started").exists()


def test_6_variables_of_git_that_name_another_repository_or_program_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        (tmp_path / name / "a.txt").write_text(f"{name}\n")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-qm", name)
    expected = git_state(tmp_path / "own")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    (tmp_path / "own" / "a.txt").write_text("two\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    for name in ("GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_SSH_COMMAND"):
        monkeypatch.setenv(name, str(program))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(program))
    found = git_state(tmp_path / "own")
    assert found is not None
    assert expected is not None
    assert found.commit == expected.commit
    assert "+two" in found.diff
    assert not (tmp_path / "started").exists()


def test_a_machine_without_git_has_no_checkout(tmp_path: Path) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("git")

    def slow(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("git", 10)

    assert git_state(tmp_path, run=missing) is None
    assert git_state(tmp_path, run=slow) is None


def test_versions_come_without_importing_anything() -> None:
    versions = package_versions(["pydantic", "no-such-package"])
    assert versions.keys() == {"python", "pydantic"}
    assert {"name", "system", "processors"} <= host_facts({}).keys()


def test_changes_of_an_attempt_are_undone_as_one(tmp_path: Path) -> None:
    spec = {"backend": {"name": "local"}, "task": {"kind": "train"}}
    before = RunRecord(run_id="r", name="r", created=1.0, spec=spec, spec_digest="a", changes={1: ("x=1",)})
    asked = RequestedRun(spec={**spec, "task": {"kind": "script"}}, spec_digest="b", origins={"task.kind": "override"})
    changed = before.changed(asked, 2, ["task.kind=script"])
    assert changed.asked() == asked
    assert changed.changes == {1: ("x=1",), 2: ("task.kind=script",)}
    assert changed.before == before.asked()
    assert changed.unchanged_since(before) == before
    assert changed.unsettled == 2
    assert changed.settled(2, kept=False) == before
    kept = changed.settled(2, kept=True)
    assert (kept.asked(), kept.before, kept.unsettled) == (asked, None, None)
    # The launcher of attempt 2 was killed before the attempt was in the record, and another launch makes it.
    again = changed.changed(asked, 2, ["task.entry=a.py"])
    assert again.settled(2, kept=False) == before


@pytest.mark.parametrize(
    ("events", "state", "kept"),
    [
        ([], RunState.FAILED, False),
        ([StartChosen("checkpoint", 3)], RunState.STOPPED, False),
        ([Notice("loads torch"), FirstStep(4)], RunState.FAILED, True),
        ([CheckpointPublished(4, "s3://b/r", 1, 1.0, 0.0)], RunState.INTERRUPTED, True),
        ([Logged(4, {"loss": 1.0})], RunState.FAILED, True),
        ([], RunState.COMPLETED, True),
    ],
)
def test_F2_changes_stay_only_with_an_attempt_that_worked_with_them(
    tmp_path: Path, events: list[Any], state: RunState, kept: bool
) -> None:
    """Whatever ended the attempt, and wherever it ran: every backend records its end by this function."""
    spec = {"backend": {"name": "sagemaker"}, "task": {"kind": "train"}}
    first = Attempt(number=1, native_id="7", started=1.0, ended=2.0, state=RunState.STOPPED)
    before = RunRecord(run_id="r", name="r", created=1.0, spec=spec, spec_digest="a", attempts=(first,))
    asked = RequestedRun(spec={**spec, "environment": {"NCCL_SOCKET_IFNAME": "eth9"}}, spec_digest="b")
    second = Attempt(number=2, native_id="8", started=3.0)
    record = before.changed(asked, 2, ["environment.NCCL_SOCKET_IFNAME=eth9"]).with_attempt(second)
    paths = RunPaths(tmp_path)
    for number, found in ((1, [FirstStep(1)]), (2, events)):
        log = EventWriter(paths.event_file(number, "rank0"), number)
        for event in found:
            log.write(event)
        log.close()
    ended = with_end(record, paths, second, Outcome(state, "eth9 leaves no network interface"))
    assert ended.attempts[1].reason == "eth9 leaves no network interface"
    assert ended.before is None
    if kept:
        assert (ended.asked(), ended.changes, ended.attempts[1].dropped_sentence) == (asked, record.changes, "")
    else:
        assert (ended.asked(), ended.changes) == (before.asked(), {})
        assert ended.attempts[1].dropped_sentence == (
            "attempt 2 ended before its first step, so the run has not kept its changes: "
            "environment.NCCL_SOCKET_IFNAME=eth9"
        )


class Stored(RunReader):
    """A run of which only the storage is asked."""

    def describe(self) -> tuple[RunState, str | None]:
        end = recorded_end(self.record)
        return (RunState.UNKNOWN, None) if end is None else (end.state, end.reason)

    def step_run_store(self, step: str) -> RunStore:
        return self.run_store.below("steps", step)


def test_a_run_is_read_from_its_storage_alone(tmp_path: Path) -> None:
    run_store = run_store_at(tmp_path / "w-1")
    one = {"backend": {"name": "a place of another release"}, "task": {"kind": "train"}}
    spec = {**one, "steps": {"a": {}, "b": {}}}
    run_store.create(RunRecord(run_id="w-1", name="w", created=1.0, spec=spec, spec_digest="d"))
    step = RunRecord(run_id="w-1-a", name="a", created=1.0, spec=one, spec_digest="d")
    run_store.below("steps", "a").create(step.with_attempt(Attempt(number=1, native_id="7", started=1.0)))
    run = Stored(tmp_path / "w-1")
    assert (run.id, run.kind, list(run.steps)) == ("w-1", "workflow", ["a"])
    assert (run.job.id, run.job.kind, run.job.state) == ("w-1-a", "train", RunState.UNKNOWN)
    assert run.job.storage == str(tmp_path)
    assert run.job.checkpoints() == []
    assert (run.result, run.job.result) == (None, None)
