"""Delivers the trained model: exported for Hugging Face, published as the run's result, and tried on a prompt."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from sm_llm.convert.api import convert
from sm_llm.runs.events.events import Sample
from sm_llm.storage.uri import is_s3
from sm_llm.terminal import quoted
from sm_llm.worker.checkpoint.earlier import is_published
from sm_llm.worker.device import DTYPES
from sm_llm.worker.publishing.publish_final import publish_final, result_folder
from sm_llm.worker.results.export import export_model
from sm_llm.worker.results.sample import generate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sm_llm.storage.base import Store
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.runtime.collectives import ControlGroup
    from sm_llm.worker.strategies.base import Strategy
    from sm_llm.worker.training.job_setup import Setup


def is_delivered(context: WorkerContext, control: ControlGroup) -> bool:
    """Whether an earlier attempt published the result already. Rank 0 checks."""
    return control.broadcast(context.process.is_leader and is_published(context))


def export_result(context: WorkerContext, setup: Setup, strategy: Strategy) -> Path:
    """Write the result to a folder of this node, which only the leader has. A collective."""
    folder, is_leader = result_folder(context), context.process.is_leader
    dtype = DTYPES[setup.task.precision.compute]
    export_model(strategy, setup.config, dtype, setup.tokenizer, folder, is_leader=is_leader)
    shards = setup.task.parallelism.result_shards()
    if shards is not None and is_leader:
        _cut(context, folder, shards)
    return folder


def deliver(
    context: WorkerContext, setup: Setup, strategy: Strategy, store: Store, control: ControlGroup, folder: Path
) -> None:
    """Publish what was exported to ``folder``, and show what the model writes."""
    shards = setup.task.parallelism.result_shards()
    kind = "model" if shards is None else "shards"
    meta = {"kind": kind, "steps": setup.total_steps, "spec_digest": context.job.spec_digest}
    uri = publish_final(context, store, folder, control.gather, meta)
    # After the publication: whatever fails here, the result is stored.
    _write_sample(context, setup, strategy, control)
    if uri is not None and is_s3(uri):
        context.log(f"get it with: sm-llm sync {quoted(uri, f'./{context.job.run_id}')}")
    elif shards is not None and uri is not None:
        context.log(f"convert it with: sm-llm convert {quoted(uri, f'./{context.job.run_id}')} --to hf")
    else:
        context.log(f"load it with: AutoModelForCausalLM.from_pretrained({uri!r})")


def _cut(context: WorkerContext, model: Path, options: Mapping[str, Any]) -> None:
    """Replace the exported ``model`` by shards of it. The leader's business."""
    shards = model.with_name(f"{model.name}.shards")
    # What an attempt that was killed on this node has left was made of another export.
    shutil.rmtree(shards, ignore_errors=True)
    for line in convert(model, shards, to="nxd", **options).lines():
        context.notice(line)
    shutil.rmtree(model)
    # Every process publishes by the folder's name.
    shards.rename(model)


def _write_sample(context: WorkerContext, setup: Setup, strategy: Strategy, control: ControlGroup) -> None:
    """Generate from the prompt of ``logging.sample_prompt``, if there is one and a tokenizer to read it."""
    prompt, tokenizer = setup.task.logging.sample_prompt, setup.tokenizer
    if prompt is None or tokenizer is None:
        return
    text = generate(
        strategy,
        control,
        tokenizer,
        prompt,
        tokens=setup.task.logging.sample_tokens,
        context_length=setup.derived.seq_length,
        seed=setup.task.seed,
    )
    context.emit(Sample(prompt, text))
    context.log(f"sample: {prompt}{text}")
