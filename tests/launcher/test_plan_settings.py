"""``plan`` and ``fit`` show what a job trains on, starts from and installs."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sm_llm.cli.app import app
from sm_llm.errors import RunFailed
from sm_llm.launcher.api import launch
from sm_llm.launcher.build_submission import new_record
from sm_llm.launcher.display.live import begin
from sm_llm.launcher.display.tables import plan_table
from sm_llm.launcher.planner import plan
from sm_llm.launcher.run import Run
from sm_llm.runs.run_store import run_store_at
from sm_llm.spec.loading.load import load
from sm_llm.spec.loading.yaml_text import to_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.planning.plan import Plan

TASK: dict[str, Any] = {"kind": "train", "model": {"preset": "tiny"}, "max_steps": 5}
RANDOM: dict[str, Any] = {**TASK, "data": {"format": "synthetic", "seq_length": 64, "rows": 1000}}
ROWS: dict[str, Any] = {
    **TASK,
    "data": {"format": "rows", "train": "s3://bucket/rows", "seq_length": 64},
    "start": {"pretrained": "s3://bucket/weights"},
    "tokenizer": "s3://bucket/tokenizer",
    "precision": {"compute": "bf16", "compile": True},
}
CLOUD: dict[str, Any] = {
    "compute": {"instance_type": "ml.p5.48xlarge"},
    "backend": {"name": "sagemaker", "role": "arn:aws:iam::111122223333:role/sm", "region": "us-west-2"},
    "storage": "s3://bucket/runs",
}


def planned(task: dict[str, Any], **more: Any) -> Plan:
    (found,) = plan({"name": "x", "task": task, **more})
    return found


def table(found: Plan) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(plan_table(found))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def fit_shows(found: Plan, storage: Path) -> str:
    """What ``fit`` prints first, of a run that was just recorded."""
    loaded = load({"name": "x", "task": found.job.task.model_dump()}, environ={})
    record = new_record("x-1", loaded.spec, loaded.digest, {}, [found.to_json()], created=0.0)
    run_store = run_store_at(str(storage / "x-1"), {})
    run_store.create(record)
    console = Console(file=io.StringIO(), width=200)
    begin(Run(run_store), console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.integration
def test_C10_a_continued_run_shows_what_its_next_attempt_installs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("raise SystemExit(3)")
    (source / "requirements.txt").write_text("nosuchpkg>=3; python_version < '3'\n")
    job = {
        "name": "own", "task": {"kind": "script", "entry": "train.py", "source": str(source)},
        "storage": str(tmp_path / "runs"), "compute": {"processes_per_instance": 1},
    }  # fmt: skip
    shown = []
    for attempt in (1, 2):
        run = launch(job)
        console = Console(file=io.StringIO(), width=200)
        begin(run, console)
        shown.append(str(console.file.getvalue()))  # type: ignore[attr-defined]
        with pytest.raises(RunFailed):
            run.wait()
        assert len(run.attempts) == attempt
        (source / "requirements.txt").unlink(missing_ok=True)
    assert "installs" in shown[0]
    assert "as attempt 2" in shown[1]
    assert "installs" not in shown[1]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (RANDOM, ["RANDOM TOKENS: 1,000 rows of 64", "random weights (seed 0)", "none: the result has none", "fp32"]),
        (ROWS, ["s3://bucket/rows", "weights of s3://bucket/weights", "s3://bucket/tokenizer", "computes in bf16"]),
    ],
    ids=["random", "rows"],
)
def test_C7_plan_and_fit_show_data_start_tokenizer_and_precision(
    task: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    more = CLOUD if task is ROWS else {}
    found = planned(task, **more)
    for shown in (table(found), fit_shows(found, tmp_path), "\n".join(found.start_lines())):
        for word in words:
            assert word in shown


def test_C7_random_tokens_are_warned_of_where_they_cost_money(tmp_path: Path) -> None:
    paid, free = planned(RANDOM, **CLOUD), planned(RANDOM)
    assert any("RANDOM TOKENS" in it and "costs money" in it for it in paid.warnings)
    assert "costs money" in fit_shows(paid, tmp_path)
    assert not [it for it in free.warnings if "RANDOM" in it]
    assert not [it for it in planned(ROWS, **CLOUD).warnings if "RANDOM" in it]


def test_f12_what_requirements_install_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "requirements.txt").write_text("# tools\npytest\nblack  # formatter\n\n")
    script = {"kind": "script", "source": str(tmp_path), "entry": "train.py"}
    cloud = {**CLOUD, "backend": {**CLOUD["backend"], "max_run_seconds": 3600}}
    for found in (planned(script), planned(script, **cloud)):
        for shown in (table(found), fit_shows(found, tmp_path / found.job.backend.name)):
            assert "pytest, black" in shown
            assert "requirements.txt, once per node" in shown


def test_inputs_arguments_and_sources_are_shown_with_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("print(1)\n")
    (tmp_path / "rows/deep").mkdir(parents=True)
    (tmp_path / "rows/a.txt").write_text("x" * 1500)
    (tmp_path / "rows/deep/b.txt").write_text("x" * 500)
    (tmp_path / "empty").mkdir()
    script = {"kind": "script", "source": str(tmp_path / "src"), "entry": "train.py"}
    inputs = {"rows": str(tmp_path / "rows"), "file": str(tmp_path / "rows/a.txt"), "none": str(tmp_path / "empty")}
    found = planned({**script, "args": {"epochs": 3, "name": "a b", "seed": None}}, inputs=inputs)
    assert found.settings["arguments"] == "--epochs 3 --name 'a b' (left out, null: seed)"
    assert found.settings["input rows"] == f"{tmp_path / 'rows'} (2 files, 2.0 kB)"
    assert found.settings["input file"] == f"{tmp_path / 'rows/a.txt'} (1 file, 1.5 kB)"
    assert found.settings["input none"] == f"{tmp_path / 'empty'} (no files)"
    for shown in (table(found), fit_shows(found, tmp_path / "fit"), "\n".join(found.start_lines())):
        assert all(value in shown for value in found.settings.values())
    sharded = {"uri": "s3://bucket/part", "mode": "File", "distribution": "ShardedByS3Key"}
    shared = {"file_system_id": "fs-01234567", "directory_path": "/abc/data"}
    vpc = {"subnets": ["subnet-01234567"], "security_group_ids": ["sg-01234567"]}
    cloud = {**CLOUD, "backend": {**CLOUD["backend"], "max_run_seconds": 3600, "vpc": vpc, "image": "built",
             "image_uri": "111122223333.dkr.ecr.us-west-2.amazonaws.com/own:1"}}  # fmt: skip
    found = planned(script, inputs={"a": sharded, "b": shared}, **cloud)
    assert found.settings["input a"] == "s3://bucket/part (File, ShardedByS3Key)"
    assert found.settings["input b"] == "fsx://fs-01234567/abc/data (mounted read only)"
    text = planned({"kind": "prepare", "sources": [str(tmp_path / "rows")], "seq_length": 8})
    assert text.settings["reads"] == f"{tmp_path / 'rows'} (2 files, 2.0 kB)"


def test_f12_a_dry_run_shows_it_beside_what_would_be_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "requirements.txt").write_text("pytest\n")
    script = {"kind": "script", "source": str(tmp_path), "entry": "train.py"}
    file = tmp_path / "job.yaml"
    file.write_text(to_yaml({"name": "x", "task": script, "storage": str(tmp_path / "runs")}))
    done = CliRunner().invoke(app, ["fit", str(file), "--dry-run"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)[0]["backend"] == "local"
    assert "installs   pytest" in done.stderr


def test_12e_8_a_plan_shows_variables_secrets_and_trackers() -> None:
    task = {**RANDOM, "logging": {"sinks": {"tensorboard": {"folder": "board"}}}}
    (it,) = plan({"name": "shown", "task": task, "environment": {"NCCL_DEBUG": "INFO", "A": "b c"}})
    assert it.settings["environment"] == "NCCL_DEBUG=INFO 'A=b c'"
    assert it.settings["trackers"] == "tensorboard (folder board)"
    (it,) = plan("smoke", {"secrets": {"HF_TOKEN": "file:/etc/hostname"}})
    assert it.settings["secrets"] == "HF_TOKEN from file:/etc/hostname"
    assert not {"environment", "trackers", "secrets"} & set(plan("smoke")[0].settings)
