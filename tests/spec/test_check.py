"""Faults that several fields make together."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.loading.load import load

TRAIN: dict[str, Any] = {
    "kind": "train",
    "model": {"preset": "tiny"},
    "data": {"format": "synthetic", "seq_length": 8},
    "max_steps": 10,
}
PREPARE: dict[str, Any] = {"kind": "prepare", "sources": ["/text"], "seq_length": 8}


def faults(spec: dict[str, Any], *overrides: str) -> list[str]:
    try:
        load(spec, overrides, environ={"HOME": "/nowhere"})
    except SpecError as error:
        return [str(fault) for fault in error.issues]
    return []


def train(*overrides: str, **fields: Any) -> list[str]:
    return faults({"name": "job", "task": TRAIN, **fields}, *overrides)


def workflow(**steps: Any) -> list[str]:
    return faults({"name": "flow", "steps": steps})


def test_compiled_layers_are_refused_where_split_ones_are_computed_again() -> None:
    options = ["compute.processes_per_instance=2", "task.parallelism.tensor_parallel_degree=2"]
    assert train(*options, "task.precision.compile=true") == []
    full = "task.parallelism.activation_checkpointing=full"
    assert train(*options, full) == []
    (reported,) = train(*options, full, "task.precision.compile=true")
    assert "would hold a DeviceMesh" in reported


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("task.parallelism.sharding=none", "sharding: none"),
        ("task.parallelism.offload_optimizer=true", "offload_optimizer"),
        ("task.precision.reduce=bf16", "precision.reduce: bf16 of fp32 masters"),
    ],
)
def test_gradients_that_are_dropped_at_once_share_no_memory(option: str, named: str) -> None:
    shares = "task.parallelism.share_gradient_memory=true"
    assert train(shares) == []
    (reported,) = train(shares, option)
    assert f"has no effect with {named}" in reported


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("task.parallelism.sharding=none", "sharding: none"),
        ("task.parallelism.offload_optimizer=true", "offload_optimizer"),
    ],
)
def test_copy_engines_without_anything_to_copy_are_named(option: str, named: str) -> None:
    copies = "task.parallelism.copy_engine_collectives=true"
    assert train(copies) == []
    (reported,) = train(copies, option)
    assert f"has no effect with {named}" in reported


@pytest.mark.parametrize(("second", "is_refused"), [(0.95, False), (0.996, False), (0.997, True), (0.999, True)])
def test_moments_in_bf16_need_decay_rates_whose_changes_it_holds(second: float, is_refused: bool) -> None:
    found = train("task.precision.moments=bf16", f"task.optim.betas=[0.9, {second}]")
    assert any(f"with a decay rate of {second} a step changes a moment by less" in it for it in found) is is_refused
    held = 1 + 2**-7  # the number of bf16 whose neighbours are farthest, relative to it
    assert (nearest_bf16(held * second) == held) is is_refused, "it stays where it is"


def nearest_bf16(value: float) -> float:
    """The nearest bf16 number to a positive one, ties to even."""
    (bits,) = struct.unpack("I", struct.pack("f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))
    return float(rounded)


def test_a_good_job_has_none() -> None:
    assert train() == []
    assert faults({"name": "p", "task": PREPARE}) == []
    assert workflow(a={"task": PREPARE}, b={"task": {**TRAIN, "tokenizer": "steps.a.output/tokenizer"}}) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task.max_steps=null"], "task.max_steps (override): give exactly one of max_steps, max_tokens, max_epochs"),
        (["task.max_tokens=9"], "Keep one and set the others to null, e.g. task.max_steps=null"),
        (["task.model.preset=null"], "task.model (Python): no model. Give model.preset, model.path or start.pretrain"),
        (["task.precision.compute=fp32", "task.precision.master=bf16"], "more digits than the parameters would"),
        (["task.parallelism.context_parallel_degree=2"], "1 / 2 leaves 1"),
        (["task.model.path=/m"], "give preset or path, not both"),
        (["task.model.config.x=.nan"], "cannot be written as JSON"),
        (["task.optim.warmup_steps=1", "task.optim.warmup_fraction=0.1"], "warmup_steps or warmup_fraction, not both"),
        (["task.optim.warmup_steps=11"], "warm-up is longer than the schedule, 10 steps"),
        (["task.optim.min_learning_rate=1"], "the floor is above the peak learning_rate 0.0003"),
        (["task.optim.schedule=exponential"], "needs a floor above it (got 0.0). For example 3e-06"),
        (["task.optim.betas=[0.9, 1]"], "each must be at least 0 and less than 1 (got [0.9, 1.0])"),
        (["task.global_batch_size=3", "compute.processes_per_instance=2"], "1 x 2 = 2: 3 / 2 leaves 1"),
        (["name=-a"], "letters, digits and hyphens"),
        (["name=" + "a" * 64], "at most 63 characters"),
        (["environment={'A B': x}"], "not a name of an environment variable"),
        (["storage_options.expected_bucket_owner='12'"], "storage_options.expected_bucket_owner (override)"),
        (["storage_options.endpoint_url=s3.local"], "storage_options.endpoint_url (override)"),
        (["storage="], "storage (override): is empty"),
        (["task.tokenizer=s3://B/t"], "names no valid bucket: a name must have 3 to 63"),
        (["task.start={pretrained: 'gs://org/name'}"], "gs:// is not supported (got 'gs://org/name'). Give a folder"),
        (["task.tokenizer=inputs.tok/x"], "there is no such input (got 'tok'). Known inputs: none"),
        (["inputs.a=inputs.b", "inputs.b=/b"], "an input cannot refer to another input"),
        (["task.tokenizer=steps.p.output"], "a job alone has no steps. Write a workflow"),
        (
            ["task.data={format: stream, dataset: c4, seq_length: 8}", "task.max_steps=null", "task.max_epochs=1"],
            "a stream has no known length",
        ),
    ],
)
def test_fields_that_do_not_fit_together(overrides: list[str], expected: str) -> None:
    found = train(*overrides)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["storage=file:///x"],
        ["task.model.preset=null", "task.start={pretrained: /w}"],
        ["task.model={preset: null, path: org/name}"],
        ["task.optim.schedule=exponential", "task.optim.min_learning_rate=1e-5"],
        ["task.data={format: stream, dataset: json, data_files: 'https://h/x.json', seq_length: 8}"],
        ["name=" + "a" * 63],
    ],
)
def test_what_is_fine_is_let_through(overrides: list[str]) -> None:
    assert train(*overrides) == []


def test_a_tokenizer_is_given_or_trained() -> None:
    both = {**PREPARE, "tokenizer": "/t", "train_tokenizer": {"vocab_size": 300}}
    assert "not both" in faults({"name": "p", "task": both})[0]


def test_references_point_to_earlier_steps() -> None:
    later = {"task": {**TRAIN, "tokenizer": "steps.b.output"}}
    assert workflow(a=later, b={"task": PREPARE})[0].startswith(
        "steps.a.task.tokenizer (Python): refers to itself or a later step (got 'b'). Steps before a: none"
    )
    assert (
        "there is no such step (got 'c'). Steps before b: a"
        in workflow(a={"task": PREPARE}, b={"task": PREPARE, "after": ["c"]})[0]
    )


def test_each_step_is_checked_and_a_shared_fault_is_reported_once() -> None:
    bad = {"task": {**TRAIN, "global_batch_size": 3}}
    spec = {"name": "flow", "steps": {"a": bad, "b": bad}, "environment": {"A B": "x"}}
    found = faults(spec, "compute.processes_per_instance=2")
    assert [text.split(" ")[0].rstrip(":") for text in found] == [
        "environment.A",
        "steps.a.task.global_batch_size",
        "steps.b.task.global_batch_size",
    ]


def test_a_step_name_must_fit_behind_the_workflows() -> None:
    assert "at most 63" in faults({"name": "f" * 40, "steps": {"s" * 30: {"task": PREPARE}}})[0]
    assert "letters, digits" in workflow(**{"a.b": {"task": PREPARE}})[0]


def test_cross_checks_are_silent_beside_a_field_that_is_faulty_itself() -> None:
    assert len(train("task.max_steps=many")) == 1


def test_cross_checks_speak_beside_faults_elsewhere() -> None:
    found = train("task.optim.epz=1", "task.model.path=/m")
    assert len(found) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["task.model={preset: null, path: 'hf://org/name@main'}"],
        ["task.tokenizer=hf://org/name@refs/pr/1/sub"],
        ["task.data={format: stream, dataset: 'hf://datasets/org/name@v1', seq_length: 8}"],
    ],
)
def test_the_hub_is_a_source(overrides: list[str]) -> None:
    assert train(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["task.tokenizer=hf://name"], "task.tokenizer"),
        (["task.tokenizer=hf://org/name@"], "task.tokenizer"),
        (["storage=hf://org/name"], "storage"),
        (["task.start={checkpoint: 'hf://org/name'}"], "task.start.checkpoint"),
        (["task.data={format: stream, dataset: 'hf://org/name', seq_length: 8}"], "task.data.dataset"),
        (["task.data={format: stream, dataset: 'hf://datasets/org/name/a.json', seq_length: 8}"], "task.data.dataset"),
    ],
)
def test_but_no_place_to_write_to_and_no_run(overrides: list[str], path: str) -> None:
    assert [text.partition(":")[0].partition(" ")[0] for text in train(*overrides)] == [path]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "./model", "is not a place of a model in S3"),
        ("model", "s3://bucket", "is not a place of a model in S3"),
        ("group", "my_models", "Try my-models"),
        ("group", "g" * 64, "1 to 63"),
        ("image_uri", "an image", "no spaces"),
        ("image_uri", "i" * 256, "255"),
    ],
)
def test_what_is_registered_has_the_limits_of_the_service(field: str, value: str, words: str) -> None:
    group = "arn:aws:sagemaker:us-west-2:123456789012:model-package-group/llama"
    task = {"kind": "register", "model": "s3://bucket/run/result", "group": group, "image_uri": "repo:1"}
    assert faults({"name": "r", "task": task}) == []
    (text,) = faults({"name": "r", "task": {**task, field: value}})
    assert text.startswith(f"task.{field} ")
    assert words in text


def test_what_is_fetched_is_on_the_hub() -> None:
    assert faults({"name": "f", "task": {"kind": "fetch", "source": "hf://datasets/org/name@v1/en"}}) == []
    (text,) = faults({"name": "f", "task": {"kind": "fetch", "source": "s3://bucket/model"}})
    assert "task.source" in text
    assert "sm-llm sync" in text
