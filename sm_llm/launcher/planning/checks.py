"""Plan-time checks that need model and data together: lengths, vocabularies, and whether inputs are there at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import DataError, Issue
from sm_llm.launcher.planning.local_places import is_reference, local_folder, referenced_step
from sm_llm.launcher.planning.upstream import Upstream, tokenizer_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from sm_llm.data.describe import RowsInfo
    from sm_llm.launcher.planning.model_facts import ModelFacts
    from sm_llm.spec.derive import Derived
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.machines.compute import ComputeSpec
    from sm_llm.spec.optim import OptimSpec
    from sm_llm.spec.tasks import PrepareTask, TrainTask

_LARGE_RATE = 0.02
"""Standard deviation of initial weights in most families: a rate above it overwrites them in one step."""
_OF_SCHEDULES = {
    "min_learning_rate": ("cosine", "linear", "wsd", "exponential", "plateau"),
    "decay_fraction": ("wsd",),
    "plateau_factor": ("plateau",),
    "plateau_patience": ("plateau",),
}
"""Settings of the optimiser that only some schedules read."""


def check_train(
    task: TrainTask, model: ModelFacts | None, rows: RowsInfo | None, upstream: Mapping[str, Upstream | None]
) -> list[Issue]:
    """Every issue in how model, tokenizer and data of a training task fit together.

    ``rows`` are facts of training rows that exist, ``upstream`` those of earlier steps by name.
    """
    issues = _missing_inputs(task)
    step = _upstream(task, upstream)
    issues += _length_issues(task, model, rows.seq_length if rows else step.seq_length if step else None)
    if step is not None and not step.has_validation and is_reference(_value(task, "task.data.validation")):
        path, remedy = "task.data.validation", "Give that step a validation_fraction, or leave this out"
        issues.append(
            Issue(
                "validation-step-without-rows",
                path,
                "refers to a step that holds no rows out",
                _value(task, path),
                remedy,
            )
        )
    if model is not None:
        issues += _vocabulary_issues(task, model, rows.vocab_size if rows else step.vocab_size if step else None)
    return issues


def storage_issues(job: JobSpec) -> list[Issue]:
    """A storage on this machine in which no folder can be made: it, or what it would lie in, is a file."""
    folder = local_folder(job.storage)
    if folder is None:
        return []
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if there.is_dir():
        return []
    where = "is a file" if there == folder else f"lies below {there}, which is a file"
    return [
        Issue(
            "storage-not-a-folder",
            "storage",
            f"must be a folder, and {where}",
            job.storage,
            "Give a folder; it is made if it is not there",
        )
    ]


def storage_warnings(job: JobSpec) -> list[str]:
    """What a setting of the storage cannot do there."""
    if not job.storage_options.shared_with_group or local_folder(job.storage) is not None:
        return []
    return [
        f"storage_options.shared_with_group has no effect on {job.storage}: the bucket's policy decides who reads it"
    ]


def _missing_inputs(task: TrainTask) -> list[Issue]:
    issues = []
    for path in ("task.data.train", "task.data.validation", "task.tokenizer"):
        value = _value(task, path)
        folder = local_folder(value)
        hint = "a folder with tokenizer.json" if path == "task.tokenizer" else "the prepare task writes rows"
        if folder is not None and not folder.exists():
            issues.append(Issue("training-input-not-found", path, "is not there", value, f"Check the path; {hint}"))
        elif path == "task.tokenizer" and folder is not None and not (folder / "tokenizer.json").is_file():
            issues.append(Issue("tokenizer-file-missing", path, "has no tokenizer.json", value, f"Give {hint}"))
    return issues


def check_prepare(task: PrepareTask) -> list[Issue]:
    """Issues of sources and tokenizer that can be seen from here."""
    issues = []
    named = {f"task.sources.{number}": source for number, source in enumerate(task.sources)}
    for path, value in (*named.items(), ("task.tokenizer", task.tokenizer)):
        place = local_folder(value)
        if place is not None and not place.exists():
            issues.append(Issue("prepare-source-not-found", path, "is not there", value, "Check the path"))
        elif place is not None and path in named:
            issues += _unreadable(path, value, place)
    return issues


def _unreadable(path: str, value: str | None, place: Path) -> list[Issue]:
    """A source on this machine in which there is no text to read."""
    from sm_llm.data.prepare.files import find_files

    try:
        files = find_files([str(place)], lambda _: None)
    except DataError as error:
        return [
            Issue(
                "prepare-source-unreadable", path, f"has no text to read: {error}", value, "Give files of these kinds"
            )
        ]
    if any(file.size for file in files):
        return []
    return [
        Issue(
            "prepare-source-empty",
            path,
            f"has no text to read: its {len(files)} files are empty",
            value,
            "Check the path",
        )
    ]


def _value(task: TrainTask, path: str) -> str | None:
    holder = task.data if path.startswith("task.data.") else task
    value = getattr(holder, path.rpartition(".")[2], None)
    return value if isinstance(value, str) else None


def _upstream(task: TrainTask, upstream: Mapping[str, Upstream | None]) -> Upstream | None:
    step = referenced_step(_value(task, "task.data.train"))
    return upstream.get(step) if step else None


def _length_issues(task: TrainTask, model: ModelFacts | None, row_length: int | None) -> list[Issue]:
    issues = []
    wanted = task.data.seq_length
    if model is not None and wanted > model.max_position_embeddings:
        remedy = (
            f"Use at most {model.max_position_embeddings}, or raise task.model.config.max_position_embeddings"
            " (with rope scaling for pretrained weights)"
        )
        problem = f"is longer than the model's max_position_embeddings of {model.max_position_embeddings}"
        issues.append(Issue("sequence-longer-than-model", "task.data.seq_length", problem, wanted, remedy))
    if row_length is not None and wanted != row_length:
        problem = f"differs from the rows, which hold {row_length} tokens each"
        issues.append(
            Issue(
                "sequence-differs-from-rows",
                "task.data.seq_length",
                problem,
                wanted,
                f"Use {row_length}, or prepare the rows anew",
            )
        )
    return issues


def _vocabulary_issues(task: TrainTask, model: ModelFacts, data_vocabulary: int | None) -> list[Issue]:
    sizes = {"task.data.train": data_vocabulary, "task.tokenizer": None}
    folder = local_folder(task.tokenizer)
    if folder is not None and folder.is_dir():
        try:
            sizes["task.tokenizer"] = tokenizer_vocabulary(folder)
        except DataError as error:
            return [Issue("tokenizer-unreadable", "task.tokenizer", str(error))]
    remedy = f"Set task.model.config.vocab_size to at least {max(size or 0 for size in sizes.values())}"
    return [
        Issue(
            "vocabulary-exceeds-model",
            path,
            f"has a vocabulary of {size}, more than the model's {model.vocab_size}",
            _value(task, path),
            remedy,
        )
        for path, size in sizes.items()
        if size is not None and size > model.vocab_size
    ]


def train_warnings(task: TrainTask, compute: ComputeSpec, derived: Derived | None, rows: int | None) -> list[str]:
    """What works in a training task, but is probably not meant. ``rows``: those of its data, where they are known."""
    steps = derived.total_steps if derived else None
    warnings = []
    if derived and steps and derived.checkpoint_every and derived.checkpoint_every > steps:
        warnings.append(
            f"task.checkpoint.every_steps={derived.checkpoint_every} is more than the {steps} steps of the whole run: "
            "an interrupted run starts again from its beginning"
        )
    if derived and rows is not None and rows < derived.global_batch_size:
        warnings.append(f"one step ({derived.global_batch_size} rows) visits the {rows} rows more than once")
    if task.validation.every_steps and not has_validation(task):
        warnings.append("task.validation.every_steps is set, but task.data names no validation rows")
    warnings += _optim_warnings(task.optim, derived)
    tensor = task.parallelism.tensor_parallel_degree
    if tensor > compute.processes:
        warnings.append(
            f"task.parallelism.tensor_parallel_degree={tensor} is more than the {compute.processes} processes of a "
            "node: every layer waits for the network between nodes, which is many times slower than inside one"
        )
    return warnings


def _optim_warnings(optim: OptimSpec, derived: Derived | None) -> Iterator[str]:
    """Settings of the optimiser that have no effect, or one that is hardly meant."""
    if optim.learning_rate > _LARGE_RATE:
        yield (
            f"task.optim.learning_rate: AdamW moves every weight by about {optim.learning_rate:g} in a step, and "
            f"weights begin at about {_LARGE_RATE:g}; usual rates are 1e-5 to 1e-3"
        )
    if derived and derived.schedule_steps and derived.warmup_steps == derived.schedule_steps > 1:
        yield f"task.optim: the warm-up spans all {derived.schedule_steps} steps, so the peak comes with the last one"
    for name, schedules in _OF_SCHEDULES.items():
        value = getattr(optim, name)
        if value != type(optim).model_fields[name].default and optim.schedule not in schedules:
            yield (
                f"task.optim.{name}={value:g} has no effect with schedule {optim.schedule}; "
                f"it is for {', '.join(schedules)}"
            )


def has_validation(task: TrainTask) -> bool:
    """Whether the data of a task has rows to validate on."""
    data = task.data
    if data.format == "synthetic":
        return data.validation_rows > 0
    return (data.validation_split if data.format == "stream" else data.validation) is not None
