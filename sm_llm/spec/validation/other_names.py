"""Names that other tools have for our fields: who types one of them is given ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_origin

from sm_llm.spec.schema import tag

if TYPE_CHECKING:
    from typing import Any

    from sm_llm.spec.base import SpecModel

OTHER_NAMES: dict[str, str] = {
    # Arguments of transformers, torchtitan, Lightning and the SageMaker SDK.
    "model.path": "model_name model_name_or_path model_id pretrained_model_name checkpoint_path",
    "model.config": "model_config config_overrides",
    "start.pretrained": "pretrained pretrained_model from_pretrained weights init_from",
    "start.checkpoint": "resume_from resume_from_checkpoint restore_from",
    "task.tokenizer": "tokenizer_name tokenizer_path vocab",
    "data.train": "dataset train_data train_dataset training_data data_path train_file dataset_path",
    "data.validation": "eval_data eval_dataset validation_data validation_file val test",
    "seq_length": "seq_len sequence_length max_seq_length max_seq_len max_length block_size context_length n_ctx",
    "task.micro_batch_size": (
        "batch_size per_device_train_batch_size per_device_batch_size local_batch_size train_micro_batch_size_per_gpu "
        "micro_batch"
    ),
    "task.global_batch_size": "train_batch_size total_batch_size effective_batch_size gradient_accumulation_steps",
    "task.max_steps": "steps num_steps train_steps training_steps max_train_steps total_steps iterations max_iters",
    "task.max_epochs": "epochs num_epochs num_train_epochs epoch",
    "task.max_tokens": "tokens num_tokens train_tokens total_tokens",
    "optim.learning_rate": "lr base_lr max_lr peak_lr rate",
    "optim.min_learning_rate": "min_lr end_lr lr_min",
    "optim.schedule": "scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay_style",
    "optim.warmup_fraction": "warmup_ratio",
    "optim.warmup_steps": "warmup num_warmup_steps lr_warmup_steps warmup_iters",
    "optim.max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clipping gradient_clip_val max_norm",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "epsilon adam_epsilon",
    "optim.weight_decay": "wd decay",
    "precision.compute": "dtype torch_dtype bf16 fp16 amp mixed_precision compute_dtype",
    "precision.compile": "torch_compile use_compile",
    "checkpoint.every_steps": "save_steps save_every save_interval checkpoint_interval save_freq",
    "checkpoint.keep_last": "save_total_limit keep_checkpoints max_checkpoints",
    "validation.every_steps": "eval_steps eval_every eval_interval eval_freq val_check_interval",
    "logging.every_steps": "logging_steps log_every log_interval log_freq log_every_n_steps",
    "logging.sinks": "report_to loggers trackers",
    "parallelism.tensor_parallel_degree": (
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_model_parallel_size"
    ),
    "parallelism.pipeline_parallel_degree": (
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size"
    ),
    "parallelism.context_parallel_degree": "cp cp_size cp_degree context_parallel context_parallel_size",
    "parallelism.activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing recompute",
    "compute.instance_type": "instance machine_type node_type",
    "compute.instance_count": "nodes num_nodes nnodes node_count num_instances instances",
    "compute.processes_per_instance": (
        "gpus num_gpus gpus_per_node nproc_per_node num_processes processes processes_per_node devices world_size"
    ),
    "backend.role": "role_arn iam_role execution_role",
    "backend.region": "aws_region region_name",
    "backend.bucket": "default_bucket s3_bucket",
    "backend.image_uri": "docker_image container training_image",
    "backend.max_run_seconds": "max_run max_runtime max_run_time timeout time_limit",
    "backend.max_wait_seconds": "max_wait",
    "backend.spot": "use_spot use_spot_instances",
    "backend.volume_size_gb": "volume_size disk_size",
    "backend.volume_kms_key_id": "volume_kms_key",
    "backend.output_kms_key_id": "output_kms_key",
    "backend.remote_debug": "enable_remote_debug",
    "backend.training_plan_arn": "training_plan",
    "backend.vpc.subnets": "subnet subnet_id subnet_ids",
    "backend.vpc.security_group_ids": "security_groups security_group security_group_id",
    "storage": "output output_dir output_path save_dir checkpoint_dir checkpoint_s3_uri run_dir",
    "environment": "env environment_variables env_vars",
    "task.entry": "entry_point script main program entrypoint",
    "task.source": "source_dir code_dir code src",
    "task.args": "arguments argv hyperparameters parameters script_args",
}
"""The end of a field's path -> the names, as words of one text."""

_ENDS = {name: end for end, names in OTHER_NAMES.items() for name in names.split()}
# Keys that choose one of several classes, here or in other tools.
_OF_CHOICES = frozenset({"kind", "type", "name", "format", "strategy", "class", "engine"})


def other_field(key: str) -> str | None:
    """The end of the path of the field that other tools call ``key``."""
    # Command lines of other tools write hyphens where their files have underscores.
    return _ENDS.get(key.lower().replace("-", "_"))


def choosing_key(annotation: Any, block: type[SpecModel] | None, key: str) -> str | None:
    """The key that chooses what stands at a place (``backend.name``), where another such word was typed."""
    if key.lower() not in _OF_CHOICES:
        return None
    if (own := tag(annotation)) is not None:
        return own if own != key else None
    # Where no class is chosen, a field of fixed choices is what such a word means: optim.name, not the name of a job.
    fields = block.model_fields if block is not None else {}
    return next((it for it in fields if it in _OF_CHOICES and get_origin(fields[it].annotation) is Literal), None)
