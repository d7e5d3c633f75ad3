"""The phases model and data of a plan's checks: config and weights, rows, text and tokenizer, and how these fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.contract.memory_estimate import memory_remedy
from sm_llm.errors import DataError, Issue, warning
from sm_llm.launcher.planning.draft import UpstreamOutput, tokenizer_vocabulary
from sm_llm.launcher.planning.local_paths import (
    is_reference,
    local_folder,
    referenced_step,
    repeated_rows,
    write_problem,
)
from sm_llm.launcher.planning.model_facts import pretrained_issues
from sm_llm.launcher.planning.plan import RANDOM
from sm_llm.launcher.planning.unread_settings import OF_SCHEDULES, check_unread_settings, has_validation
from sm_llm.spec.job_machines import cards, computes_on_cpu, groups, machine_types, machines, smallest_card
from sm_llm.spec.references import outputs, sources
from sm_llm.spec.tasks import (
    TASK_KINDS,
    PrepareTask,
    ScriptTask,
    TrainTask,
    parallelism_of,
    settled_compute,
    training_of,
)
from sm_llm.spec.training import StreamData, SyntheticData
from sm_llm.spec.validation.runner import blocked_by
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sm_llm.launcher.planning.draft import Draft
    from sm_llm.spec.validation.runner import Checker

# Standard deviation of initial weights in most families: a rate above it overwrites them in one step.
_LARGE_RATE = 0.02


def check_written_folders(draft: Draft) -> Iterator[Issue]:
    """Folders on this machine that the job writes to, and that cannot be made: a run would fail once it has begun."""
    job, is_here = draft.job, draft.job.backend.runs_here
    written = {"storage": job.storage, **(outputs(job) if is_here else {})}
    for path, location in written.items():
        folder = local_folder(location)
        if folder is not None and (problem := write_problem(folder, is_on_this_machine=is_here)):
            remedy = "Give a folder that you may write to; it is made if it is not there"
            yield Issue("folder-not-writable", path, f"must be a folder, and {problem}", location, remedy)


def check_repeated_sources(draft: Draft) -> Iterator[Issue]:
    """Text that several sources of a preparation name: it is read as often."""
    task = draft.job.task
    if not isinstance(task, PrepareTask):
        return
    seen: dict[Path, str] = {}
    for index, source in enumerate(task.sources):
        if (location := local_folder(source)) is None:
            continue
        own = location.resolve()
        other = next((text for path, text in seen.items() if path in (own, *own.parents) or own in path.parents), None)
        if other is not None:
            message = f"is read twice, and so are its tokens: {other} names the same, or a part of it"
            yield warning("source-read-twice", f"task.sources.{index}", message, source, "Keep one, unless it is meant")
        seen.setdefault(own, source)


def check_sources(draft: Draft) -> Iterator[Issue]:
    """Places on this machine that are not there, or hold something else than what the task reads there."""
    training = training_of(draft.job.task)
    is_stream = training is not None and training.data.format == "stream"
    if is_stream or any(local_folder(location) is not None for location in sources(draft.job).values()):
        from sm_llm.launcher.planning.source_contents import source_issues

        yield from source_issues(draft.job)


@blocked_by("task.model.path", "task.start.pretrained")
def check_model_config(draft: Draft) -> Iterator[Issue]:
    """A config that is not there, is not one, or does not fit the degrees.

    What the hub shows to the worker alone, which has the secrets, does not stop the plan.
    """
    for issue in draft.config.issues:
        if issue.code == "hub-config-unreadable" and draft.job.secrets:
            message = f"{issue.message}; the worker asks again, with its secrets. Nothing is known of the model here"
            yield replace(issue, message=message, severity="warning")
        else:
            yield issue


@blocked_by("task.start.pretrained")
def check_weights_to_start_from(draft: Draft) -> Iterator[Issue]:
    """Weights on this machine that are not those of the config."""
    task, config = draft.training, draft.config.value
    if task is not None and config is not None:
        yield from pretrained_issues(config, task)


def check_batch_and_length(draft: Draft) -> Iterator[Issue]:
    """Arithmetic of batch, degrees and schedule, with the rows that are known."""
    yield from draft.derived.issues


def check_sequence_length(draft: Draft) -> Iterator[Issue]:
    """Sequences longer than the model's positions, or than the rows."""
    task, model, rows, step = draft.training, draft.model, draft.rows.value, _upstream_output(draft)
    if task is None:
        return
    path, wanted = "task.data.seq_length", task.data.seq_length
    if model is not None and wanted > model.max_position_embeddings:
        remedy = (
            f"Use at most {model.max_position_embeddings}, or raise task.model.config.max_position_embeddings"
            " (with rope scaling for pretrained weights)"
        )
        problem = f"is longer than the model's max_position_embeddings of {model.max_position_embeddings}"
        yield Issue("sequence-longer-than-model", path, problem, wanted, remedy)
    # Rows on this machine are known exactly; those of an earlier step are what it was asked to write.
    in_rows = rows.seq_length if rows else step.seq_length if step else None
    if in_rows is not None and wanted != in_rows:
        problem = f"differs from the rows, which hold {in_rows} tokens each"
        yield Issue("sequence-differs-from-rows", path, problem, wanted, f"Use {in_rows}, or prepare the rows anew")


def check_validation_step(draft: Draft) -> Iterator[Issue]:
    """Validation on the output of a step that holds nothing out."""
    task, step, path = draft.training, _upstream_output(draft), "task.data.validation"
    if task is not None and step is not None and not step.has_validation and is_reference(_value(task, path)):
        problem, remedy = "refers to a step that holds no rows out", "Give that step a validation_fraction"
        value = _value(task, path)
        yield Issue("validation-step-without-rows", path, problem, value, f"{remedy}, or leave this out")


def _is_far_smaller(size: int, vocab_size: int) -> bool:
    from sm_llm.data.describe import is_far_smaller

    return is_far_smaller(size, vocab_size)


@blocked_by("task.tokenizer", "task.data.train")
def check_vocabulary(draft: Draft) -> Iterator[Issue]:
    """Token ids that the model's embedding does not have; and an embedding that is hardly used."""
    task, model = draft.training, draft.model
    if task is None or model is None:
        return
    rows, step = draft.rows.value, _upstream_output(draft)
    sizes = {"task.data.train": rows.vocab_size if rows else step.vocab_size if step else None, "task.tokenizer": None}
    folder = local_folder(task.tokenizer)
    if folder is not None and folder.is_dir():
        try:
            sizes["task.tokenizer"] = tokenizer_vocabulary(folder)
        except DataError:
            return
    largest = max(size or 0 for size in sizes.values())
    for path, size in sizes.items():
        if size is not None and size > model.vocab_size:
            problem = f"has a vocabulary of {size}, more than the model's {model.vocab_size}"
            remedy = f"Set task.model.config.vocab_size to at least {largest}"
            yield Issue("vocabulary-exceeds-model", path, problem, _value(task, path), remedy)
        # The rows of a step that has not run hold at most as many as it was asked for.
        elif size is not None and _is_far_smaller(size, model.vocab_size):
            message = (
                f"{size:,} tokens, but the model's vocabulary has {model.vocab_size:,}: the other rows of its "
                "embedding are never trained"
            )
            remedy = "Set task.model.config.vocab_size, unless the model is trained on more text later"
            yield warning("vocabulary-hardly-used", path, message, remedy=remedy)


def check_repeated_rows(draft: Draft) -> Iterator[Issue]:
    """One row that is all the data."""
    task, rows = draft.training, draft.rows.value
    found = None
    if rows is not None and rows.rows == 1:
        found = "the data hold a single row"
    elif rows is not None and rows.repeated:
        found = f"all {rows.rows:,} rows are the same row"
    elif task is not None and task.data.format == "json_rows":
        from sm_llm.data.peek import repeats_one_row

        folder = local_folder(task.data.train)
        count = repeats_one_row(folder, task.data.seq_length) if folder is not None and folder.is_dir() else None
        if count is not None:
            found = "the data hold a single row" if count == 1 else f"the first {count:,} lines are the same row"
    if found is not None:
        message = f"{found}: the model learns it by heart and nothing else"
        yield warning("rows-repeated", "task.data.train", message)


def check_random_tokens(draft: Draft) -> Iterator[Issue]:
    """Money spent on random tokens is seldom meant."""
    job, training = draft.job, training_of(draft.job.task)
    if not job.backend.runs_here and training is not None and isinstance(training.data, SyntheticData):
        message = f"the job trains on {RANDOM} and costs money"
        remedy = "For your own data: task.data.format=rows task.data.train=s3://bucket/rows"
        yield warning("random-tokens-paid", "task.data.format", message, remedy=remedy)


def check_training_length(draft: Draft) -> Iterator[Issue]:
    """Checkpoints later than the end, and batches larger than the data."""
    derived, rows = draft.derived.value, draft.rows.value
    if derived is None:
        return
    steps, every = derived.total_steps, derived.checkpoint_every
    if steps and every and every > steps:
        message = (
            f"every_steps={every} is more than the whole run, {counted(steps, 'step')}: an interrupted run starts "
            "again from its beginning"
        )
        yield warning("checkpoints-after-the-end", "task.checkpoint.every_steps", message)
    if rows is not None and rows.rows is not None and rows.rows < derived.global_batch_size:
        message = f"one step ({derived.global_batch_size} rows) visits {counted(rows.rows, 'row')} more than once"
        yield warning("batch-larger-than-data", "task.global_batch_size", message)


def check_validation_rows(draft: Draft) -> Iterator[Issue]:
    """An interval of validation without rows to validate on."""
    task = draft.training
    if task is not None and task.validation.every_steps and not has_validation(task):
        message = "is set, but task.data names no validation rows"
        yield warning("validation-without-rows", "task.validation.every_steps", message)


def check_optimiser(draft: Draft) -> Iterator[Issue]:
    """Settings of the optimiser that have no effect, or one that is hardly meant."""
    task, derived = draft.training, draft.derived.value
    if task is None:
        return
    optim = task.optim
    if optim.learning_rate > _LARGE_RATE:
        message = (
            f"AdamW moves every weight by about {optim.learning_rate:g} in a step, and weights begin at about "
            f"{_LARGE_RATE:g}; usual rates are 1e-5 to 1e-3"
        )
        yield warning("learning-rate-large", "task.optim.learning_rate", message)
    steps = derived.schedule_steps if derived is not None else None
    if derived is not None and steps is not None and derived.warmup_steps == steps > 1:
        message = f"the warm-up spans all {steps} steps, so the peak comes with the last one"
        yield warning("warmup-spans-schedule", "task.optim", message)
    for name, schedules in OF_SCHEDULES.items():
        value = getattr(optim, name)
        # A value that equals the default asks for nothing.
        if value != type(optim).model_fields[name].default and optim.schedule not in schedules:
            message = f"has no effect with schedule {optim.schedule}; it is for {', '.join(schedules)}"
            yield warning("schedule-setting-without-effect", f"task.optim.{name}", message, value)


def check_processes(draft: Draft) -> Iterator[Issue]:
    """Processes that have nothing to do, and degrees that make every layer wait for the network."""
    job, task = draft.job, draft.training
    if not TASK_KINDS[job.task.kind].starts_ranks and job.compute.world_size > 1:
        others = "other" if job.compute.world_size == 2 else f"other {job.compute.world_size - 1}"
        message = f"{job.task.kind} uses one process; the {others} will have nothing to do"
        yield warning("processes-idle", "compute", message)
    tensor = task.parallelism.degrees.tensor if task is not None else 1
    if tensor > job.compute.processes:
        message = (
            f"tensor_parallel_degree={tensor} is more than the {job.compute.processes} processes of a node: every "
            "layer waits for the network between nodes, which is many times slower than inside one"
        )
        yield warning("tensor-degree-crosses-nodes", "task.parallelism.tensor_parallel_degree", message)


def check_program(draft: Draft) -> Iterator[Issue]:
    """What a user's own program gets that is possible, but hardly meant."""
    if isinstance(draft.job.task, ScriptTask):
        from sm_llm.launcher.planning.program_checks import program_warnings

        yield from program_warnings(draft.job)


def check_unlisted_gpu(draft: Draft) -> Iterator[Issue]:
    """A GPU that the table lacks: its memory is what its name states, and its peak rate is not known."""
    given = draft.job.compute.gpu
    if draft.training is None or given is None:
        return
    from sm_llm.spec.machines.gpu_names import read_gpu
    from sm_llm.spec.machines.hardware import peak_flops

    named = read_gpu(given)
    if named.sizes or named.card is None:
        return
    lacks = "" if peak_flops(named.card.name) else "; without a known peak rate a training on it logs no MFU"
    counted_with = f"the {named.card.gib:g} GiB that it states, and with bf16 and fp8, which it may lack"
    message = f"is not in the table of GPUs: the plan counts with {counted_with}{lacks}"
    yield warning("gpu-not-in-table", "compute.gpu", message, given)


@blocked_by("task", "compute", "storage")
def check_memory(draft: Draft) -> Iterator[Issue]:
    """A training that probably needs more than its GPUs have; an estimate for degrees that are wrong means nothing."""
    card, task = smallest_card(draft.job), draft.planned
    if card is not None and task is not None and draft.memory is not None:
        yield from draft.memory.warnings(card, memory_remedy(task, card))


def check_separate_validation(draft: Draft) -> Iterator[Issue]:
    """Rows to validate on that are trained on as well: their loss is no measure for other rows."""
    task = draft.training
    if task is None or not has_validation(task) or isinstance(task.data, SyntheticData):
        return
    if isinstance(task.data, StreamData):
        path, value, found = "task.data.validation_split", task.data.validation_split, None
        if task.data.validation_split == task.data.split:
            found = "is the split that is trained on"
    else:
        path, value = "task.data.validation", task.data.validation
        found = repeated_rows(task.data)
    if found is not None:
        message = f"{found}: the loss of validation is that of rows which the model was trained on"
        remedy = "Hold rows out: task.validation_fraction of the prepare task does"
        yield warning("validation-on-training-rows", path, message, value, remedy)


def check_engine_on_machines(draft: Draft) -> Iterator[Issue]:
    """Instance types that the engine does not run on, whichever backend starts the job."""
    parallelism = parallelism_of(draft.job.task)
    if parallelism is None:
        return
    path = "backend.instance_groups" if groups(draft.job) else "compute.instance_type"
    for row in machines(draft.job):
        yield from parallelism.instance_issues(row, path)


def check_compute_format(draft: Draft) -> Iterator[Issue]:
    """Number formats that the job's GPUs, where they are known, lack; and one that a CPU can only imitate."""
    task, path = draft.training, "task.precision.compute"
    if task is None:
        return
    if task.precision.compute == "fp8" and computes_on_cpu(draft.job):
        message = "is emulated on a CPU: numbers are rounded to fp8 and multiplied in their own format, slowly"
        yield warning("fp8-emulated", path, message, "fp8")
    # Of groups of several types, each.
    for card in cards(draft.job):
        # As the worker does, so that a format that nobody has written is judged as well.
        compute = settled_compute(task, has_bf16=card.has_bf16).precision.compute
        if compute == "fp8" and not card.has_fp8:
            problem = f"{card.name} has no fp8, which GPUs have since Ada and Hopper"
            remedy = "Use bf16" if card.has_bf16 else "Use fp32"
            yield Issue("compute-format-unsupported-by-gpu", path, problem, "fp8", remedy)
        if compute == "bf16" and not card.has_bf16:
            own_masters = task.precision.master == "bf16"
            remedy = f"Use fp32{', with task.precision.master: fp32' if own_masters else ''}"
            yield warning("bf16-emulated", path, f"{card.name} has no bf16 and emulates it slowly", "bf16", remedy)


def check_fp8_products(draft: Draft) -> Iterator[Issue]:
    """Matrices that no product in fp8 takes, and experts."""
    task, config = draft.training, draft.config.value
    if task is None or config is None or task.precision.compute != "fp8" or not task.parallelism.can.computes_fp8:
        return
    # Imported here: most trainings compute nothing in fp8.
    from sm_llm.contract.fp8_products import fp8_products

    products, path = fp8_products(config), "task.precision.compute"
    if not products.fitting:
        remedy = "Use bf16, or a model whose sizes fit (task.model)"
        yield Issue("fp8-without-products", path, f"has nothing to compute: {products.left_out}", "fp8", remedy)
    elif products.left_out:
        yield warning("fp8-in-part", path, products.left_out, "fp8")


def check_absent_gpu(draft: Draft) -> Iterator[Issue]:
    """A GPU to plan for that this machine, where the job would start, has not."""
    named, job = draft.job.compute.gpu, draft.job
    if named is None or draft.training is None or machine_types(job) or not job.backend.runs_here:
        return
    from sm_llm.spec.machines.machine import own_card

    # Another GPU than the named one is a plan for a machine to come, which is what the field is for.
    own, wanted = own_card(), smallest_card(job)
    if wanted is not None and own is None:
        message = f"this machine has no GPU: a job that starts here computes on the CPU, and the plan is for {wanted}"
        yield warning("gpu-not-here", "compute.gpu", message, named)


def check_support(draft: Draft) -> Iterator[Issue]:
    """An engine that its makers no longer develop."""
    spec = draft.training.parallelism if draft.training is not None else None
    if spec is not None and spec.support is not None:
        yield warning("strategy-in-maintenance", "task.parallelism.strategy", spec.support)


MODEL_CHECKERS: tuple[Checker[Draft], ...] = (check_sources, check_model_config, check_weights_to_start_from)
DATA_CHECKERS: tuple[Checker[Draft], ...] = (
    check_written_folders,
    check_repeated_sources,
    check_batch_and_length,
    check_sequence_length,
    check_validation_step,
    check_vocabulary,
    check_repeated_rows,
    check_random_tokens,
    check_training_length,
    check_validation_rows,
    check_separate_validation,
    check_optimiser,
    check_unread_settings,
    check_engine_on_machines,
    check_compute_format,
    check_fp8_products,
    check_absent_gpu,
    check_processes,
    check_program,
    check_unlisted_gpu,
    check_memory,
    check_support,
)


def _value(task: TrainTask, path: str) -> str | None:
    holder = task.data if path.startswith("task.data.") else task
    value = getattr(holder, path.rpartition(".")[2], None)
    return value if isinstance(value, str) else None


def _upstream_output(draft: Draft) -> UpstreamOutput | None:
    step = referenced_step(_value(draft.training, "task.data.train")) if draft.training is not None else None
    return draft.upstream.get(step) if step else None
