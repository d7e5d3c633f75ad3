"""Settings that another one makes useless are warned of by name, and every setting has been judged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning.checks import check_compute_format
from sm_llm.launcher.planning.draft import Draft
from sm_llm.launcher.planning.unread_settings import (
    OF_FETCHES,
    OF_MODELS,
    OF_PREPARATIONS,
    OF_S3,
    OF_SCHEDULES,
    OF_TRAININGS,
    OF_VARIABLES,
    check_unread_settings,
)
from sm_llm.models.families.table import FAMILIES, known_family
from sm_llm.spec.inputs import StorageOptions
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.load import load
from sm_llm.spec.schema import blocks
from sm_llm.spec.tasks import FetchTask, PrepareTask, TrainTask
from sm_llm.spec.training import OptimSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sm_llm.spec.base import SpecModel

CODE = "-without-effect"
JOB: dict[str, Any] = {
    "name": "tiny",
    "task": {
        "kind": "train", "model": {"preset": "tiny"}, "max_steps": 20, "micro_batch_size": 1,
        "data": {"format": "synthetic", "seq_length": 64, "rows": 64},
    },
    "compute": {"processes_per_instance": 1},
}  # fmt: skip
STREAM = "data={format: stream, dataset: json, data_files: 'https://h/x.json', seq_length: 64"
TOKENIZER = "tokenizer=hf://a/b"
ON_P4D = [
    "compute.instance_type=ml.p4d.24xlarge", "compute.processes_per_instance=null", "storage=s3://bucket/x",
    "backend.name=sagemaker", "backend.role=arn:aws:iam::123456789012:role/x", "backend.region=us-east-1",
    "micro_batch_size=8", "global_batch_size=64", "backend.max_run_seconds=3600",
]  # fmt: skip
CPU = "environment.CUDA_VISIBLE_DEVICES="
CASES = {
    "logging.sample_prompt": (["logging.sample_prompt=hello"], []),
    "logging.sample_tokens": (["logging.sample_tokens=5"], ["logging.sample_prompt=a"]),
    "logging.profile.every_steps": (["logging.profile={every_steps: 21}"], ["logging.profile.every_steps=20"]),
    "logging.profile.all_processes": (
        ["logging.profile={every_steps: 2, all_processes: true}"],
        ["compute.processes_per_instance=2"],
    ),
    "precision.moments": (["precision={compute: bf16, master: bf16, moments: bf16}"], ["precision.master=fp32"]),
    "parallelism.activation_checkpointing": (
        ["parallelism.activation_checkpointing=budget"],
        ["precision.compile=true"],
    ),
    "precision.reduce": (["precision.reduce=bf16"], ["compute.processes_per_instance=2"]),
    "data.shuffle_buffer": ([f"{STREAM}, shuffle: false, shuffle_buffer: 9}}", TOKENIZER], []),
    "data.validation_rows": ([f"{STREAM}, validation_rows: 9}}", TOKENIZER], []),
    "data.config_name": ([f"{STREAM}, config_name: en}}", TOKENIZER], []),
    "parallelism.activation_loading_horizon": (
        ["parallelism={strategy: smp, activation_loading_horizon: 3}", *ON_P4D],
        ["parallelism.sm_activation_offloading=true"],
    ),
    "parallelism.random_seed": (
        ["parallelism={strategy: smp, random_seed: 3}", *ON_P4D],
        ["parallelism.tensor_parallel_degree=2"],
    ),
    "validation.max_rows": (["validation.max_rows=3"], ["data.validation_rows=4"]),
    "checkpoint.keep_every_steps": (
        ["checkpoint.every_steps=5", "checkpoint.keep_every_steps=7"],
        ["checkpoint.keep_every_steps=10"],
    ),
    "watchdog.stall_factor": (["watchdog.enabled=false", "watchdog.stall_factor=3"], ["watchdog.enabled=true"]),
    "watchdog.stall_seconds": (["watchdog.enabled=false", "watchdog.stall_seconds=3"], ["watchdog.enabled=true"]),
    "watchdog.start_seconds": (["watchdog.enabled=false", "watchdog.start_seconds=3"], ["watchdog.enabled=true"]),
    "not_finite.limit": (["not_finite.limit=3"], ["not_finite.policy=skip"]),
    "optim.decay_embeddings": (
        ["optim.weight_decay=0", "optim.decay_embeddings=false"],
        ["optim.weight_decay=0.1"],
    ),
    "optim.schedule_steps": (
        ["optim.schedule=constant", "optim.schedule_steps=9"],
        ["optim.warmup_fraction=0.1"],
    ),
    "precision.compiled_graphs": (
        ["precision.compile=false", "precision.compiled_graphs=scratch"],
        ["precision.compile=true"],
    ),
    "parallelism.sharding": (
        ["parallelism.sharding=hybrid", "compute.processes_per_instance=2", "micro_batch_size=1"],
        ["compute.instance_count=2"],
    ),
    "parallelism.offload_optimizer": (["parallelism.offload_optimizer=true", CPU], [f"{CPU}0"]),
    "parallelism.offload_activations": (["parallelism.offload_activations=true", CPU], [f"{CPU}0"]),
    "parallelism.async_tensor_parallel": (
        [
            "parallelism={async_tensor_parallel: true, tensor_parallel_degree: 2}",
            "precision.compile=true",
            "compute.processes_per_instance=2",
            CPU,
        ],
        [f"{CPU}0,1"],
    ),
    "parallelism.copy_engine_collectives": (
        ["parallelism.copy_engine_collectives=false", "compute.processes_per_instance=2", CPU],
        [f"{CPU}0,1"],
    ),
    "parallelism.share_gradient_memory": (["parallelism.share_gradient_memory=true", CPU], [f"{CPU}0"]),
    "parallelism.sequence_parallel": (
        ["parallelism.sequence_parallel=false"],
        ["parallelism.tensor_parallel_degree=2", "compute.processes_per_instance=2"],
    ),
    "parallelism.reshard_after_forward": (
        ["parallelism.reshard_after_forward=false"],
        ["parallelism.sharding=none", "compute.processes_per_instance=2"],
    ),
    "model.config.dtype": (["model.config.dtype=float16"], []),
    "model.config.torch_dtype": (["model.config.torch_dtype=float16"], []),
}
"""Path -> changes that leave it without an effect, and further ones with which it has one."""
JUDGED: dict[str, str] = {
    "JobSpec": ("name task compute backend storage storage_options inputs environment secrets"),
    "TrainTask": (
        "kind model tokenizer data parallelism micro_batch_size global_batch_size max_steps max_tokens "
        "max_epochs optim precision validation checkpoint logging not_finite watchdog start seed "
        "deterministic"
    ),
    "ModelSpec": ("preset path config"),
    "RowsData": ("seq_length shuffle format train validation"),
    "JsonRowsData": ("seq_length shuffle format train validation"),
    "SyntheticData": ("seq_length shuffle format rows"),
    "StreamData": ("seq_length shuffle format dataset data_files split validation_split text_field"),
    "FsdpSpec": (
        "strategy hybrid_shard_degree tensor_parallel_degree context_parallel_degree "
        "activation_memory_budget checkpoint_every_layers"
    ),
    "SmpSpec": (
        "strategy hybrid_shard_degree tensor_parallel_degree context_parallel_degree "
        "expert_parallel_degree sm_activation_offloading "
        "delayed_parameter_initialization fp8 collectives fsdp_cache_flush_warnings allow_empty_shards"
    ),
    "NxdSpec": (
        "strategy tensor_parallel_degree pipeline_parallel_degree virtual_pipeline_degree "
        "kv_size_multiplier zero1 fuse_qkv flash_attention "
        "meta_device_initialization result compile_cache"
    ),
    "OptimSpec": ("name learning_rate betas eps weight_decay max_grad_norm schedule warmup_steps warmup_fraction"),
    "PrecisionSpec": ("compute master compile"),
    "ValidationSpec": ("every_steps"),
    "CheckpointSpec": ("every_steps keep_last async_save max_blocking_seconds max_unpublished_seconds verify_state"),
    "LoggingSpec": ("every_steps profile sinks"),
    "ProfileSpec": ("steps"),
    "TrackersSpec": ("tensorboard mlflow wandb"),
    "TensorBoardSpec": ("folder"),
    "MlflowSpec": ("tracking_uri experiment"),
    "WandbSpec": ("project entity mode"),
    "NotFiniteSpec": ("policy"),
    "WatchdogSpec": ("enabled"),
    "PretrainedStart": ("pretrained"),
    "CheckpointStart": ("checkpoint allow_other_data"),
    "PrepareTask": (
        "kind sources tokenizer train_tokenizer seq_length validation_fraction columns tail rows_per_shard"
    ),
    "TrainTokenizer": ("vocab_size end_token max_bytes"),
    "FetchTask": ("kind source include exclude"),
    "ConvertTask": (
        "kind source to tensor_parallel_degree pipeline_parallel_degree virtual_pipeline_degree "
        "kv_size_multiplier qkv layout xser config verify"
    ),
    "RegisterTask": ("kind model group image_uri"),
    "PrecompileTask": ("kind training extract_steps stall_seconds"),
    "ScriptTask": ("kind entry source args args_style parallelism output_folder checkpoint_folder"),
    "ComputeSpec": ("instance_type instance_count processes_per_instance gpu"),
    "LocalOptions": ("name contract threads_per_process stop_seconds"),
    "SageMakerOptions": (
        "name role region bucket image image_version image_uri wheelhouse vpc "
        "encrypt_inter_container_traffic output_kms_key_id volume_kms_key_id volume_size_gb "
        "max_run_seconds spot max_wait_seconds keep_alive_period_in_seconds training_plan_arn "
        "max_retry_attempts instance_groups base_job_name tags metric_definitions remote_debug"
    ),
    "VpcSpec": ("subnets security_group_ids"),
    "SlurmOptions": (
        "name shared_folder ssh_host partition account qos reservation constraint exclusive "
        "cpus_per_node gpus_per_node time_limit_minutes signal_seconds retry max_requeues stop_seconds "
        "container_image container_mounts virtual_environment scratch_folder"
    ),
    "KubeflowOptions": (
        "name image context namespace resource image_pull_secrets service_account node_selector "
        "instance_label node_health tolerations accelerators_per_pod accelerator_resource efa_per_pod "
        "cpus_per_pod memory_gib_per_pod shared_memory_gib volumes node_folder queue priority topology "
        "topology_mode retry max_restarts min_pods min_pods_wait_seconds hang_minutes first_step_minutes "
        "time_limit_minutes keep_minutes stop_seconds"
    ),
    "StorageOptions": ("shared_with_group"),
    "WorkflowSpec": ("name steps compute backend storage storage_options environment secrets"),
}
"""Class -> its fields that are read whatever the others are, or whose combinations another checker refuses or names."""
READ_OF_MODELS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act initializer_range "
    "tie_word_embeddings attention_dropout num_key_value_heads head_dim rms_norm_eps max_position_embeddings "
    "attention_bias mlp_bias num_experts_per_tok num_local_experts router_jitter_noise layer_norm_eps rotary_pct "
    "hidden_dropout use_parallel_residual use_sliding_window layer_types"
)
"""Fields of configs that training reads, or that are refused where it does not."""
OF_RESULTS = {"use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
"""Fields that are for who uses the result, which holds them."""


def typed(changes: list[str]) -> list[str]:
    others = ("compute.", "backend.", "storage", "environment.")
    return [it if it.startswith(others) else f"task.{it}" for it in changes]


def found(*changes: str, job: dict[str, Any] = JOB) -> dict[str, str]:
    (made,) = plan(job, *changes)
    return {it.path: it.message for it in made.issues if it.code.endswith(CODE)}


@pytest.mark.parametrize("path", OF_TRAININGS)
def test_a_setting_that_nothing_reads_is_warned_of_until_something_does(path: str) -> None:
    without, enough = CASES[path]
    assert f"task.{path}" in found(*typed(without))
    if enough:
        both = {it.partition("=")[0]: it for it in (*without, *enough)}
        assert f"task.{path}" not in found(*typed(list(both.values())))


def test_12f_every_field_of_a_config_is_read_or_warned_of() -> None:
    for kind in map(known_family, FAMILIES):
        assert kind is not None
        for name in kind.fields:
            windowed = (kind.model_type, name) in {("mistral", "sliding_window"), ("mixtral", "sliding_window")}
            known = name in {*READ_OF_MODELS.split(), *OF_RESULTS} or windowed
            assert known is not ((kind.model_type, name) in OF_MODELS), (kind.model_type, name)


@pytest.mark.parametrize(("kind", "name"), OF_MODELS)
def test_12f_a_field_of_a_config_that_no_training_reads_is_warned_of(kind: str, name: str, tmp_path: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    own = known_family(kind)
    assert own is not None
    field = own.fields[name]
    other = not field.default if isinstance(field.default, bool) else (field.default or 0) + 3
    job = {**JOB, "task": {**JOB["task"], "model": {"path": str(tmp_path)}}}
    assert set(found(f"task.model.config.{name}={str(other).lower()}", job=job)) == {f"task.model.config.{name}"}
    assert not found(f"task.model.config.{name}={str(field.default).lower()}", job=job)
    assert not found(job=job)


def of_file(folder: Any, kind: str, **more: Any) -> list[str]:
    """The messages of a plan of a model whose config.json has ``more`` fields."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "vocab_size": 64}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
    (made,) = plan({**JOB, "task": {**JOB["task"], "model": {"path": str(folder)}}})
    return [f"{it.path}: {it.message}" for it in made.issues if it.code.endswith(CODE)]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("mixtral", "output_router_logits", True), ("mixtral", "router_aux_loss_coef", 0.02), ("llama", "qk_norm", True),
     ("llama", "num_experts", 8), ("llama", "pretraining_tp", 2)],
)  # fmt: skip
def test_C7_a_field_without_effect_in_a_file_is_warned_of(tmp_path: Any, kind: str, name: str, value: Any) -> None:
    (message,) = of_file(tmp_path, kind, num_key_value_heads=2, **{name: value})
    assert message.startswith(f"task.model.path: its {name} has no effect")


def test_C7_what_transformers_writes_into_every_config_is_not_warned_of(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    for kind in FAMILIES:
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
                 "intermediate_size": 64, "vocab_size": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
                 "head_dim": 32}  # fmt: skip
        if kind == "gpt_neox":
            sizes = {name: it for name, it in sizes.items() if name not in ("num_key_value_heads", "head_dim")}
        written = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
        own = {name: it for name, it in written.items() if name not in ("model_type", "hidden_size", *sizes)}
        given = {name: it for name, it in sizes.items() if name in ("num_key_value_heads", "head_dim")}
        assert of_file(tmp_path, kind, **{**given, **own, "architectures": None, "dtype": "float32"}) == [], kind


@pytest.mark.parametrize("value", ["true", "false"])
def test_one_process_gathers_no_parameters(value: str) -> None:
    path = "task.parallelism.reshard_after_forward"
    given = f"{path}={value}"
    assert "one process holds all parameters" in found(given)[path]
    assert path not in found(given, "compute.processes_per_instance=2")
    assert path not in found(given, "compute.instance_count=2")
    # FSDP brings the masters of one process from host memory.
    assert path not in found(given, "task.parallelism.offload_optimizer=true", f"{CPU}0")


@pytest.mark.parametrize(
    ("changes", "has_effect"),
    [
        ([CPU], False),
        ([CPU, "precision.compile=true"], True),
        # A worker on this GPU decides.
        ([f"{CPU}0"], True),
        ([f"{CPU}0", "parallelism.tensor_parallel_degree=2", "compute.processes_per_instance=2"], False),
        ([f"{CPU}0", "compute.gpu=H100"], False),
        ([f"{CPU}0", "compute.gpu=H100", "max_steps=100000000"], True),
        ([*ON_P4D, "parallelism={strategy: smp}"], False),
    ],
    ids=["cpu", "cpu, asked for", "gpu", "tensor parallel", "short", "long", "smp"],
)
def test_compiled_graphs_are_kept_where_layers_may_be_compiled(changes: list[str], has_effect: bool) -> None:
    path = "task.precision.compiled_graphs"
    assert (path not in found(f"{path}=storage", *typed(changes))) is has_effect


def test_12f_a_gpu_is_for_the_estimate_of_a_training() -> None:
    script = {"name": "s", "task": {"kind": "script", "entry": "-m json"}}
    assert set(found("compute.gpu=h100", job=script)) == {"compute.gpu"}
    assert not found("compute.gpu=h100")


def test_12f_a_cpu_only_emulates_fp8() -> None:
    fp8 = ["task.precision.compute=fp8", "task.data.seq_length=64"]
    job = load(JOB, [*fp8, CPU]).spec
    assert isinstance(job, JobSpec)
    assert [it.code for it in check_compute_format(Draft(job, {}))] == ["fp8-emulated"]
    job = load(JOB, [*fp8, *typed(ON_P4D)]).spec
    assert isinstance(job, JobSpec)
    assert [it.code for it in check_compute_format(Draft(job, {}))] == ["compute-format-unsupported-by-gpu"]


def test_defaults_are_not_warned_of() -> None:
    assert not found()
    assert not found("task.optim.weight_decay=0", "task.watchdog.enabled=false", "task.parallelism.sharding=none")


def test_a_plateau_without_validation_never_falls() -> None:
    (made,) = plan(JOB, "task.optim.schedule=plateau")
    assert "the rate never falls" in "".join(made.warnings)
    (made,) = plan(JOB, "task.optim.schedule=plateau", "task.data.validation_rows=4")
    assert "the rate never falls" not in "".join(made.warnings)


def test_threads_of_two_kinds_are_warned_of() -> None:
    assert "backend.threads_per_process" in found("backend.threads_per_process=2", "environment.OMP_NUM_THREADS=9")
    assert not found("backend.threads_per_process=2")


def test_a_seed_that_chooses_nothing_is_warned_of(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("text " * 99)
    job = {"name": "p", "task": {"kind": "prepare", "sources": [str(tmp_path / "a.txt")], "seq_length": 8, "seed": 3}}
    assert set(found(job=job)) == {"task.seed"}
    assert not found("task.validation_fraction=0.5", job=job)


def test_12e_a_field_of_text_that_no_source_has_is_warned_of(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("text")
    task = {"kind": "prepare", "sources": [str(tmp_path)], "seq_length": 8, "text_field": "body"}
    assert set(found(job={"name": "p", "task": task})) == {"task.text_field"}
    assert set(found("task.sources=[s3://bucket/a.txt]", job={"name": "p", "task": task})) == {"task.text_field"}
    assert not found("task.sources=[s3://bucket/a]", job={"name": "p", "task": task})
    (tmp_path / "b.jsonl").write_text('{"body": "text"}')
    assert not found(job={"name": "p", "task": task})


def test_12e_options_of_S3_for_a_job_without_S3_are_warned_of() -> None:
    values = {"endpoint_url": "http://h:1", "region": "us-east-1", "expected_bucket_owner": "'111122223333'",
              "kms_key_id": "k", "storage_class": "STANDARD"}  # fmt: skip
    assert set(values) == set(OF_S3)
    changes = [f"storage_options.{name}={value}" for name, value in values.items()]
    assert set(found(*changes)) == {f"storage_options.{name}" for name in OF_S3}
    assert not found(*changes, "storage=s3://bucket/x")
    reads = found(*changes, "task.data={format: rows, train: s3://bucket/rows, seq_length: 64}")
    assert set(reads) == {"storage_options.kms_key_id", "storage_options.storage_class"}


def test_12e_options_of_S3_by_the_users_defaults_are_as_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_LLM_ENDPOINT_URL", "http://h:1")
    assert not found()


def test_12e_a_mode_of_inputs_is_for_a_platform_that_mounts_them() -> None:
    rows = "task.data={format: rows, train: inputs.a, seq_length: 64}"
    assert "inputs.a.mode" in found(rows, "inputs.a={uri: 's3://bucket/rows', mode: File}")


@pytest.mark.parametrize("variable", OF_VARIABLES)
def test_12e_a_variable_beside_a_setting_of_the_same_is_warned_of(variable: str) -> None:
    path, variable_counts = OF_VARIABLES[variable]
    sinks = "task.logging.sinks={mlflow: {tracking_uri: 'http://h'}, wandb: {project: p, entity: e, mode: offline}}"
    setting = "backend.threads_per_process=2" if path.startswith("backend") else sinks
    job = load(JOB, [setting, f"environment.{variable}=1"]).spec
    assert isinstance(job, JobSpec)
    # Not by a plan, which refuses trackers that are not installed.
    warned = {it.path: it.message for it in check_unread_settings(Draft(job, {})) if it.code.endswith(CODE)}
    assert warned[path if variable_counts else f"environment.{variable}"].endswith("is given, which counts")


def test_12e_machines_of_a_workflow_whose_steps_have_their_own_are_warned_of() -> None:
    step = {"task": JOB["task"], "compute": {"processes_per_instance": 1}}
    flow: dict[str, Any] = {"name": "flow", "steps": {"one": step}, "compute": {"instance_count": 2}}
    assert "compute" in found(job=flow)
    assert not found(job={**flow, "steps": {"one": {"task": JOB["task"]}}})


def blocks_below(kind: type[SpecModel], seen: set[type[SpecModel]]) -> Iterator[type[SpecModel]]:
    if kind not in seen:
        seen.add(kind)
        yield kind
        for field in kind.model_fields.values():
            for inner in blocks(field.annotation):
                yield from blocks_below(inner, seen)


def holders(kind: type[SpecModel], path: list[str]) -> set[tuple[str, str]]:
    """Class and name of the fields that a path below ``kind`` may mean."""
    if path[0] not in kind.model_fields:
        return set()
    if len(path) == 1:
        return {(kind.__name__, path[0])}
    inner = blocks(kind.model_fields[path[0]].annotation)
    return set().union(*(holders(it, path[1:]) for it in inner))


def test_12e_every_field_of_the_specification_was_judged() -> None:
    """Whoever adds one decides whether another can make it useless, or which checker refuses it then."""
    tables: list[tuple[type[SpecModel], Iterable[str]]] = [
        (TrainTask, OF_TRAININGS), (PrepareTask, OF_PREPARATIONS), (FetchTask, OF_FETCHES), (StorageOptions, OF_S3),
        (OptimSpec, OF_SCHEDULES),
    ]  # fmt: skip
    known = {(name, field) for name, fields in JUDGED.items() for field in fields.split()}
    tabled = {it for kind, paths in tables for path in paths for it in holders(kind, path.split("."))}
    seen: set[type[SpecModel]] = set()
    kinds = [*blocks_below(JobSpec, seen), *blocks_below(WorkflowSpec, seen)]
    fields = {(kind.__name__, name) for kind in kinds for name in kind.model_fields}
    assert known | tabled == fields
    assert not known & tabled
