"""Inputs in S3, and checkpoints to start from, before a job is started: a mistyped address is told here and now."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.contract.s3_home import CONFIG
from sm_llm.errors import Fault, PlanError, StorageError
from sm_llm.launcher.checks import local_folder
from sm_llm.spec.inputs import input_place
from sm_llm.spec.references import sources
from sm_llm.storage.find import commit_keys
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.result import NotPublished, result_address
from sm_llm.storage.s3 import S3Store
from sm_llm.storage.s3_client import code_of
from sm_llm.storage.s3_options import S3Options
from sm_llm.storage.uri import is_s3, parse, run_and_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.launcher.plan import Plan
    from sm_llm.spec.job import JobSpec
    from sm_llm.storage.uri import Location

START = "task.start."
_CHECKPOINT = f"{START}checkpoint"
_SHOWN = 8


def assert_inputs_exist(plans: Sequence[Plan], *, has_begun: bool = False) -> None:
    """Raise one ``PlanError`` for every input in S3 that is not there, and every checkpoint to start from.

    A run that ``has_begun`` continues from its own checkpoint. What cannot be looked at from here is told on standard
    error and left to the job: its role may have access.
    """
    faults = [fault for plan in plans for fault in _faults(plan, has_begun=has_begun)]
    if faults:
        raise PlanError(faults)


def _faults(plan: Plan, *, has_begun: bool) -> Iterator[Fault]:
    prefix = f"steps.{plan.step}." if plan.step else ""
    told: list[str] = []
    for path, place in _places(plan.job):
        is_told = any(f"{place}/".startswith(f"{it.rstrip('/')}/") for it in told)
        if is_told or (has_begun and path.startswith(START)):
            continue
        try:
            fault = _fault(path, place, plan.job.storage_options.model_dump())
        except StorageError as error:
            told.append(place)
            if code_of(error.__cause__) != "NoSuchBucket":
                print(f"{prefix}{path}: cannot be looked at from here: {error}. The job will see", file=sys.stderr)
                continue
            fault = Fault(path, "is not there: the bucket does not exist", place)
        if fault is not None:
            told.append(place)
            yield replace(fault, path=f"{prefix}{path}", origin=plan.origins.get(path, ""))


def _places(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Path and address of everything that can be looked for; named inputs first."""
    named = {f"inputs.{name}": input_place(value) for name, value in job.inputs.items()}
    for path, place in {**named, **sources(job)}.items():
        if is_s3(place) or (path == _CHECKPOINT and local_folder(place) is not None):
            yield path, place


def _fault(path: str, place: str, options: dict[str, Any]) -> Fault | None:
    if path == _CHECKPOINT:
        return _checkpoint_fault(place, options)
    try:
        if _exists(place, options):
            return None
    except NotPublished:
        return Fault(path, "is the result of a run that has not published it", place, "Wait for the run to complete")
    return Fault(path, "is not there: no object has this name, and none lies below it", place, "Check the address")


def _exists(uri: str, options: dict[str, Any]) -> bool:
    location = parse(result_address(uri, options))
    if _store(location, options).holds():
        return True
    folder, _, name = location.prefix.rpartition("/")
    return bool(name) and _store(replace(location, prefix=folder), options).head(name) is not None


def _checkpoint_fault(place: str, options: dict[str, Any]) -> Fault | None:
    run, step = run_and_step(place)
    location = parse(run)
    if location.path is not None and not location.path.is_dir():
        return Fault(_CHECKPOINT, "is not there", place, "Check the path")
    store = _store(location, options) if location.path is None else FolderStore(location.path)
    steps = [slot.step for slot, _ in commit_keys(store)]
    if not steps:
        remedy = f"Give the address of a run, and maybe @STEP; what it has tells: sm-llm checkpoints {run}"
        return Fault(_CHECKPOINT, "has no checkpoint", place, remedy)
    if step is None or step in steps:
        return None
    shown = ", ".join(map(str, steps[-_SHOWN:]))
    return Fault(_CHECKPOINT, f"has no checkpoint of step {step}", place, f"It has those of steps {shown}")


def _store(location: Location, options: dict[str, Any]) -> S3Store:
    assert location.bucket is not None
    return S3Store(location.bucket, location.prefix, S3Options(**options), CONFIG)
