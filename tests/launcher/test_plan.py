"""Plans: the numbers, the faults all at once, and that nothing heavy or lasting happens."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.data.describe import RowsInfo
from sm_llm.errors import Issue, PlanError, SpecError
from sm_llm.launcher import backend as base
from sm_llm.launcher.backends.local import backend as local
from sm_llm.launcher.display.tables import _plan_rows
from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning.model_facts import model_facts
from sm_llm.models.config import model_config
from sm_llm.spec.tasks import TrainTask

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.planning.plan import Plan

TRAIN: dict[str, Any] = {
    "name": "job",
    "compute": {"instance_count": 2, "processes_per_instance": 2},
    "task": {
        "kind": "train",
        "model": {"preset": "llama-3.2-1b"},
        "data": {"format": "synthetic", "seq_length": 4096, "rows": 10_000},
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "max_tokens": 10_000_000,
        "optim": {"warmup_fraction": 0.1},
    },
}


def one(*overrides: str, **fields: Any) -> Plan:
    (only,) = plan(TRAIN, *overrides, **fields)
    return only


def faults(*arguments: Any, **fields: Any) -> dict[str, Issue]:
    with pytest.raises(PlanError) as caught:
        plan(*arguments, **fields)
    return {fault.path: fault for fault in caught.value.issues}


def rows_folder(folder: Path, seq_length: int = 64, rows: int = 100, vocab_size: int | None = 300) -> Path:
    """The small JSON files of prepared rows; a plan reads nothing else."""
    folder.mkdir(parents=True)
    info = RowsInfo(seq_length=seq_length, rows=rows, columns=("input_ids",), vocab_size=vocab_size)
    state = {"_data_files": [{"filename": "rows.arrow"}]}
    for name, value in (("rows.json", info.to_json()), ("dataset_info.json", {}), ("state.json", state)):
        (folder / name).write_text(json.dumps(value))
    (folder / "rows.arrow").write_text("rows")
    return folder


def train_on(folder: Path, **changes: Any) -> dict[str, Any]:
    data = {"format": "rows", "train": str(folder), "seq_length": 64}
    task = {"kind": "train", "model": {"preset": "tiny"}, "data": data, "max_epochs": 2, "micro_batch_size": 10}
    return {"name": "rows", "task": {**task, **changes}}


def test_every_number_of_a_training_plan() -> None:
    it = one()
    derived, model = it.derived, it.model
    assert derived is not None
    assert model is not None
    assert (it.world_size, derived.data_parallel_degree, derived.accumulation_steps) == (4, 4, 64 // (2 * 4))
    assert derived.tokens_per_step == 64 * 4096
    assert derived.total_steps == 39  # ceil(10,000,000 / 262,144) = ceil(38.1)
    assert derived.warmup_steps == 4
    assert derived.checkpoint_every == 4
    assert model.parameters == 1_235_814_400
    assert model.checkpoint_bytes == 12 * model.parameters
    assert it.total_flops == model.flops_per_token * 39 * 64 * 4096
    assert len(it.command) == 2
    assert "--node-rank=1" in it.command[1]
    assert it.warnings == ()


@pytest.mark.parametrize(
    ("changes", "bytes_each", "holds"),
    [
        ({}, 12, "fp32 weights and two AdamW moments"),
        ({"precision": {"compute": "bf16", "master": "bf16"}}, 6, "bf16 weights and two AdamW moments"),
        ({"precision": {"moments": "bf16"}}, 8, "fp32 weights and two AdamW moments in bf16"),
        ({"parallelism": {"strategy": "nxd"}}, 14, "bf16 weights, fp32 masters and two AdamW moments"),
    ],
)
def test_a_checkpoint_holds_what_its_engine_saves(changes: dict[str, Any], bytes_each: int, holds: str) -> None:
    """NxD saves the weights that compute, and apart from them the optimiser's state with their masters (ZeRO-1)."""
    task = TrainTask.model_validate({**TRAIN["task"], **changes}, strict=False)
    facts = model_facts(model_config(preset="llama-3.2-1b", path=None, pretrained=None, overrides={}), task)
    assert (facts.checkpoint_bytes, facts.checkpoint_holds) == (bytes_each * facts.parameters, holds)


def test_a_plan_is_a_frozen_json_value_and_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    it = one()
    with pytest.raises(dataclasses.FrozenInstanceError):
        it.world_size = 3  # type: ignore[misc]
    assert json.loads(json.dumps(it.to_json(), allow_nan=False))["derived"]["total_steps"] == 39
    assert it == one()
    assert list(tmp_path.iterdir()) == []


def test_python_fields_and_command_line_overrides_make_the_same_plan() -> None:
    assert one("task.max_tokens=20000000") == one(task={"max_tokens": 20_000_000}) != one()


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    found = faults({**TRAIN, "task": {**TRAIN["task"], "model": {"preset": "llama-2-7b"}}}, "task.data.seq_length=8192")
    fault = found["task.data.seq_length"]
    assert "4096" in fault.message
    assert fault.value == 8192
    assert "max_position_embeddings" in fault.remedy


def test_rows_of_another_length_or_vocabulary_are_refused_all_at_once(tmp_path: Path) -> None:
    folder = rows_folder(tmp_path / "rows", seq_length=128, vocab_size=50_000)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    added = [{"id": 60_000, "content": "<|end|>"}]
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    found = faults(train_on(folder, tokenizer=str(tokenizer)))
    assert set(found) == {"task.data.seq_length", "task.data.train", "task.tokenizer"}
    assert "128 tokens each" in found["task.data.seq_length"].message
    assert "50000" in found["task.data.train"].message
    assert "60001" in found["task.tokenizer"].message
    assert "at least 60001" in found["task.tokenizer"].remedy


def test_the_row_count_gives_the_length_in_epochs(tmp_path: Path) -> None:
    (it,) = plan(train_on(rows_folder(tmp_path / "rows", rows=105)))
    assert it.rows == 105
    assert it.derived is not None
    assert it.derived.total_steps == 21  # floor(2 x 105 / 10)
    assert dict(_plan_rows(it))["length"] == "21 steps, 13,440 tokens, 2 epochs of 10.5 steps"
    (it,) = plan(train_on(rows_folder(tmp_path / "few", rows=10), max_epochs=1))
    assert dict(_plan_rows(it))["length"] == "1 step, 640 tokens, 1 epoch of 1 step"


def test_inputs_that_are_not_there_are_named(tmp_path: Path) -> None:
    job = train_on(tmp_path / "nothing", tokenizer=str(tmp_path / "neither"))
    assert {"task.data.train", "task.tokenizer"} <= set(faults(job))


def test_a_folder_that_holds_no_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    assert "state.json" in str(faults(train_on(tmp_path / "rows"))["task.data.train"])


@pytest.mark.parametrize("content", ["nothing", "an empty file", "another kind", "runs"])
def test_E19_a_source_without_text_is_refused_by_the_plan(tmp_path: Path, content: str) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    if content == "an empty file":
        (texts / "a.txt").touch()
    elif content == "another kind":
        (texts / "a.pdf").write_text("x")
    elif content == "runs":
        (texts / "runs" / "x" / "events").mkdir(parents=True)
        (texts / "runs" / "x" / "run.json").write_text('{"run_id": "x"}')
        (texts / "runs" / "x" / "events" / "a.jsonl").write_text('{"text": "x"}')
    job = {"name": "p", "task": {"kind": "prepare", "sources": ["builtin:python-docs", str(texts)], "seq_length": 16}}
    assert "has no text to read" in faults(job)["task.sources.1"].message
    (texts / "b.txt").write_text("some text")
    plan(job)


@pytest.mark.parametrize("storage", ["out", "pkg/out", "."])
def test_A1_a_plan_states_that_the_storage_in_a_programs_folder_is_not_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    job = {"name": "s", "storage": storage, "task": {"kind": "script", "source": ".", "entry": "train.py"}}
    assert plan(job)[0].settings["program"] == f"train.py of . (without the runs in {storage})"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    assert "without" not in plan(job, "task.source=src")[0].settings["program"]


def test_faults_of_the_arithmetic_come_with_those_of_the_data_and_state_where_they_were_written(tmp_path: Path) -> None:
    job = train_on(rows_folder(tmp_path / "rows", seq_length=128, rows=105), optim={"warmup_steps": 50})
    found = faults(job, "task.data.seq_length=32")
    assert set(found) == {"task.optim.warmup_steps", "task.data.seq_length"}
    assert "21 steps" in found["task.optim.warmup_steps"].message
    assert found["task.data.seq_length"].origin == "override"


def workflow(**train: Any) -> dict[str, Any]:
    prepare = {"kind": "prepare", "sources": ["builtin:python-docs"], "seq_length": 64}
    data = {"format": "rows", "train": "steps.one.output/train", "seq_length": 64}
    task = {"kind": "train", "model": {"preset": "tiny"}, "data": data, "max_steps": 5, **train}
    return {"name": "flow", "steps": {"one": {"task": prepare}, "two": {"task": task}}}


def test_a_workflow_has_one_plan_per_step_and_knows_what_an_earlier_step_will_write() -> None:
    first, second = plan(workflow(), "steps.one.task.train_tokenizer.vocab_size=512")
    assert (first.step, second.step, second.after) == ("one", "two", ("one",))
    assert second.job.name == "flow-two"
    found = faults(workflow(), "steps.one.task.seq_length=32")
    assert set(found) == {"steps.two.task.data.seq_length", "steps.two.task.data.train"}
    assert "32 tokens each" in found["steps.two.task.data.seq_length"].message
    assert "32000" in found["steps.two.task.data.train"].message  # the tokenizer of step one against preset tiny


def test_validation_rows_of_a_step_that_holds_none_out_are_refused() -> None:
    job = workflow(data={**workflow()["steps"]["two"]["task"]["data"], "validation": "steps.one.output/validation"})
    assert "holds no rows out" in faults(job)["steps.two.task.data.validation"].message


def test_CK19_a_save_interval_longer_than_the_run_is_warned_of_and_the_default_fits_the_run() -> None:
    warned = one("task.max_tokens=null", "task.max_steps=6", "task.checkpoint.every_steps=50")
    assert "every_steps=50 is more than the whole run, 6 steps" in warned.warnings[0]
    default = one("task.max_tokens=null", "task.max_steps=6").derived
    assert default is not None
    assert default.checkpoint_every == 1


def test_tensor_parallelism_across_nodes_is_warned_of() -> None:
    within = one("task.parallelism.tensor_parallel_degree=2")
    across = one("task.parallelism.tensor_parallel_degree=4")
    assert within.warnings == ()
    assert "tensor_parallel_degree=4 is more than the 2 processes of a node" in across.warnings[0]


def test_more_processes_than_gpus_are_refused_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = local.Machine(cpus=8, gpus=("0", "1"))
    monkeypatch.setattr(base, "backend", lambda name: local.LocalBackend(machine))
    fault = faults(TRAIN)["compute"]
    assert "4 GPUs, this machine has 2" in fault.message
    assert "processes_per_instance=1" in fault.remedy
    one("environment.CUDA_VISIBLE_DEVICES=''")
    one("compute.processes_per_instance=1")


def test_a_wrong_specification_stays_a_spec_error() -> None:
    with pytest.raises(SpecError, match="learning_rate"):
        plan(TRAIN, "task.optim.learning_rat=1e-3")


@pytest.mark.parametrize(
    ("recipe", "override", "path"),
    [
        ("llama-2-70b-smp", "task.parallelism.tensor_parallel_degree=3", "task.parallelism.tensor_parallel_degree"),
        ("llama-2-7b-fsdp", "task.parallelism.hybrid_shard_degree=3", "task.parallelism.hybrid_shard_degree"),
        ("llama-2-7b-fsdp", "task.global_batch_size=100", "task.global_batch_size"),
        ("mixtral-8x7b-smp", "task.parallelism.expert_parallel_degree=16", "task.parallelism.expert_parallel_degree"),
    ],
)
def test_a_wrong_degree_is_one_fault_without_what_follows_from_it(recipe: str, override: str, path: str) -> None:
    """Neither that nobody knows how long the job takes, nor that the strategy as a whole does not fit."""
    account = ("backend.role=arn:aws:iam::123456789012:role/SageMaker", "storage=s3://bucket/runs")
    shards = ("task.parallelism.hybrid_shard_degree=4",) if recipe == "mixtral-8x7b-smp" else ()
    with pytest.raises((SpecError, PlanError)) as caught:
        plan(recipe, *account, *shards, override)
    assert [fault.path for fault in caught.value.issues] == [path]
