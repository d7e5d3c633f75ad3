"""Finds runs that exist: one by its folder, id, name or native job, or all that a storage root holds."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.run_paths import RUN_RECORD
from sm_llm.contract.run_record import RunRecord
from sm_llm.contract.states import RunState
from sm_llm.errors import StorageError, SubmitError
from sm_llm.launcher.backends.registry import BACKENDS, backend
from sm_llm.launcher.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN_RUNS = 20


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
    """The handle of a run that exists, from any process or machine that sees its folder.

    ``run`` is the run's folder (or ``file://`` URI), its id or name below ``storage``, the native job of one of its
    attempts (``local://host/process``), or None: the newest run there. ``storage`` is the user's default storage, or
    ``./runs``. A name means its newest run. Raises ``SubmitError`` naming what there is.
    """
    if run is not None and (found := _by_uri(str(run), storage)):
        return found
    folder = _storage(storage)
    records = run_records(folder)
    wanted = [(it.created, root) for root, it in records if run is None or str(run) in (it.run_id, it.name)]
    if wanted:
        return Run(max(wanted)[1])
    raise SubmitError(_not_found(run, folder, [record.run_id for _, record in sorted(records, key=_by_age)]))


def _by_age(found: tuple[Path, RunRecord]) -> float:
    return found[1].created


def _not_found(run: str | Path | None, folder: Path, known: Sequence[str]) -> str:
    asked = "no run yet" if run is None else f"no run {str(run)!r}"
    earlier = f"{len(known) - SHOWN_RUNS} earlier ones, " if len(known) > SHOWN_RUNS else ""
    listed = ", ".join(known[-SHOWN_RUNS:]) or "none"
    return f"{asked} in {folder} (runs there: {earlier}{listed}). Name a run's folder, its id or its name"


def _by_uri(run: str, storage: str | Path | None) -> Run | None:
    scheme, separator, rest = run.partition("://")
    if separator and scheme in BACKENDS:
        return _by_native_job(run, scheme, rest, storage)
    if separator:
        return Run(run)
    return Run(run) if (Path(run).expanduser() / RUN_RECORD).is_file() else None


def _by_native_job(uri: str, scheme: str, rest: str, storage: str | Path | None) -> Run:
    """By what the job itself tells while it lives; afterwards by the attempts recorded below ``storage``."""
    target = backend(scheme)
    if (root := target.find(rest)) is not None:
        return Run(root)
    folder = _storage(storage)
    matching = [
        (attempt.started, root)
        for root, record in run_records(folder)
        for attempt in record.attempts
        if target.native_uri(attempt) == uri
    ]
    if not matching:
        raise SubmitError(f"no run with the native job {uri} is alive on this machine or recorded in {folder}")
    return Run(max(matching)[1])  # process ids are used again: the newest holder of this one


def run_records(storage: Path, pattern: str = "*") -> list[tuple[Path, RunRecord]]:
    """Run folders with their records; what another release wrote in a form we cannot read is not ours to judge."""
    found = []
    for path in storage.glob(f"{pattern}/{RUN_RECORD}"):
        with contextlib.suppress(StorageError):
            found.append((path.parent, RunRecord.read(path)))
    return found


def ls(storage: str | Path | None = None) -> list[Listed]:
    """Every run below a storage root (the user's default storage, or ``./runs``), the oldest first.

    Cheap: of each run only the record, the lock and the ends of its newest event log are read. A record that cannot
    be read is listed as ``unknown`` with the reason.
    """
    paths = _storage(storage).glob(f"*/{RUN_RECORD}")
    return sorted((_listed(path.parent) for path in paths), key=lambda it: (it.created or 0.0, it.run_id))


def _listed(root: Path) -> Listed:
    from sm_llm.launcher.metrics import glance

    try:
        run = Run(root)
        record, (state, reason) = run.record, run.describe()
        now = glance(run.job.paths.events)
    except StorageError as error:
        return Listed(root.name, str(root), "unknown", RunState.UNKNOWN, str(error))
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


def _storage(storage: str | Path | None) -> Path:
    from sm_llm.spec.defaults import read_defaults
    from sm_llm.spec.job import DEFAULT_STORAGE
    from sm_llm.storage.uri import parse

    wanted = storage if storage is not None else read_defaults(os.environ).values.storage or DEFAULT_STORAGE
    location = parse(wanted)
    if location.path is None:
        raise StorageError(f"{wanted}: this version finds runs in folders only")
    return location.path
