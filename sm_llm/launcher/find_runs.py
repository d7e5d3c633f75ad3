"""Finds runs that exist: one by its folder, id, name or native job, or all that a storage root holds."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.run_paths import RUN_RECORD
from sm_llm.contract.states import RunState
from sm_llm.errors import StorageError, SubmitError
from sm_llm.launcher.backends.registry import BACKENDS, backend
from sm_llm.launcher.homes import assert_storage, homes_below, read_records
from sm_llm.launcher.run import Run
from sm_llm.spec.job import DEFAULT_STORAGE
from sm_llm.storage.uri import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.contract.run_home import RunHome
    from sm_llm.contract.run_record import RunRecord
    from sm_llm.storage.s3_options import S3Options

SHOWN_RUNS = 20
_JOB_ARN = re.compile(r"arn:[\w-]+:sagemaker:(?P<region>[\w-]+):\d{12}:training-job/(?P<name>[\w-]+)")
_EXECUTION_ARN = re.compile(r"arn:[\w-]+:sagemaker:[\w-]+:\d{12}:pipeline/[\w-]+/execution/\w+")


@dataclass(frozen=True)
class Listed:
    """One run of a storage root. Times in seconds since the epoch; ``ended`` is None while it runs."""

    run_id: str
    uri: str
    kind: str
    state: RunState
    reason: str | None = None
    attempts: int = 0
    created: float | None = None
    started: float | None = None
    """When the newest attempt began."""
    ended: float | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values; a loss that is no number, which JSON lacks, is text."""
        from sm_llm.launcher.metrics import to_json

        return to_json(asdict(self))


def attach(run: str | Path | None = None, *, storage: str | Path | None = None) -> Run:
    """The handle of a run that exists, from any process or machine that sees its storage.

    ``run`` is the run's folder or ``s3://`` (``file://``) URI, its id or name below ``storage``, the native job of one
    of its attempts (``local://host/process``, ``sagemaker://region/job`` or that job's ARN), or None: the newest run
    there. ``storage`` is the user's default storage,
    or ``./runs``. A name means its newest run. Raises ``SubmitError`` naming what there is.
    """
    if run is not None and (found := _by_uri(str(run), storage)):
        return found
    place = storage_address(storage)
    records = run_records(place)
    wanted = [(home, it) for home, it in records if run is None or str(run) in (it.run_id, it.name)]
    if wanted:
        return Run(max(wanted, key=_by_age)[0])
    raise SubmitError(_not_found(run, place, [record.run_id for _, record in sorted(records, key=_by_age)]))


def _by_age(found: tuple[RunHome, RunRecord]) -> tuple[float, str]:
    return found[1].created, found[1].run_id


def _not_found(run: str | Path | None, place: str, known: Sequence[str]) -> str:
    asked = "no run yet" if run is None else f"no run {str(run)!r}"
    earlier = f"{len(known) - SHOWN_RUNS} earlier ones, " if len(known) > SHOWN_RUNS else ""
    listed = ", ".join(known[-SHOWN_RUNS:]) or "none"
    return f"{asked} in {place} (runs there: {earlier}{listed}). Name a run's folder or URI, its id or its name"


def _by_uri(run: str, storage: str | Path | None) -> Run | None:
    if match := _JOB_ARN.fullmatch(run):
        run = f"sagemaker://{match['region']}/{match['name']}"
    elif _EXECUTION_ARN.fullmatch(run):
        run = f"sagemaker://{run}"
    scheme, separator, rest = run.partition("://")
    if separator and scheme in BACKENDS:
        return _by_native_job(run, scheme, rest, storage)
    if separator:
        return Run(run)
    return Run(run) if (Path(run).expanduser() / RUN_RECORD).is_file() else None


def _by_native_job(uri: str, scheme: str, rest: str, storage: str | Path | None) -> Run:
    """By what the job itself tells while it lives; afterwards by the attempts recorded below ``storage``."""
    target = backend(scheme)
    if (alive := target.find(rest)) is not None:
        return Run(alive)
    place = storage_address(storage)
    matching = [
        (attempt.started, home)
        for home, record in run_records(place)
        for attempt in record.attempts
        if target.native_uri(attempt) == uri
    ]
    if not matching:
        raise SubmitError(f"no run with the native job {uri} is alive on this machine or recorded in {place}")
    return Run(max(matching, key=lambda it: it[0])[1])  # process ids are used again: the newest holder of this one


def run_records(
    storage: str | Path, prefix: str = "", options: S3Options | None = None
) -> list[tuple[RunHome, RunRecord]]:
    """Homes of runs whose folder's name begins with ``prefix``, with their records.

    What another release wrote in a form we cannot read is not ours to judge.
    """
    found = read_records(homes_below(storage, prefix, options))
    return [(home, it) for home, it in found if it is not None and not isinstance(it, StorageError)]


def ls(storage: str | Path | None = None) -> list[Listed]:
    """Every run below a storage root (the user's default storage, or ``./runs``), the oldest first.

    Cheap: of each run only the record, the sign of life and the ends of its newest event log are read. A record that
    cannot be read is listed as ``unknown`` with the reason. Raises ``StorageError`` if the storage does not answer, and
    if nothing at all is at an address that was given.
    """
    place = storage_address(storage)
    found = [(home, it) for home, it in read_records(homes_below(place)) if it is not None]
    if not found and place != storage_address(DEFAULT_STORAGE):
        assert_storage(place)
    return sorted((_listed(home, it) for home, it in found), key=lambda it: (it.created or 0.0, it.run_id))


def _listed(home: RunHome, record: RunRecord | StorageError) -> Listed:
    from sm_llm.launcher.metrics import glance

    if isinstance(record, StorageError):
        return Listed(home.uri.rpartition("/")[2], home.uri, "unknown", RunState.UNKNOWN, str(record))
    run = Run(home)
    state, reason = run.describe()
    now = glance(run.job.events)
    last = record.attempts[-1] if record.attempts else None
    return Listed(
        run_id=run.id,
        uri=run.uri,
        kind=run.kind,
        state=state,
        reason=reason,
        attempts=len(record.attempts),
        created=record.created,
        started=last.started if last else None,
        ended=last.ended if last else None,
        step=now.step,
        total_steps=now.total_steps,
        loss=now.loss,
    )


def storage_address(storage: str | Path | None) -> str:
    """In full; None is the user's default storage, or ``./runs``."""
    from sm_llm.spec.defaults import read_defaults

    wanted = storage if storage is not None else read_defaults(os.environ).values.storage or DEFAULT_STORAGE
    return parse(wanted).uri
