"""A specification for every issue of the phases spec, model and data, by its code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data.prepare.rows_writer import RowsWriter
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.planner import plan
from sm_llm.spec.backends.local import LocalOptions
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.backend_settings import backend_settings
from sm_llm.spec.loading.load import load
from sm_llm.spec.references import resolve
from tests.issue_codes import codes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Case = tuple[str, Any, tuple[Any, ...]]

TRAIN: dict[str, Any] = {
    "name": "tiny",
    "storage": "runs",
    "task": {
        "kind": "train", "model": {"preset": "tiny"}, "max_steps": 4, "micro_batch_size": 1,
        "data": {"format": "synthetic", "seq_length": 64, "rows": 64},
    },
    "compute": {"instance_count": 1, "processes_per_instance": 1},
}  # fmt: skip
STREAMED = {"format": "stream", "dataset": "hf://datasets/a/b", "seq_length": 64}
STREAM = {**TRAIN, "task": {**TRAIN["task"], "data": STREAMED, "tokenizer": "hf://a/b"}}
ON_ROWS = {**TRAIN, "task": {**TRAIN["task"], "data": {"format": "rows", "train": "rows", "seq_length": 4}}}
ON_SAGEMAKER = {
    **TRAIN,
    "storage": "s3://bucket/runs",
    "backend": {"name": "sagemaker", "role": "arn:aws:iam::123456789012:role/x", "region": "us-east-1"},
    "compute": {"instance_type": "ml.p5.48xlarge"},
}
SMP = {**ON_SAGEMAKER, "task": {**TRAIN["task"], "micro_batch_size": 16, "parallelism": {"strategy": "smp"}}}
NXD = {**ON_SAGEMAKER, "compute": {"instance_type": "ml.trn1.32xlarge"},
       "task": {**TRAIN["task"], "parallelism": {"strategy": "nxd"}}}  # fmt: skip
LLAMA_3 = ("task.model.preset=llama-3-8b", "task.data.seq_length=8192")
PREPARE: dict[str, Any] = {"name": "texts", "task": {"kind": "prepare", "sources": ["texts"], "seq_length": 8}}
FETCH: dict[str, Any] = {"name": "get", "task": {"kind": "fetch", "source": "hf://a/b"}}
CONVERT: dict[str, Any] = {"name": "cut", "task": {"kind": "convert", "source": "texts", "to": "hf"}}
REGISTER: dict[str, Any] = {
    **ON_SAGEMAKER,
    "task": {"kind": "register", "model": "s3://bucket/run/result", "group": "models", "image_uri": "image"},
    "compute": {"instance_type": "ml.m5.xlarge"},
}
SCRIPT: dict[str, Any] = {"name": "own", "task": {"kind": "script", "entry": "train.py", "source": "program"}}
PRECOMPILE: dict[str, Any] = {**ON_SAGEMAKER, "task": {"kind": "precompile", "training": TRAIN["task"]}}
FLOW: dict[str, Any] = {
    "name": "flow",
    "steps": {"texts": {"task": PREPARE["task"]}, "train": {"task": TRAIN["task"], "compute": TRAIN["compute"]}},
}


ODD = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Sizes that no product in fp8 takes."""


def model(preset: str, **config: Any) -> dict[str, Any]:
    """A model by its preset, with changes."""
    return {"task.model": {"preset": preset, "config": config}}


CASES: list[Case] = [
    # names, addresses and inputs
    ("name-invalid", TRAIN, ("name=a_b",)),
    ("name-too-long", TRAIN, (f"name={'a' * 64}",)),
    ("address-empty", TRAIN, ("storage=' '",)),
    ("address-scheme-unsupported", TRAIN, ("storage=gs://bucket/x",)),
    ("address-folders-odd", TRAIN, ("storage=s3://bucket/a/../b",)),
    ("bucket-name-invalid", TRAIN, ("storage=s3://B/x",)),
    ("hub-address-invalid", TRAIN, ("task.tokenizer=hf://a",)),
    ("storage-class-archived", TRAIN, ("storage=s3://bucket/x", "storage_options.storage_class=GLACIER")),
    ("storage-class-unknown", TRAIN, ("storage=s3://bucket/x", "storage_options.storage_class=FAST")),
    ("input-unknown", TRAIN, ("task.data.format=rows", "task.data.train=inputs.none")),
    ("input-unread", TRAIN, ("inputs.texts=s3://bucket/x",)),
    ("local-input-not-found", SCRIPT, ("inputs.a=/nowhere",)),
    ("input-refers-to-input", SCRIPT, ("inputs.a=s3://bucket/x", "inputs.b=inputs.a")),
    ("input-setting-of-sagemaker", SCRIPT, ({"inputs": {"a": {"uri": "s3://bucket/x", "data_type": "ManifestFile"}}},)),
    (
        "input-sharded-for-rows",
        {**ON_SAGEMAKER, "task": ON_ROWS["task"]},
        ("task.data.train=inputs.a", {"inputs": {"a": {"uri": "s3://bucket/x", "distribution": "ShardedByS3Key"}}}),
    ),
    ("specification-of-unknown-type", 5, ()),
    ("pipe-mode-unsupported", SCRIPT, ({"inputs": {"a": {"uri": "s3://bucket/x", "mode": "Pipe"}}},)),
    ("input-variables-collide", SCRIPT, ({"inputs": {"a-b": "s3://bucket/x", "a_b": "s3://bucket/y"}},)),
    ("step-reference-in-a-job", TRAIN, ("task.data.format=rows", "task.data.train=steps.texts.output")),
    ("step-reference-unknown", FLOW, ("steps.texts.after=[train]",)),
    ("environment-variable-given-twice", TRAIN, ("environment.A=x", "secrets.A=env:A")),
    ("environment-variable-name-invalid", TRAIN, ({"environment": {"no name": "x"}},)),
    ("environment-variable-reserved", TRAIN, ("environment.RANK=1",)),
    # training
    ("length-not-exactly-one", TRAIN, ("task.max_tokens=100",)),
    ("stream-without-length", STREAM, ("task.max_steps=null", "task.max_epochs=1")),
    ("stream-without-files", STREAM, ("task.data.dataset=json",)),
    ("stream-dataset-invalid", STREAM, ("task.data.dataset=hf://a/b",)),
    ("model-given-twice", TRAIN, ("task.model.path=x",)),
    ("model-missing", TRAIN, ("task.model.preset=null",)),
    ("model-config-not-json", TRAIN, ({"task.model.config": {"rope_theta": float("nan")}},)),
    ("warmup-given-twice", TRAIN, ("task.optim.warmup_steps=1", "task.optim.warmup_fraction=0.5")),
    ("warmup-longer-than-schedule", TRAIN, ("task.optim.warmup_steps=9",)),
    ("learning-rate-floor-above-peak", TRAIN, ("task.optim.min_learning_rate=1", "task.optim.learning_rate=0.5")),
    ("weight-decay-too-large", TRAIN, ("task.optim.weight_decay=2", "task.optim.learning_rate=0.5")),
    (
        "exponential-schedule-without-floor",
        TRAIN,
        ("task.optim.schedule=exponential", "task.optim.min_learning_rate=0"),
    ),
    ("betas-out-of-range", TRAIN, ("task.optim.betas=[0.9, 1.0]",)),
    ("master-precision-below-compute", TRAIN, ("task.precision.master=bf16", "task.precision.compute=fp32")),
    ("moments-too-slow", TRAIN, ("task.precision.moments=bf16", "task.optim.betas=[0.9, 0.999]")),
    (
        "moments-with-offloading",
        TRAIN,
        ("task.precision.moments=bf16", "task.parallelism.offload_optimizer=true"),
    ),
    ("profile-steps-overlap", TRAIN, ({"task.logging.profile": {"steps": 9, "every_steps": 2}},)),
    ("batch-not-divisible", TRAIN, ("task.global_batch_size=3", "task.micro_batch_size=2")),
    # machines and degrees
    ("instance-type-missing", ON_SAGEMAKER, ("compute.instance_type=null",)),
    ("instance-type-local", ON_SAGEMAKER, ("compute.instance_type=local",)),
    ("instance-type-without-prefix", ON_SAGEMAKER, ("compute.instance_type=p5.48xlarge",)),
    ("instance-type-unknown", ON_SAGEMAKER, ("compute.instance_type=ml.p55.48xlarge",)),
    ("degrees-not-dividing-processes", TRAIN, ("task.parallelism.tensor_parallel_degree=3",)),
    ("shard-degree-without-effect", TRAIN, ("task.parallelism.hybrid_shard_degree=2",)),
    (
        "offloading-without-checkpointing",
        TRAIN,
        ("task.parallelism.offload_activations=true", "task.parallelism.activation_checkpointing=none"),
    ),
    ("checkpoint-interval-without-effect", TRAIN, ("task.parallelism.checkpoint_every_layers=3",)),
    (
        "compile-with-tensor-parallelism",
        ON_SAGEMAKER,
        (
            "task.precision.compile=true",
            "task.parallelism.tensor_parallel_degree=2",
            "task.parallelism.activation_checkpointing=full",
        ),
    ),
    (
        "copies-without-effect",
        TRAIN,
        ("task.parallelism.copy_engine_collectives=true", "task.parallelism.sharding=none"),
    ),
    ("overlap-without-effect", TRAIN, ("task.parallelism.async_tensor_parallel=true",)),
    (
        "gradient-memory-without-effect",
        TRAIN,
        ("task.parallelism.share_gradient_memory=true", "task.parallelism.sharding=none"),
    ),
    (
        "reads-across-nodes",
        ON_SAGEMAKER,
        ("task.parallelism.copy_engine_collectives=true", "compute.instance_count=2"),
    ),
    (
        "shard-degree-not-dividing-processes",
        ON_SAGEMAKER,
        ({"task.parallelism": {"strategy": "fsdp", "sharding": "hybrid", "hybrid_shard_degree": 3}},),
    ),
    (
        "shard-degree-of-a-node-indivisible",
        ON_SAGEMAKER,
        (
            {"task.parallelism": {"strategy": "fsdp", "sharding": "hybrid", "tensor_parallel_degree": 16}},
            "compute.instance_count=2",
        ),
    ),
    ("reshard-degree-indivisible", ON_SAGEMAKER, ("task.parallelism.reshard_after_forward=3",)),
    (
        "sequence-not-divisible-by-degrees",
        ON_SAGEMAKER,
        ("task.data.seq_length=63", "task.parallelism.context_parallel_degree=2"),
    ),
    ("smp-degree-does-not-divide-world-size", SMP, ("task.parallelism.tensor_parallel_degree=3",)),
    ("smp-degrees-do-not-divide-world-size", SMP, ("task.parallelism.hybrid_shard_degree=3",)),
    ("smp-shard-degree-too-large", SMP, ("task.parallelism.hybrid_shard_degree=16",)),
    (
        "smp-tensor-degree-crosses-nodes",
        SMP,
        ("task.parallelism.tensor_parallel_degree=16", "compute.instance_count=2"),
    ),
    (
        "smp-context-degree-too-large",
        SMP,
        ("task.parallelism.context_parallel_degree=4", "task.parallelism.hybrid_shard_degree=2"),
    ),
    (
        "smp-expert-with-tensor",
        SMP,
        ("task.parallelism.expert_parallel_degree=2", "task.parallelism.tensor_parallel_degree=2"),
    ),
    (
        "smp-offloading-without-checkpointing",
        SMP,
        ("task.parallelism.sm_activation_offloading=true", "task.parallelism.activation_checkpointing=none"),
    ),
    (
        "smddp-with-tensor-parallelism",
        SMP,
        (
            {
                "task.parallelism": {
                    "strategy": "smp",
                    "collectives": "smddp",
                    "tensor_parallel_degree": 2,
                    "hybrid_shard_degree": 1,
                }
            },
        ),
    ),
    (
        "smp-fp8-tokens-not-divisible",
        SMP,
        ("task.parallelism.fp8=true", "task.micro_batch_size=1", "task.data.seq_length=63"),
    ),
    (
        "sequence-not-divisible-by-context",
        SMP,
        ("task.parallelism.context_parallel_degree=2", "task.data.seq_length=63"),
    ),
    ("nxd-micro-batch-not-one", NXD, ("task.micro_batch_size=2",)),
    ("compile-unsupported", NXD, ("task.precision.compile=true",)),
    ("sample-unsupported", NXD, ("task.logging.sample_prompt=hello", "task.parallelism.pipeline_parallel_degree=2")),
    ("strategy-in-maintenance", NXD, LLAMA_3),
    ("nxd-tensor-degree-crosses-nodes", NXD, ("task.parallelism.tensor_parallel_degree=64",)),
    ("nxd-virtual-stages-unsupported", NXD, ("task.parallelism.virtual_pipeline_degree=2",)),
    ("nxd-sequence-not-divisible", NXD, ("task.data.seq_length=1001",)),
    ("nxd-sequence-not-for-flash-attention", NXD, ("task.data.seq_length=1024",)),
    ("nxd-master-not-fp32", NXD, ("task.precision.compute=bf16", "task.precision.master=bf16")),
    ("moments-unsupported", NXD, ("task.precision.moments=bf16",)),
    ("nxd-bf16-without-zero1", NXD, ("task.precision.compute=bf16", "task.parallelism.zero1=false")),
    ("nxd-layer-unsupported", NXD, (*LLAMA_3, "task.model.config.attention_bias=true")),
    ("degrees-do-not-divide-world-size", NXD, ("task.parallelism.tensor_parallel_degree=3",)),
    ("precompile-needs-nxd", PRECOMPILE, ()),
    # other tasks
    ("tokenizer-given-twice", PREPARE, ("task.tokenizer=x", "task.train_tokenizer.vocab_size=300")),
    ("fetch-source-invalid", FETCH, ("task.source=s3://bucket/x",)),
    ("register-model-not-in-s3", REGISTER, ("task.model=folder",)),
    ("register-group-name-invalid", REGISTER, ("task.group=a_b",)),
    ("register-image-invalid", REGISTER, ("task.image_uri=a b",)),
    ("program-entry-invalid", SCRIPT, ("task.entry=train",)),
    ("program-source-is-an-archive", SCRIPT, ("task.source=program.tar.gz",)),
    ("program-folder-not-relative", SCRIPT, ("task.output_folder=/x",)),
    ("program-folders-equal", SCRIPT, ("task.output_folder=x", "task.checkpoint_folder=x")),
    ("program-checkpoints-inside-output", SCRIPT, ("task.output_folder=x", "task.checkpoint_folder=x/y")),
    ("program-output-inside-checkpoints", SCRIPT, ("task.output_folder=x/y", "task.checkpoint_folder=x")),
    (
        "program-degree-without-effect",
        SCRIPT,
        ({"task.parallelism": {"strategy": "fsdp", "tensor_parallel_degree": 2}},),
    ),
    ("input-name-invalid", SCRIPT, ({"inputs": {"../x": "s3://bucket/x"}},)),
    ("args-style-without-effect", SCRIPT, ({"task.args": ["a"], "task.args_style": "file"},)),
    ("text-holds-nul", SCRIPT, ({"task.args": ["a\0"]},)),
    ("text-not-unicode", SCRIPT, ({"environment": {"A": "\ud800"}},)),
    ("argument-too-long", SCRIPT, ({"task.args": ["a" * 140_000]},)),
    ("argument-not-json", SCRIPT, ({"task.args": {"a": float("inf")}},)),
    ("argument-name-is-a-number", SCRIPT, ({"task.args": {"0": "a"}},)),
    ("argument-name-invalid", SCRIPT, ({"task.args": {"a b": "a"}},)),
    ("argument-name-with-hyphens", SCRIPT, ({"task.args": {"--a": "a"}},)),
    ("argument-nested", SCRIPT, ({"task.args": {"a": {"b": 1}}},)),
    ("argument-null-in-list", SCRIPT, ({"task.args": {"a": [1, None]}},)),
    ("placeholder-unknown", SCRIPT, ({"task.args": ["{outputt}"]},)),
    # classes and overrides
    ("key-unknown", {**TRAIN, "sed": 1}, ()),
    ("value-missing", {"name": "a", "task": {"kind": "fetch"}}, ()),
    ("value-type-invalid", TRAIN, ("task.max_steps=many",)),
    ("value-out-of-range", TRAIN, ("task.max_steps=0",)),
    ("value-form-invalid", TRAIN, ("storage_options.expected_bucket_owner=me",)),
    ("number-beyond-int64", TRAIN, (f"task.max_steps={2**64}",)),
    ("choice-missing", {"name": "a", "task": {}}, ()),
    ("choice-unknown", {"name": "a", "task": {"kind": "trian"}}, ()),
    ("override-malformed", TRAIN, ("task.max_steps",)),
    ("override-key-unknown", TRAIN, ("sed=1",)),
    ("override-step-unknown", FLOW, ("steps.trian.task.max_steps=3",)),
    ("override-key-in-no-step", FLOW, ("task.sed=1",)),
    ("override-ambiguous", FLOW, ("task.seq_length=1", "compute.instance_count=2", "environment.A=1", "task.kind=x")),
    ("override-inside-a-list", PREPARE, ("task.sources.0=b",)),
    ("override-of-steps-in-a-job", TRAIN, ("steps.a.task.max_steps=1",)),
    ("override-too-deep", TRAIN, ("a." * 100 + "b=1",)),
    ("override-type-invalid", TRAIN, (3,)),
    ("value-given-twice", TRAIN, ({"task": {"max_steps": 3}, "task.max_steps": 5},)),
    ("conversion-setting-without-effect", CONVERT, ("task.xser=false",)),
    ("secret-written-out", TRAIN, ("environment.HF=hf_" + "a" * 34,)),
    ("field-name-invalid", TRAIN, ({"task..x": 1},)),
    ("override-key-not-text", TRAIN, ({"task": {3: 4}},)),
    ("field-too-deep", TRAIN, ({"a." * 100 + "b": 1},)),
    ("specification-not-found", "no-such-recipe", ()),
]
"""Code, source, and overrides or fields."""
PLANNED: list[Case] = [
    ("folder-not-writable", TRAIN, ("storage=file.txt",)),
    ("source-read-twice", PREPARE, ("task.sources=[texts, texts/a.txt]",)),
    ("source-not-found", TRAIN, ("task.data.format=rows", "task.data.train=nowhere")),
    ("source-is-a-file", TRAIN, ("task.data.format=rows", "task.data.train=file.txt")),
    ("source-content-wrong", CONVERT, ()),
    ("source-unreadable", TRAIN, ("task.data.format=rows", "task.data.train=broken")),
    ("stream-dataset-local", STREAM, ("task.data.dataset=texts",)),
    ("stream-files-not-found", STREAM, ("task.data.dataset=json", "task.data.data_files=texts/*.json")),
    ("stream-files-empty", STREAM, ("task.data.dataset=json", "task.data.data_files=empty.txt")),
    (
        "stream-files-out-of-reach",
        {**ON_SAGEMAKER, "task": STREAM["task"]},
        ("task.data.dataset=json", "task.data.data_files=texts/*.json", "backend.max_run_seconds=3600"),
    ),
    ("sequence-longer-than-model", TRAIN, ("task.data.seq_length=100000",)),
    (
        "sequence-differs-from-rows",
        FLOW,
        ("steps.train.task.data.format=rows", "steps.train.task.data.train=steps.texts.output"),
    ),
    (
        "validation-step-without-rows",
        FLOW,
        (
            "steps.train.task.data.format=rows",
            "steps.train.task.data.seq_length=8",
            "steps.train.task.data.train=steps.texts.output",
            "steps.train.task.data.validation=steps.texts.output",
        ),
    ),
    (
        "vocabulary-exceeds-model",
        FLOW,
        (
            "steps.train.task.data.format=rows",
            "steps.train.task.data.seq_length=8",
            "steps.train.task.data.train=steps.texts.output",
            "steps.texts.task.train_tokenizer.vocab_size=40000",
        ),
    ),
    ("batch-larger-than-data", ON_ROWS, ("task.global_batch_size=4",)),
    ("rows-repeated", ON_ROWS, ("task.data.train=one",)),
    ("validation-on-training-rows", ON_ROWS, ("task.data.validation=rows", "task.validation.every_steps=1")),
    ("fp8-emulated", TRAIN, ("task.precision.compute=fp8",)),
    ("gpu-not-here", TRAIN, ("compute.gpu=H100",)),
    ("compute-format-unsupported-by-gpu", TRAIN, ("task.precision.compute=fp8", "compute.gpu=A100")),
    ("fp8-without-products", TRAIN, ("task.precision.compute=fp8", model("tiny", **ODD, intermediate_size=72))),
    ("fp8-in-part", TRAIN, ("task.precision.compute=fp8", model("tiny", intermediate_size=72))),
    ("bf16-emulated", TRAIN, ("task.precision.compute=bf16", "compute.gpu=V100")),
    ("gpu-without-effect", SCRIPT, ("compute.gpu=H100",)),
    ("gpu-not-in-table", TRAIN, ("compute.gpu=RTX 4090 24GB",)),
    ("gpu-unknown", TRAIN, ("compute.gpu=RTX 4090",)),
    ("gpu-memory-unknown", TRAIN, ("compute.gpu=A100 7GB",)),
    ("gpu-beside-instance-type", ON_SAGEMAKER, ("compute.gpu=H100",)),
    ("model-field-without-effect", TRAIN, ({"task.model.config": {"pretraining_tp": 4}},)),
    ("vocabulary-hardly-used", ON_ROWS, ()),
    ("checkpoints-after-the-end", TRAIN, ("task.checkpoint.every_steps=9",)),
    ("learning-rate-large", TRAIN, ("task.optim.learning_rate=0.5",)),
    ("warmup-spans-schedule", TRAIN, ("task.optim.warmup_steps=4",)),
    ("schedule-setting-without-effect", TRAIN, ("task.optim.decay_fraction=0.5",)),
    ("setting-without-effect", TRAIN, ("task.not_finite.limit=3",)),
    ("storage-option-without-effect", TRAIN, ("storage_options.kms_key_id=k",)),
    ("variable-without-effect", TRAIN, ("environment.OMP_NUM_THREADS=2", "backend.threads_per_process=1")),
    ("local-input-empty", SCRIPT, ("inputs.a=empty",)),
    ("local-input-is-file", SCRIPT, ("inputs.a=file.txt",)),
    ("input-mode-without-effect", SCRIPT, ({"inputs": {"a": {"uri": "s3://bucket/x", "mode": "File"}}},)),
    ("plateau-without-validation", TRAIN, ("task.optim.schedule=plateau",)),
    ("processes-idle", PREPARE, ("compute.processes_per_instance=2",)),
    ("random-tokens-paid", ON_SAGEMAKER, ()),
    ("shared-with-group-without-effect", TRAIN, ("storage=s3://bucket/x", "storage_options.shared_with_group=true")),
    ("tensor-degree-crosses-nodes", TRAIN, ("task.parallelism.tensor_parallel_degree=2", "compute.instance_count=2")),
    ("validation-without-rows", TRAIN, ("task.validation.every_steps=2",)),
]
"""The same, of what a plan finds beside ``folder``."""
TWO_NODES = {**ON_SAGEMAKER, "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 2}}
OF_MODELS: list[Case] = [
    ("model-family-unsupported", TRAIN, ({"task.model": {"preset": None, "path": "bert"}},)),
    ("experts-per-token-too-many", TRAIN, (model("mixtral-8x7b", num_experts_per_tok=9),)),
    ("neox-heads-do-not-divide-hidden-size", TRAIN, (model("gpt-neox-20b", num_attention_heads=7),)),
    ("rotary-channels-odd", TRAIN, (model("gpt-neox-20b", rotary_pct=0.27),)),
    ("smp-sliding-window-unsupported", SMP, (model("mistral-7b"), "task.parallelism.context_parallel_degree=2")),
]
OF_BACKENDS: list[Case] = [
    ("local-instance-type-without-effect", TRAIN, ("compute.instance_type=ml.p5.48xlarge",)),
    ("local-secret-of-kubernetes", TRAIN, ("secrets.A=k8s:a/b",)),
    (
        "local-input-not-mountable",
        SCRIPT,
        ({"inputs": {"a": {"file_system_id": "fs-01234567", "directory_path": "/a"}}},),
    ),
    ("volume-size-without-effect", ON_SAGEMAKER, ("backend.volume_size_gb=500",)),
    ("output-only-on-this-machine", ON_SAGEMAKER, ({"task.logging.sinks": {"tensorboard": {"folder": "x"}}},)),
    ("register-image-not-in-ecr", REGISTER, ()),
]
ALL = [*CASES, *PLANNED, *OF_MODELS, *OF_BACKENDS]
ELSEWHERE = {
    "yaml-invalid", "yaml-key-not-text", "yaml-key-repeated", "yaml-refers-to-itself", "yaml-tag-unsupported",
    "yaml-value-too-large", "value-too-large", "number-too-long", "specification-not-a-mapping",
    "specification-unreadable", "user-configuration-not-a-mapping", "user-configuration-unreadable", "recipe-unknown",
    "reference-unknown", "setting-of-no-backend",
}  # fmt: skip
"""Of files and of texts as such: tests/spec/test_yaml_text.py, test_sizes.py, test_load.py, test_defaults.py and
test_template.py."""
COVERED = ("spec/validation/", "spec/loading/", "spec/environment/", "spec/derive.py", "launcher/planning/checks.py",
           "launcher/planning/draft.py", "launcher/planning/source_contents.py",
           "launcher/planning/unread_settings.py")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases name on this machine."""
    root = tmp_path_factory.mktemp("cases")
    (root / "texts").mkdir()
    (root / "texts/a.txt").write_text("text")
    (root / "bert").mkdir()
    (root / "bert/config.json").write_text(json.dumps({"model_type": "bert"}))
    (root / "broken").mkdir()
    (root / "broken/tokenizer.json").write_text("{")
    (root / "broken/rows.json").write_text("{")
    (root / "program").mkdir()
    (root / "program/train.py").write_text("print()")
    for name, count in {"rows": 3, "one": 1}.items():
        with RowsWriter(root / name, 4, 8, (), 100) as writer:
            writer.write(np.arange(4 * count, dtype=np.int32).reshape(count, 4) % 8)
            writer.finish("train", padded=False)
    (root / "empty" / "below").mkdir(parents=True)
    (root / "empty.txt").write_text("")
    (root / "file.txt").write_text("x")
    return root


def found(source: Any, changes: tuple[Any, ...]) -> set[str]:
    """Codes of the errors, or of the warnings where there is none."""
    overrides = [it for it in changes if not isinstance(it, dict)]
    fields: Mapping[str, Any] = {name: value for it in changes if isinstance(it, dict) for name, value in it.items()}
    try:
        plans = plan(source, *overrides, **fields)
    except (SpecError, PlanError) as error:
        for issue in error.issues:
            json.dumps(issue.to_json(), allow_nan=False)
        return {issue.code for issue in error.issues}
    return {issue.code for it in plans for issue in it.issues}


@pytest.mark.parametrize(("code", "source", "changes"), ALL, ids=[it[0] for it in ALL])
def test_the_issue_is_found(
    code: str, source: Any, changes: tuple[Any, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert code in found(source, changes)


def test_every_code_of_a_specification_has_a_case() -> None:
    known = {it.code for it in codes() if it.module.startswith(COVERED)}
    listed = {it[0] for it in ALL} | ELSEWHERE
    assert sorted(known - listed) == []
    assert sorted(listed - {it.code for it in codes()}) == []


def test_a_reference_to_what_is_not_given_is_an_issue() -> None:
    job = load({**ON_ROWS, "inputs": {"rows": "s3://bucket/rows"}}, ["task.data.train=inputs.rows"]).spec
    assert isinstance(job, JobSpec)
    with pytest.raises(SpecError) as caught:
        resolve(job.model_copy(update={"inputs": {}}), {}, {})
    assert [(it.code, it.path) for it in caught.value.issues] == [("reference-unknown", "task.data.train")]


def test_a_setting_of_a_job_is_not_one_of_a_cluster() -> None:
    with pytest.raises(SpecError) as caught:
        backend_settings(LocalOptions, ["compute.instance_count=2"])
    assert [(it.code, it.path) for it in caught.value.issues] == [("setting-of-no-backend", "compute.instance_count")]
