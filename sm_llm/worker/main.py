"""The worker: job.json -> context -> inputs on this node -> task -> published result, or a failure that is told."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping

from sm_llm.contract.liveness import RunLock
from sm_llm.contract.states import EXIT_CODES, RunState
from sm_llm.errors import RunFailed, SmLlmError
from sm_llm.spec.job import JobSpec
from sm_llm.storage.files import write_new
from sm_llm.worker.context import WorkerContext, container_paths
from sm_llm.worker.sync import stage_inputs

Task = Callable[[WorkerContext, JobSpec], None]


def main(kind: str, environ: Mapping[str, str] = os.environ) -> int:
    """Run the job's task in this process; returns the exit code of ``contract.states``.

    A fault of the user, the data or the platform is told in one line, anything else with its traceback. The first
    process of a node that fails writes ``output/failure``.
    """
    try:
        _work(kind, environ)
    except Exception as error:
        _tell_failure(error, environ)
        return EXIT_CODES[RunState.FAILED]
    return EXIT_CODES[RunState.COMPLETED]


def _work(kind: str, environ: Mapping[str, str]) -> None:
    context = WorkerContext.read(environ)
    with RunLock(context.run.lock):
        try:
            _check(kind, context)
            _task(kind)(context, stage_inputs(context))
        finally:
            context.close()


def _check(kind: str, context: WorkerContext) -> None:
    wanted = context.job.spec.task.kind
    if wanted != kind:
        raise RunFailed(f"this entrypoint runs {kind} jobs, but job.json holds a {wanted} job")
    context.check_world_size()


def _task(kind: str) -> Task:
    """The code of a task kind, imported only now: prepare needs no torch."""
    if kind == "train":
        from sm_llm.worker.train import run as train

        return train
    from sm_llm.worker.prepare import run as prepare

    return prepare


def _tell_failure(error: Exception, environ: Mapping[str, str]) -> None:
    rank = environ.get("RANK", "0")
    text = str(error) if isinstance(error, SmLlmError) else "".join(traceback.format_exception(error))
    print(f"rank {rank} failed: {text}", file=sys.stderr, flush=True)
    failure = container_paths(environ).failure
    try:
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_new(failure, f"rank {rank}: {text}\n".encode())
    except OSError:  # another process of the node was first, or there is no disk to tell it on
        return
