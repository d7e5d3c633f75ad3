"""The folder in which a worker process finds and writes its run's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import RUN_FOLDER_ENVIRONMENT, job_run_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.contract.job_file import JobFile
    from sm_llm.runs.run_paths import ContainerPaths
    from sm_llm.worker.process_info import ProcessInfo

_FOLDER = "run"


def run_folder(job: JobFile, process: ProcessInfo, container: ContainerPaths, environ: Mapping[str, str]) -> Path:
    """The folder of the run on this node: where it is kept, where the launcher works, or one in scratch.

    Into the last, the node's first process brings what an earlier container of this attempt has written, so that the
    event log continues. Raises ``StorageError``.
    """
    run_store = job_run_store(job)
    if not run_store.is_remote:
        # A folder that all nodes see needs no copy.
        return run_store.root
    if RUN_FOLDER_ENVIRONMENT in environ:
        return Path(environ[RUN_FOLDER_ENVIRONMENT])
    root = container.scratch / _FOLDER
    if process.is_node_leader:
        run_store.copied(f"events/attempt-{job.attempt}-", lambda name: is_own_event_file(name, job, process), root)
    return root


def is_own_event_file(name: str, job: JobFile, process: ProcessInfo) -> bool:
    """Whether an event file is written on this node: by its watchdog, or by one of its processes."""
    begin = f"events/attempt-{job.attempt}-"
    writer = name.removeprefix(begin).removesuffix(".jsonl")
    # ``rank3-failure`` and ``rank3-watchdog`` are written by rank 3, too.
    number = writer.removeprefix("rank").partition("-")[0]
    first = process.node * process.local_world_size
    of_rank = number.isdigit() and first <= int(number) < first + process.local_world_size
    return name.startswith(begin) and (of_rank or writer == f"node{process.node}-watchdog")
