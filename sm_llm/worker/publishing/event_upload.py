"""Brings a node's events to a run in S3 where no launcher does, and checks there for a request to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.contract.job_file import RUN_FOLDER_ENVIRONMENT, job_run_store
from sm_llm.runs.replication.periodic_task import PeriodicTask
from sm_llm.runs.stop_request import StopRequest
from sm_llm.worker.run_folder import is_own_event_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.worker.context import WorkerContext


def upload_events(context: WorkerContext, environ: Mapping[str, str]) -> PeriodicTask | None:
    """Start uploading the events of this node, on its first process; None where a launcher or a folder does.

    It never raises: a store that does not answer is reported, once.
    """
    run_store, process = job_run_store(context.job), context.process
    uploader = run_store.uploader(context.run.root, lambda name: is_own_event_file(name, context.job, process))
    if uploader is None or RUN_FOLDER_ENVIRONMENT in environ or not process.is_node_leader:
        return None
    # The worker itself only reads a local stop file: in S3 a periodic task checks, away from the training loop.
    requests = StopRequest(run_store.is_asked_to_stop, context.job.attempt, context.run.stop_file.touch)
    duties = [uploader.upload, requests.poll] if process.is_leader else [uploader.upload]
    return PeriodicTask(duties, lambda message: context.notice(message, "warning"), last=uploader.upload_all).start()
