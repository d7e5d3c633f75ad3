"""Finds runs that exist: one by its folder, id, name or native job, or all that a storage root holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import CheckpointError, RunNotFound, StorageError
from sm_llm.launcher.backend import backend
from sm_llm.launcher.observe.listed import Listed
from sm_llm.launcher.run import Run
from sm_llm.runs.locate import assert_storage, find_run_store, read_records, run_stores_below
from sm_llm.runs.run_paths import RUN_RECORD, storage_root
from sm_llm.runs.run_states import RunState
from sm_llm.spec.backends.table import BACKENDS
from sm_llm.spec.job import DEFAULT_STORAGE
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.uri import parse
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.launcher.backend import NativeJob
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.comparison.leaves import Difference
    from sm_llm.spec.loading.load import Loaded

# In a message: of hundreds of runs the newest are the likely ones.
SHOWN_RUNS = 20
_SPEC_SUFFIXES = (".yaml", ".yml")


def attach(run: str | Path | None = None, *, storage: str | Path | None = None, running_first: bool = False) -> Run:
    """The handle of a run that exists, from any process or machine that sees its storage.

    ``run`` is the run's folder or ``s3://`` (``file://``) URI, its id or name, the native job of one of its attempts
    (``local://host/process``, ``sagemaker://region/job`` or that job's ARN), a specification's YAML file (the newest
    run of that specification, in the storage that it names), or None: the newest run. Names, ids and None are looked
    for below ``storage``; without it below the user's default storage and ``./runs``. A name means its newest run;
    with ``running_first``, where that has ended, the newest that runs. Others that run are named on standard error.
    Raises ``RunNotFound`` naming where it searched, and what is there.
    """
    # An address or a native job means exactly one run and a file means one specification; only a bare name is searched
    # for.
    if run is not None and (found := _by_uri(str(run), storage)):
        return found
    # After addresses: a folder of a run may end with .yaml, too.
    if run is not None and str(run).endswith(_SPEC_SUFFIXES) and Path(run).expanduser().is_file():
        return _by_spec(Path(run).expanduser(), storage)
    locations = storage_locations(storage)
    records = {location: run_records(location) for location in locations}
    wanted = [it for found in records.values() for it in found if run is None or str(run) in (it[1].run_id, it[1].name)]
    if wanted:
        chosen, is_reported = _chosen(wanted, running_first=running_first)
        if not is_reported:
            _name_unfinished(str(run), chosen[1], [record for _, record in wanted])
        return Run(chosen[0])
    raise RunNotFound(_not_found("no run yet" if run is None else f"no run {str(run)!r}", records))


def _chosen(
    wanted: Sequence[tuple[RunStore, RunRecord]], *, running_first: bool
) -> tuple[tuple[RunStore, RunRecord], bool]:
    """The newest run, or the newest that runs, and whether something was reported: others that run are named."""
    newest = max(wanted, key=_by_age)
    open_ended = sorted((it for it in wanted if it[1].outcome is None and it[1].attempts), key=_by_age)
    running = [it for it in open_ended[-SHOWN_RUNS:] if not Run(it[0]).state.is_final]
    chosen = running[-1] if running_first and running else newest
    if chosen is not newest:
        echo(f"{chosen[1].run_id} is taken: it is running, and {newest[1].run_id}, the newest run, is not", err=True)
    if others := [it[1].run_id for it in running if it is not chosen]:
        echo(f"Also running: {', '.join(others)}", err=True)
    return chosen, chosen is not newest or bool(others)


def _name_unfinished(asked: str, chosen: RunRecord, wanted: Sequence[RunRecord]) -> None:
    """Report which run a name stands for, and which others of that name are not finished.

    A branch has the name of its run, so ``stop NAME`` would otherwise leave that one running without a word.
    """
    others = [it.run_id for it in wanted if it.run_id != chosen.run_id and it.outcome is None]
    if asked == chosen.name and others:
        echo(f"{asked} is taken for {chosen.run_id}, its newest run. Not finished: {', '.join(others)}", err=True)


def _by_spec(file: Path, storage: str | Path | None) -> Run:
    """The newest run of the specification in a file, as it is now."""
    from sm_llm.spec.loading.load import load

    loaded = load(file)
    location = storage_root(loaded.spec) if storage is None else storage_address(storage)
    # The file names the storage, so it is reached as the file states.
    options = S3Options(**loaded.spec.storage_options.model_dump())
    # Ids begin with the name, so a listing by prefix spares reading every record. It also finds names that only begin
    # like this one.
    records = run_records(location, f"{loaded.spec.name}-", options)
    wanted = [it for it in records if it[1].name == loaded.spec.name and differences_to(it[1], loaded) == []]
    if wanted:
        return Run(max(wanted, key=_by_age)[0])
    raise RunNotFound(_not_found(f"no run of the specification {file} as it is now", {location: records}))


def differences_to(record: RunRecord, loaded: Loaded) -> list[Difference] | None:
    """What makes a loaded specification another one than a run's; None where another release wrote the record in a
    form that this one cannot read."""
    from pydantic import ValidationError

    from sm_llm.spec.comparison.leaves import spec_differences

    # An equal digest settles it without parsing the record, whatever release wrote it.
    if record.spec_digest == loaded.digest:
        return []
    try:
        return spec_differences(record.load_spec(), loaded.spec)
    except ValidationError:
        return None


def _by_age(found: tuple[RunStore, RunRecord]) -> tuple[float, str]:
    return found[1].created, found[1].run_id


def _not_found(asked: str, records: Mapping[str, Sequence[tuple[RunStore, RunRecord]]]) -> str:
    """``asked`` is what there is not; ``records`` are the places that were searched, with the runs in each."""
    locations = " or ".join(f"{location} (runs there: {_ids(found)})" for location, found in records.items())
    return f"{asked} in {locations}. Name a run's folder or URI, its id or its name, or where it is: --storage URI"


def _ids(records: Sequence[tuple[RunStore, RunRecord]]) -> str:
    known = [record.run_id for _, record in sorted(records, key=_by_age)]
    earlier = f"{len(known) - SHOWN_RUNS} earlier ones, " if len(known) > SHOWN_RUNS else ""
    return earlier + (", ".join(known[-SHOWN_RUNS:]) or "none")


def _by_uri(run: str, storage: str | Path | None) -> Run | None:
    scheme, separator, _ = run.partition("://")
    named = [scheme] if separator else list(BACKENDS) if ":" in run else []  # names and folders have no colon
    for name in named:
        if name in BACKENDS and (job := backend(name).parse_native(run)) is not None:
            return _by_native_job(job, name, storage)
    if separator:
        return _at(run)
    return Run(run) if (Path(run).expanduser() / RUN_RECORD).is_file() else None


def _at(uri: str) -> Run:
    """The run at an address. Raises ``RunNotFound`` naming the runs beside it, where there is none."""
    run_store = find_run_store(uri)
    if run_store.exists():
        return Run(run_store)
    above = run_store.uri.rpartition("/")[0]
    # Nothing can be listed above a bucket or the root of a file system.
    beside = run_records(above) if above.rstrip("/") not in ("", "s3:") else []
    raise RunNotFound(
        _not_found(f"no run {run_store.uri}: there is no {RUN_RECORD} below this address. Searched", {above: beside})
    )


def _by_native_job(job: NativeJob, name: str, storage: str | Path | None) -> Run:
    """By what the job itself holds while it exists; afterwards by the attempts recorded below ``storage``."""
    # A platform forgets its jobs after a while; the records do not.
    if (alive := job.find_run()) is not None:
        return Run(alive)
    locations = storage_locations(storage)
    matching = [
        (attempt.started, run_store)
        for location in locations
        for run_store, record in run_records(location)
        for attempt in record.attempts
        if attempt.native_uri(name) == job.uri
    ]
    if not matching:
        raise RunNotFound(
            f"no run with the native job {job.uri} is alive on this machine or recorded in {' or '.join(locations)}"
        )
    return Run(max(matching, key=lambda it: it[0])[1])  # process ids are used again: the newest holder of this one


def run_records(
    storage: str | Path, prefix: str = "", options: S3Options | None = None
) -> list[tuple[RunStore, RunRecord]]:
    """Homes of runs whose folder's name begins with ``prefix``, with their records.

    What another release wrote in a form we cannot read is not ours to judge.
    """
    found = read_records(run_stores_below(storage, prefix, options))
    return [(run_store, it) for run_store, it in found if it is not None and not isinstance(it, StorageError)]


def ls(storage: str | Path | None = None) -> list[Listed]:
    """Every run below a storage root (the user's default storage, or ``./runs``), the oldest first.

    Cheap: of each run only the record, the sign of life and the ends of its newest event log are read. A record that
    cannot be read is listed as ``unknown`` with the reason. Raises ``StorageError`` if the storage does not answer, and
    ``RunNotFound`` if nothing at all is at an address that was given.
    """
    location = storage_address(storage)
    found = [(run_store, it) for run_store, it in read_records(run_stores_below(location)) if it is not None]
    # ./runs does not exist before the first run; any other place with nothing in it is probably a mistyped address.
    if not found and location != storage_address(DEFAULT_STORAGE):
        assert_storage(location)
    return sorted((_row(run_store, it) for run_store, it in found), key=lambda it: (it.created or 0.0, it.run_id))


def _row(run_store: RunStore, record: RunRecord | StorageError) -> Listed:
    """What cannot be read of one run costs its own row. A store that does not answer was met before, by the listing."""
    try:
        if isinstance(record, StorageError):
            raise record
        return _listed(run_store, record)
    except (StorageError, CheckpointError) as error:
        return Listed(run_store.uri.rpartition("/")[2], run_store.uri, "unknown", RunState.UNKNOWN, str(error))


def _listed(run_store: RunStore, record: RunRecord) -> Listed:
    from sm_llm.runs.events.run_metrics import glance

    run = Run(run_store)
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


def storage_locations(storage: str | Path | None) -> list[str]:
    """Where a run that is not named by its address is looked for: what was given, else the default storage and
    ``./runs``."""
    default = storage_address(storage)
    return [default] if storage is not None else list(dict.fromkeys([default, storage_address(DEFAULT_STORAGE)]))


def storage_address(storage: str | Path | None) -> str:
    """In full; None is the user's default storage, or ``./runs``."""
    from sm_llm.spec.loading.defaults import read_defaults

    wanted = storage if storage is not None else read_defaults(os.environ).values.storage or DEFAULT_STORAGE
    return parse(wanted).uri
