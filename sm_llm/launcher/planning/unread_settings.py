"""Settings that have no effect beside others: every field of a specification was judged, and a plan warns of them.

``test_unread_settings`` holds the fields that are always read; whoever adds a field puts it there or into a table here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sm_llm.errors import DataError, Issue, SpecError, warning
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.launcher.planning.model_facts import pretrained_source
from sm_llm.models.config import unknown_fields
from sm_llm.models.families.table import family
from sm_llm.spec.inputs import S3Input, input_location
from sm_llm.spec.job_machines import computes_on_cpu
from sm_llm.spec.references import is_reference, sources
from sm_llm.spec.tasks import (
    AUTO,
    CHECKPOINTING,
    COMPILE,
    FetchTask,
    PrepareTask,
    TrainTask,
    setting,
    training_of,
)
from sm_llm.spec.training import STREAM_BUILDERS
from sm_llm.storage.uri import is_s3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.launcher.planning.draft import Draft
    from sm_llm.spec.derive import Derived
    from sm_llm.spec.parallelism.base import Layout

OF_SCHEDULES = {
    "min_learning_rate": ("cosine", "linear", "wsd", "exponential", "plateau"),
    "decay_fraction": ("wsd",),
    "plateau_factor": ("plateau",),
    "plateau_patience": ("plateau",),
}
"""Settings of the optimiser that only some schedules read; ``checks.check_optimiser`` warns of the others."""
_ON_CPU = "the processes compute on the CPU, whose memory holds it anyway"
_SAVED = "weights are saved in the format that they are trained in (task.precision.master)"
_Reads = Callable[[TrainTask, "Draft"], bool]

OF_TRAININGS: dict[str, tuple[_Reads, str]] = {
    "logging.sample_prompt": (lambda task, _: task.tokenizer is not None, "a sample needs task.tokenizer"),
    "logging.sample_tokens": (
        lambda task, _: task.logging.sample_prompt is not None,
        "it is for task.logging.sample_prompt",
    ),
    "logging.profile.every_steps": (
        lambda task, draft: (
            task.logging.profile is None or not _is_after_the_end(task.logging.profile.every_steps, draft.derived.value)
        ),
        "the training ends before the first trace",
    ),
    "logging.profile.all_processes": (lambda _, draft: draft.job.compute.world_size > 1, "there is one process"),
    "precision.moments": (
        lambda task, _: task.precision.master != task.precision.moments,
        "they have the format of task.precision.master anyway",
    ),
    "precision.reduce": (lambda _, draft: draft.job.compute.world_size > 1, "one process sums nothing over others"),
    "data.shuffle_buffer": (lambda task, _: task.data.shuffle, "task.data.shuffle is false"),
    "data.validation_rows": (
        lambda task, _: task.data.format != "stream" or has_validation(task),
        "task.data.validation_split is not given",
    ),
    "data.config_name": (
        lambda task, _: task.data.format != "stream" or task.data.dataset not in STREAM_BUILDERS,
        "a builder of files has no configurations",
    ),
    "validation.max_rows": (lambda task, _: has_validation(task), "task.data names no validation rows"),
    "checkpoint.keep_every_steps": (
        lambda task, draft: _keeps_one(task, draft.derived.value),
        "no checkpoint is saved at such a step; use a multiple of task.checkpoint.every_steps",
    ),
    "watchdog.stall_factor": (lambda task, _: task.watchdog.enabled, "task.watchdog.enabled is false"),
    "watchdog.stall_seconds": (lambda task, _: task.watchdog.enabled, "task.watchdog.enabled is false"),
    "watchdog.start_seconds": (lambda task, _: task.watchdog.enabled, "task.watchdog.enabled is false"),
    "not_finite.limit": (
        lambda task, _: task.not_finite.policy != "stop",
        "it is for task.not_finite.policy skip and rollback",
    ),
    "optim.decay_embeddings": (lambda task, _: task.optim.weight_decay > 0, "task.optim.weight_decay is 0"),
    "optim.schedule_steps": (
        lambda task, _: task.optim.schedule not in ("constant", "plateau") or bool(task.optim.warmup_fraction),
        "the schedule spans no number of steps",
    ),
    "precision.compiled_graphs": (
        lambda task, draft: _may_compile(task, draft),
        "no layers are compiled: task.precision.compile is false, or auto amounts to that here",
    ),
    "parallelism.sharding": (
        lambda task, draft: changed(task.parallelism, ["sharding"]) != "hybrid" or _has_copies(task, draft),
        "one group holds all processes, which is full",
    ),
    "parallelism.activation_checkpointing": (
        lambda task, draft: not (_is_open_budget(task) and computes_on_cpu(draft.job)),
        "the budget is torch.compile's, and with task.precision.compile auto nothing is compiled on a CPU",
    ),
    "parallelism.offload_optimizer": (lambda _, draft: not computes_on_cpu(draft.job), _ON_CPU),
    "parallelism.offload_activations": (lambda _, draft: not computes_on_cpu(draft.job), _ON_CPU),
    "parallelism.async_tensor_parallel": (lambda _, draft: not computes_on_cpu(draft.job), _ON_CPU),
    "parallelism.copy_engine_collectives": (
        lambda task, draft: not computes_on_cpu(draft.job) and _shards(task, draft),
        "no GPUs share the parameters",
    ),
    "parallelism.share_gradient_memory": (lambda _, draft: not computes_on_cpu(draft.job), _ON_CPU),
    "parallelism.sequence_parallel": (
        lambda task, _: task.parallelism.degrees.tensor > 1,
        "it is for a tensor_parallel_degree above 1",
    ),
    "parallelism.reshard_after_forward": (
        lambda task, draft: _is_wrapped(task, draft),
        "one process holds all parameters, and gathers none",
    ),
    "parallelism.activation_loading_horizon": (
        lambda task, _: changed(task.parallelism, ["sm_activation_offloading"]) is not None,
        "task.parallelism.sm_activation_offloading is false",
    ),
    "parallelism.random_seed": (
        lambda task, _: (
            task.parallelism.degrees.tensor > 1 or changed(task.parallelism, ["expert_parallel_degree"]) is not None
        ),
        "it is for tensor and expert parallel ranks",
    ),
    "model.config.dtype": (lambda *_: False, _SAVED),
    "model.config.torch_dtype": (lambda *_: False, _SAVED),
}
"""Path below the task -> whether the training reads it, and why not where it does not."""

_NO_WINDOW = "no layer has a window: use_sliding_window is false"
_NO_BALANCE = "training adds no balancing loss of the router"

OF_MODELS: dict[tuple[str, str], str] = {
    ("llama", "pretraining_tp"): "training reads it nowhere; task.parallelism.tensor_parallel_degree splits matrices",
    ("mixtral", "output_router_logits"): _NO_BALANCE,
    ("mixtral", "router_aux_loss_coef"): _NO_BALANCE,
    **{(kind, name): _NO_WINDOW for kind in ("qwen2", "qwen3") for name in ("sliding_window", "max_window_layers")},
}
"""Family and field of its config -> why no training reads it."""

OF_PREPARATIONS: dict[str, tuple[Callable[[PrepareTask], bool], str]] = {
    "seed": (lambda task: task.validation_fraction > 0, "it chooses what task.validation_fraction holds out"),
    "text_field": (lambda task: any(map(_has_fields, task.sources)), "no source has fields: .txt is read whole"),
}

OF_FETCHES: dict[str, tuple[Callable[[FetchTask], bool], str]] = {
    "one_weight_format": (
        lambda task: not task.source.startswith("hf://datasets/"),
        "a data set has no weights",
    ),
}

OF_VARIABLES: dict[str, tuple[str, bool]] = {
    "OMP_NUM_THREADS": ("backend.threads_per_process", True),
    "MLFLOW_TRACKING_URI": ("task.logging.sinks.mlflow.tracking_uri", False),
    "MLFLOW_EXPERIMENT_NAME": ("task.logging.sinks.mlflow", False),
    "WANDB_MODE": ("task.logging.sinks.wandb.mode", False),
    "WANDB_PROJECT": ("task.logging.sinks.wandb", False),
    "WANDB_ENTITY": ("task.logging.sinks.wandb.entity", False),
}
"""Variable of ``environment`` -> the setting of the same thing, and whether the variable is the one that counts."""

OF_S3 = ("endpoint_url", "region", "expected_bucket_owner", "kms_key_id", "storage_class")
"""Options of storage that reach S3."""
_OF_WRITING = ("kms_key_id", "storage_class")
# How the origins of a user's own defaults begin: they are for all jobs, so one that does not need them is as meant.
_OF_USERS = ("user config", "environment SM_LLM_")


def check_unread_settings(draft: Draft) -> Iterator[Issue]:
    """Settings that differ from their defaults, and that nothing reads."""
    task = draft.job.task
    given: dict[str, str] = {}
    if isinstance(task, TrainTask):
        given = {path: why for path, (reads, why) in OF_TRAININGS.items() if not reads(task, draft)}
        yield from _model_issues(task, draft)
        if task.optim.schedule == "plateau" and not has_validation(task):
            message = "the rate never falls: it follows validation loss, and task.data names no validation rows"
            yield warning("plateau-without-validation", "task.optim.schedule", message)
    elif isinstance(task, PrepareTask):
        given = {path: why for path, (reads, why) in OF_PREPARATIONS.items() if not reads(task)}
    elif isinstance(task, FetchTask):
        given = {path: why for path, (reads, why) in OF_FETCHES.items() if not reads(task)}
    for path, why in given.items():
        # A value that equals the default asks for nothing.
        if (value := changed(task, path.split("."))) is not None:
            yield warning("setting-without-effect", f"task.{path}", f"has no effect: {why}", value)
    # The machines of a workflow are those of all its steps.
    if draft.job.compute.gpu is not None and not isinstance(task, TrainTask) and not draft.upstream:
        message = "has no effect: it is for the estimate of memory of a training"
        yield warning("gpu-without-effect", "compute.gpu", message, draft.job.compute.gpu)
    yield from _variable_issues(draft)
    yield from _storage_issues(draft)
    for name, it in draft.job.inputs.items():
        if isinstance(it, S3Input) and it.mode == "File" and not draft.job.backend.mounts_inputs:
            message = "has no effect: only SageMaker mounts inputs"
            yield warning("input-mode-without-effect", f"inputs.{name}.mode", message, it.mode)


def _model_issues(task: TrainTask, draft: Draft) -> Iterator[Issue]:
    """Fields of a model's config that no training reads, where they differ from the family's own values."""
    config = draft.config.value
    if config is None:
        return
    kind = family(config)
    file = "task.model.path" if task.model.path is not None else "task.start.pretrained"
    # A preset is ours, also where an earlier step fetches it: what else it has is no wish of the user's.
    is_ours = task.model.preset is not None or (task.model.path is None and is_reference(pretrained_source(task) or ""))
    read = {} if is_ours else config
    for name, value in {**read, **task.model.config}.items():
        why = OF_MODELS.get((kind.model_type, name))
        if why is None or value is None or value == kind.fields[name].default:
            continue
        if name in task.model.config:
            yield warning("model-field-without-effect", f"task.model.config.{name}", f"has no effect: {why}", value)
        elif why is not _NO_WINDOW:  # published files state windows beside use_sliding_window: false
            yield warning("model-field-without-effect", file, f"its {name} has no effect: {why}", value)
    for name in () if is_ours else unknown_fields(config):
        problem = f"its {name} has no effect: it is not a config field of {kind.model_type} models"
        yield warning("model-field-without-effect", file, problem, config[name])


def _has_copies(task: TrainTask, draft: Draft) -> bool:
    """Whether the parameters of a training are held more than once."""
    layout = _layout(task, draft)
    return layout is None or layout.replicate > 1


def _shards(task: TrainTask, draft: Draft) -> bool:
    """Whether processes hold parts of the parameters."""
    layout = _layout(task, draft)
    return layout is None or layout.shard > 1


def _is_wrapped(task: TrainTask, draft: Draft) -> bool:
    """Whether FSDP wraps the model: one process trains the bare one, unless its masters are in host memory.

    Around whole copies (``sharding: none``), too, it keeps or frees parameters in the format that computes.
    """
    return draft.job.compute.world_size > 1 or changed(task.parallelism, ["offload_optimizer"]) is not None


def _may_compile(task: TrainTask, draft: Draft) -> bool:
    """Whether layers are compiled, or may be: on GPUs that are not known, a worker decides."""
    if task.precision.compile != AUTO:
        return task.precision.compile is True
    if not task.parallelism.can.plans_memory or task.parallelism.degrees.tensor > 1 or computes_on_cpu(draft.job):
        return False
    planned = draft.planned
    return planned is None or planned.precision.compile is not False


def _layout(task: TrainTask, draft: Draft) -> Layout | None:
    """How the processes share the work; None for degrees that do not fit, which another check refuses."""
    compute = draft.job.compute
    try:
        return task.parallelism.layout(compute.world_size, compute.processes)
    except SpecError:
        return None


def _variable_issues(draft: Draft) -> Iterator[Issue]:
    """Variables beside a setting of the same thing: one of the two counts."""
    for variable, (path, variable_counts) in OF_VARIABLES.items():
        if variable in draft.job.environment and changed(draft.job, path.split(".")) is not None:
            other = f"environment.{variable}"
            without, counts = (path, other) if variable_counts else (other, path)
            yield warning("variable-without-effect", without, f"has no effect: {counts} is given, which counts")


def _storage_issues(draft: Draft) -> Iterator[Issue]:
    """Options of S3 for a job that reads or writes nothing there, and one of folders on a storage that has none."""
    job, options = draft.job, draft.job.storage_options
    training = training_of(job.task)
    cache = changed(training.parallelism, ["compile_cache"]) if training is not None else None
    written = [job.storage, *([cache] if isinstance(cache, str) else [])]
    read = [*sources(job).values(), *map(input_location, job.inputs.values()), *job.backend.read_locations.values()]
    for name in OF_S3:
        path, used = f"storage_options.{name}", written if name in _OF_WRITING else [*written, *read]
        is_asked = getattr(options, name) is not None and not draft.origins.get(path, "").startswith(_OF_USERS)
        if is_asked and not any(map(is_s3, used)):
            problem = "writes nothing to S3" if name in _OF_WRITING else "has nothing in S3"
            message = f"has no effect: the job {problem}"
            yield warning("storage-option-without-effect", path, message, getattr(options, name))
    if options.shared_with_group and local_folder(job.storage) is None:
        message = f"has no effect on {job.storage}: the bucket's policy decides who reads it"
        yield warning("shared-with-group-without-effect", "storage_options.shared_with_group", message)


def changed(holder: Any, path: list[str]) -> Any:
    """The value at a path, if the path is there and the value is not its default."""
    for name in path[:-1]:
        holder = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
    if isinstance(holder, dict):
        return holder.get(path[-1])
    fields: Mapping[str, Any] = getattr(type(holder), "model_fields", {})
    if path[-1] not in fields:
        return None
    value = getattr(holder, path[-1])
    return None if value == fields[path[-1]].get_default(call_default_factory=True) else value


def _is_open_budget(task: TrainTask) -> bool:
    """Whether a budget of activations leaves it open whether anything is compiled."""
    return (setting(task, CHECKPOINTING), setting(task, COMPILE)) == ("budget", AUTO)


def has_validation(task: TrainTask) -> bool:
    """Whether the data of a task has rows to validate on."""
    data = task.data
    if data.format == "synthetic":
        return data.validation_rows > 0
    return (data.validation_split if data.format == "stream" else data.validation) is not None


def _is_after_the_end(step: int, derived: Derived | None) -> bool:
    return derived is not None and derived.total_steps is not None and step > derived.total_steps


def _keeps_one(task: TrainTask, derived: Derived | None) -> bool:
    """Whether a save, at an interval or at the end, falls on a step that is kept."""
    kept = task.checkpoint.keep_every_steps
    if kept is None or derived is None or derived.total_steps is None or derived.checkpoint_every is None:
        return True
    total = derived.total_steps
    return total % kept == 0 or math.lcm(kept, derived.checkpoint_every) <= total


def _has_fields(source: str) -> bool:
    """Whether a source of text has fields, or may have some: it is not on this machine."""
    from sm_llm.data.prepare.source_files import find_files

    location = local_folder(source)
    if location is None:
        return not source.startswith("builtin:") and not source.endswith(".txt")
    try:
        return any(file.kind != ".txt" for file in find_files([str(location)], lambda _: None))
    except DataError:  # it is refused by another check
        return True
