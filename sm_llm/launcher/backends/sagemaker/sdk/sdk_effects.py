"""The allow-list of estimator arguments: what each argument of the SDK's ``PyTorch`` does to a job.

An argument that is not listed is refused, so an argument that a later SDK adds has no silent effect.
``docs/sagemaker.md`` shows this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["field", "passed", "refused"]


@dataclass(frozen=True)
class Effect:
    """The effect of one argument.

    ``field``: changes the field of the specification at ``target``, and is checked with it. ``passed``: goes into the
    request as given, at ``target``. ``refused``: ``target`` names what to write instead.
    """

    kind: Kind
    target: str
    reason: str = ""
    variable: bool = False
    """Whether a pipeline variable may stand for the value."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused argument that ask for what the job does anyway; they are accepted."""

    @property
    def text(self) -> str:
        """The effect in words."""
        if self.kind == "field":
            return f"sets `{self.target}`"
        if self.kind == "passed":
            return self.target
        accepted = ", ".join(f"`{value!r}`" for value in self.neutral)
        only = f" (only {accepted} is accepted)" if accepted else ""
        return f"refused{only}: {self.reason}. {self.target}"


def _field(path: str, *, variable: bool = False) -> Effect:
    return Effect("field", path, variable=variable)


def _passed(target: str, *, variable: bool = False) -> Effect:
    return Effect("passed", target, variable=variable)


def _refused(reason: str, instead: str, *neutral: Any) -> Effect:
    return Effect("refused", instead, reason, neutral=neutral)


_NO_EFFECT = "has no effect: the job runs the bundle that follows from the specification"
_DECIDED = "follows from the specification"
_PUBLISHES = "the worker publishes checkpoints itself, so SageMaker would copy an empty folder"
_DEBUGGER = "SageMaker Debugger needs a hook library that the images do not hold"
_CONTAINER = "bypasses the training toolkit and the code bundle"
_REGISTRY = "SageMaker jobs of this package run images of ECR, which need no credentials"

EFFECTS: dict[str, Effect] = {
    "base_job_name": _field("backend.base_job_name"),
    "checkpoint_local_path": _refused(_PUBLISHES, "Give storage; a script task names task.checkpoint_folder"),
    "checkpoint_s3_uri": _refused(_PUBLISHES, "Give storage; a script task names task.checkpoint_folder"),
    "code_location": _refused(_NO_EFFECT, "Give backend.bucket"),
    "compiler_config": _refused("SageMaker Training Compiler has no images for current PyTorch", "Give "
                                "task.precision.compile"),
    "container_arguments": _refused(_CONTAINER, "Give a script task its task.args"),
    "container_entry_point": _refused(_CONTAINER, "Give a script task its task.entry"),
    "container_log_level": _passed("goes into the request: log level of the training toolkit"),
    "debugger_hook_config": _refused(_DEBUGGER, "Use task.logging and its trackers", False),
    "dependencies": _refused(_NO_EFFECT, "Put folders into task.source, and packages into a requirements.txt in its "
                             "root", []),
    "disable_output_compression": _refused("the job stores nothing that compression would help", "Leave it out", True),
    "disable_profiler": _refused("the profiler of SageMaker is off", "Use task.logging.profile", True),
    "distribution": _refused(_DECIDED, "Give task.parallelism and compute; sm_llm.distribution() shows what it is"),
    "enable_infra_check": _passed("goes into the request: InfraCheckConfig", variable=True),
    "enable_network_isolation": _refused("a job without network cannot read or publish anything in S3", "Leave it out",
                                         False),
    "enable_remote_debug": _field("backend.remote_debug", variable=True),
    "enable_sagemaker_metrics": _passed("goes into the request: EnableSageMakerMetricsTimeSeries", variable=True),
    "enable_session_tag_chaining": _passed("goes into the request: SessionChainingConfig", variable=True),
    "encrypt_inter_container_traffic": _field("backend.encrypt_inter_container_traffic", variable=True),
    "entry_point": _refused(_NO_EFFECT, "Give a script task its task.entry"),
    "environment": _field("environment", variable=True),
    "framework_version": _refused(_DECIDED, "Give backend.image_version"),
    "git_config": _refused(_NO_EFFECT, "Clone it, and give the folder as task.source"),
    "hyperparameters": _passed("overrides of the specification by dotted path, checked when given; a script's own "
                               "arguments are task.args", variable=True),
    "image_uri": _field("backend.image_uri"),
    "input_mode": _refused("would change the mode of every channel, that of job.json included", "Give an input its own "
                           "mode: inputs.NAME.mode", "File"),
    "instance_count": _field("compute.instance_count"),
    "instance_groups": _field("backend.instance_groups"),
    "instance_placement_config": _passed("goes into the request: ResourceConfig.InstancePlacementConfig"),
    "instance_type": _field("compute.instance_type"),
    "keep_alive_period_in_seconds": _field("backend.keep_alive_period_in_seconds", variable=True),
    "max_retry_attempts": _field("backend.max_retry_attempts", variable=True),
    "max_run": _field("backend.max_run_seconds"),
    "max_wait": _field("backend.max_wait_seconds", variable=True),
    "metric_definitions": _passed("are added to those of the training line; the same name replaces"),
    "model_channel_name": _refused("no task reads such a channel", "Name the model as an input: inputs.NAME"),
    "model_uri": _refused("no task reads such a channel", "Give task.start.pretrained, or a script task inputs.NAME"),
    "output_kms_key": _field("backend.output_kms_key_id", variable=True),
    "output_path": _refused(_DECIDED, "Give storage: all of a run lies below its folder there"),
    "profiler_config": _refused("the profiler of SageMaker is off", "Use task.logging.profile"),
    "py_version": _refused(_DECIDED, "Give backend.image_version"),
    "recipe_overrides": _refused(_DECIDED, "Give the task"),
    "role": _field("backend.role", variable=True),
    "rules": _refused(_DEBUGGER, "Use task.watchdog and task.not_finite", []),
    "sagemaker_session": _passed("makes the calls; its telemetry is switched off"),
    "security_group_ids": _field("backend.vpc.security_group_ids", variable=True),
    "source_dir": _refused(_NO_EFFECT, "Give a script task its task.source"),
    "subnets": _field("backend.vpc.subnets", variable=True),
    "tags": _field("backend.tags", variable=True),
    "tensorboard_output_config": _refused("the job writes TensorBoard's files itself", "Use "
                                          "task.logging.sinks.tensorboard"),
    "training_plan": _field("backend.training_plan_arn", variable=True),
    "training_recipe": _refused(_DECIDED, "Give the task"),
    "training_repository_access_mode": _refused(_REGISTRY, "Leave it out", "Platform"),
    "training_repository_credentials_provider_arn": _refused(_REGISTRY, "Leave it out"),
    "use_spot_instances": _field("backend.spot"),
    "volume_kms_key": _field("backend.volume_kms_key_id", variable=True),
    "volume_size": _field("backend.volume_size_gb", variable=True),
}  # fmt: skip
"""Every argument of ``sagemaker.pytorch.PyTorch`` of version 2.257."""

_NO_ARCHIVE = "needs a model.tar.gz, and a run publishes its result as files"
_PROFILER = "changes the profiler of SageMaker, which is off"
METHODS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("compile_model", "create_model", "deploy", "register", "transformer"),
        (
            _NO_ARCHIVE,
            "Register it with a step of the kind register (docs/sagemaker.md), or give a Model of the SDK "
            "model_data={'S3DataSource': {'S3Uri': f'{sm_llm.attach(estimator.run_uri).result}/', 'S3DataType': "
            "'S3Prefix', 'CompressionType': 'None'}}",
        ),
    ),
    **dict.fromkeys(
        ("disable_profiling", "enable_default_profiling", "update_profiler"), (_PROFILER, "Use task.logging.profile")
    ),
}
"""Methods of the SDK's estimator that cannot work for a run: why, and what to do instead."""


def effects_table() -> str:
    """The table as Markdown."""
    rows = [f"| `{name}` | {effect.text} |" for name, effect in sorted(EFFECTS.items())]
    return "\n".join(["| argument | effect |", "| --- | --- |", *rows])
