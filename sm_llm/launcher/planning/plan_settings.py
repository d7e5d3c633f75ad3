"""What decides the outcome of a job, in words: its data, start, tokenizer, precision and what it installs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import REQUIREMENTS
from sm_llm.launcher.planning.local_places import local_folder
from sm_llm.redaction import redact
from sm_llm.spec.tasks import PrepareTask, ScriptTask, TrainTask, training_of
from sm_llm.spec.training import CheckpointStart, PretrainedStart, StreamData, SyntheticData

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec

RANDOM = "RANDOM TOKENS"
_LISTED = 8


def settings(job: JobSpec, rows: int | None = None) -> dict[str, str]:
    """Name -> value in words. ``rows`` are those of the training data, where they are known."""
    task = job.task
    training = training_of(task)
    found: dict[str, str] = {}
    if training is not None:
        found |= {
            "data": _data(training, rows),
            "start": _start(training),
            "tokenizer": training.tokenizer or "none: the result has none",
            "precision": _precision(training),
        }
    elif isinstance(task, PrepareTask):
        trained = f"trained on the text, {task.train_tokenizer.vocab_size:,} entries"
        found["tokenizer"] = task.tokenizer or trained
    elif isinstance(task, ScriptTask):
        found["program"] = f"{task.entry} of {task.source or 'the image'}{_without_runs(job, task.source)}"
        if wanted := requirements(job):
            more = f" and {len(wanted) - _LISTED} more" if len(wanted) > _LISTED else ""
            found["installs"] = f"{', '.join(wanted[:_LISTED])}{more} ({task.source}/{REQUIREMENTS}, once per node)"
    return found


def _without_runs(job: JobSpec, source: str | None) -> str:
    """Warns where the program's folder holds the storage of the run, which is not part of the program."""
    folder, storage = local_folder(source), local_folder(job.storage)
    if folder is None or storage is None or not storage.resolve().is_relative_to(folder.resolve()):
        return ""
    return f" (without the runs in {job.storage})"


def requirements(job: JobSpec) -> list[str]:
    """The lines of a program's requirements that ask for something; empty where it is not on this machine."""
    folder = local_folder(job.task.source) if isinstance(job.task, ScriptTask) else None
    file = None if folder is None else folder / REQUIREMENTS
    if file is None or not file.is_file():
        return []
    from sm_llm.launcher.requirement_file import logical_lines

    return [redact(line) for _, line in logical_lines(file.read_text(encoding="utf-8-sig", errors="replace"))]


def _data(task: TrainTask, rows: int | None) -> str:
    data = task.data
    if isinstance(data, SyntheticData):
        return f"{RANDOM}: {data.rows:,} rows of {data.seq_length:,} (task.data.format=synthetic)"
    if isinstance(data, StreamData):
        return f"{data.dataset}, split {data.split}, streamed into rows of {data.seq_length:,} tokens"
    count = f"{rows:,} " if rows is not None else ""
    return f"{data.train} ({count}rows of {data.seq_length:,} tokens)"


def _start(task: TrainTask) -> str:
    if isinstance(task.start, PretrainedStart):
        return f"weights of {task.start.pretrained}"
    if isinstance(task.start, CheckpointStart):
        return f"checkpoint {task.start.checkpoint}"
    return f"random weights (seed {task.seed})"


def _precision(task: TrainTask) -> str:
    precision = task.precision
    compute = "bf16 where the hardware has it, else fp32" if precision.compute == "auto" else precision.compute
    compiled = ", compiled" if precision.compile else ""
    return f"computes in {compute}; parameters in {precision.master}, gradients summed in {precision.reduce}{compiled}"
