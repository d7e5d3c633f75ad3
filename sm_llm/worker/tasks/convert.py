"""The convert task: weights to or from neuronx-distributed shards, published as the run's result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.convert.api import convert
from sm_llm.runs.events.events import Progress
from sm_llm.spec.tasks import ConvertTask
from sm_llm.worker.checkpoint.earlier import begins_alone
from sm_llm.worker.publishing.publish_final import publish_final

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec
    from sm_llm.worker.context import WorkerContext

_FOLDER = "converted"
_OPTIONS = (
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "virtual_pipeline_degree",
    "kv_size_multiplier",
    "qkv",
    "layout",
    "xser",
)


def run(context: WorkerContext, job: JobSpec) -> None:
    """Convert ``job.task`` (its sources are local). One process works; the others have nothing to do.

    What an attempt that was broken off has written on this node is continued.
    """
    task = job.task
    assert isinstance(task, ConvertTask)
    if not begins_alone(context):
        return
    # Not ``result_folder``, which begins empty: a conversion continues with the files that are finished.
    folder = context.scratch / _FOLDER
    report = convert(
        task.source,
        folder,
        to=task.to,
        config=task.config,
        verify=task.verify,
        progress=lambda done, total: context.emit(Progress("convert", done, total, "bytes")),
        **_options(task),
    )
    for line in report.lines():
        context.notice(line)
    meta = {
        "kind": "shards" if task.to == "nxd" else "model",
        "digest": report.digest,
        "spec_digest": context.job.spec_digest,
    }
    publish_final(context, context.store, folder, lambda value: [value], meta)


def _options(task: ConvertTask) -> dict[str, Any]:
    """The degrees and forms to write. On the way back those that were asked for: the shards' manifest has them all."""
    fields = type(task).model_fields
    return {
        name: value for name in _OPTIONS if (value := getattr(task, name)) != fields[name].default or task.to == "nxd"
    }
