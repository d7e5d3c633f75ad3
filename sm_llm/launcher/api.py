"""The Python face of the launcher: load, launch, attach, prepare; the command line calls exactly these."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from sm_llm.contract.run_paths import RunPaths
from sm_llm.contract.run_record import RunRecord
from sm_llm.errors import StorageError, SubmitError
from sm_llm.launcher.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.launcher.backends.base import Submission
    from sm_llm.launcher.plan import Plan, Source
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.spec.load import Loaded


def load_spec(source: Source, *overrides: str, **fields: Any) -> JobSpec | WorkflowSpec:
    """The merged, checked specification of a recipe, YAML file, mapping or object. Raises ``SpecError``."""
    from sm_llm.spec.load import load

    return load(source, overrides, fields).spec


@overload
def launch(
    source: Source, *overrides: str, wait: bool = ..., dry_run: Literal[False] = ..., new: bool = ..., **fields: Any
) -> Run: ...


@overload
def launch(source: Source, *overrides: str, dry_run: Literal[True], **fields: Any) -> list[Submission]: ...


def launch(
    source: Source,
    *overrides: str,
    wait: bool = False,
    dry_run: bool = False,
    new: bool = False,
    **fields: Any,
) -> Run | list[Submission]:
    """Plan a job or workflow and start it.

    If the storage holds an unfinished run of the same name and specification that no process is running, that run
    goes on as its next attempt (``run.continued_attempt`` tells); ``new`` starts another.

    Args:
        source: recipe name, YAML file, mapping or specification.
        overrides: ``key.path=value``, as on the command line.
        wait: return only when the run has ended; raises ``RunFailed`` if it failed.
        dry_run: start nothing; return what would be submitted, one Submission per job.
        new: never continue an unfinished run.
        fields: overrides by keyword.

    Raises:
        SpecError, PlanError: nothing was started or written.
        SubmitError: the same run is running, or the backend could not start it.
    """
    from sm_llm.launcher.plan import plan_loaded
    from sm_llm.launcher.stage import mint_run_id
    from sm_llm.spec.load import load

    loaded = load(source, overrides, fields)
    plans = plan_loaded(loaded)
    storage = storage_folder(loaded.spec)
    run_id = mint_run_id(loaded.spec.name)
    if dry_run:
        return _dry_run(loaded, plans, storage / run_id, run_id)
    unfinished = None if new else find_unfinished(storage, loaded)
    run = _start(loaded, plans, unfinished or storage / run_id, run_id, is_new=unfinished is None)
    if wait:
        run.wait()
    return run


def storage_folder(spec: JobSpec | WorkflowSpec) -> Path:
    """The folder that holds the runs of a specification. Raises ``StorageError`` for what is no folder."""
    from sm_llm.storage.uri import fill, open_store, parse

    uri = fill(spec.storage, run_name=spec.name)
    location = parse(uri)
    return location.path if location.path is not None else Path(open_store(uri).uri)


def find_unfinished(storage: Path, loaded: Loaded) -> Path | None:
    """The newest run in ``storage`` with the specification's name and digest that has not completed."""
    found = [
        (record.created, root)
        for root, record in _records(storage, f"{loaded.spec.name}-*")
        if (record.name, record.spec_digest) == (loaded.spec.name, loaded.digest) and not _completed(root)
    ]
    return max(found)[1] if found else None


def _records(storage: Path, pattern: str = "*") -> list[tuple[Path, RunRecord]]:
    """Run folders with their records; what another release wrote in a form we cannot read is not ours to judge."""
    found = []
    for path in storage.glob(f"{pattern}/run.json"):
        with contextlib.suppress(StorageError):
            found.append((path.parent, RunRecord.read(path)))
    return found


def _completed(root: Path) -> bool:
    from sm_llm.contract.states import RunState

    return Run(root).state is RunState.COMPLETED


def _start(loaded: Loaded, plans: Sequence[Plan], root: Path, run_id: str, *, is_new: bool) -> Run:
    from sm_llm.launcher.backends.registry import backend
    from sm_llm.launcher.stage import new_record, stage

    record_path = RunPaths(root).record
    if is_new:
        summaries = [plan.to_json() for plan in plans]
        record = new_record(run_id, loaded.spec, loaded.digest, loaded.origins, summaries, created=time.time())
        record.write(record_path)
    record = RunRecord.read(record_path)
    target = backend(loaded.spec.backend.name)
    if "steps" in record.spec:
        target.submit_workflow(str(root), record.next_attempt)
    else:
        target.submit(stage(plans[0], root, record))
    run = Run(root)
    run.continued_attempt = None if is_new else record.next_attempt
    return run


def _dry_run(loaded: Loaded, plans: Sequence[Plan], root: Path, run_id: str) -> list[Submission]:
    from sm_llm.launcher.stage import new_record, stage
    from sm_llm.launcher.workflow import step_root, step_run_id

    submissions = []
    for plan in plans:
        folder, own_id = root, run_id
        if plan.step is not None:
            folder, own_id = step_root(root, plan.step), step_run_id(run_id, plan.step)
        record = new_record(own_id, plan.job, plan.digest, {}, [], created=time.time())
        submissions.append(stage(plan, folder, record))
    return submissions


def attach(run: str | Path | None = None, *, storage: str | Path | None = None) -> Run:
    """The handle of a run that exists: by folder, by run id or name below ``storage``, or (None) the newest there.

    ``storage`` is the user's default storage, or ``./runs``. A name means its newest run.
    Raises ``SubmitError`` naming what there is.
    """
    if run is not None and (Path(run).expanduser() / "run.json").is_file():
        return Run(run)
    folder = _default_storage() if storage is None else Path(storage).expanduser()
    records = _records(folder)
    wanted = [(it.created, root) for root, it in records if run is None or str(run) in (it.run_id, it.name)]
    if wanted:
        return Run(max(wanted)[1])
    known = ", ".join(sorted(record.run_id for _, record in records)) or "none"
    asked = "no run yet" if run is None else f"no run {str(run)!r}"
    raise SubmitError(f"{asked} in {folder} (runs there: {known}). Name a run's folder, its id or its name")


def _default_storage() -> Path:
    from sm_llm.spec.defaults import read_defaults
    from sm_llm.spec.job import DEFAULT_STORAGE
    from sm_llm.storage.uri import parse

    location = parse(read_defaults(os.environ).values.storage or DEFAULT_STORAGE)
    return location.path or Path(DEFAULT_STORAGE)


def prepare(
    *sources: str,
    seq_length: int,
    tokenizer: str | None = None,
    name: str = "prepare",
    overrides: Sequence[str] = (),
    wait: bool = True,
    new: bool = False,
    **fields: Any,
) -> Run:
    """Turn text files and folders into packed rows: ``launch`` of a prepare task without a file to write first.

    The rows, the tokenizer and the account are in ``run.result``. Raises what ``launch`` raises.
    """
    task = {"kind": "prepare", "sources": list(sources), "seq_length": seq_length}
    if tokenizer is not None:
        task["tokenizer"] = tokenizer
    run: Run = launch({"name": name, "task": task}, *overrides, wait=wait, new=new, **fields)
    return run
