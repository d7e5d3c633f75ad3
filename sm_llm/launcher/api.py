"""The Python face of the launcher: load, launch, attach, prepare; the command line calls exactly these."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, overload

from sm_llm.contract.states import RunState
from sm_llm.errors import StorageError
from sm_llm.launcher.find_runs import attach, ls, run_records
from sm_llm.launcher.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sm_llm.launcher.backends.base import Submission
    from sm_llm.launcher.plan import Plan, Source
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.spec.load import Loaded

__all__ = ["attach", "launch", "load_spec", "ls", "prepare"]


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
    from sm_llm.launcher.begin import begin, proceed
    from sm_llm.launcher.plan import plan_loaded
    from sm_llm.launcher.stage import mint_run_id
    from sm_llm.spec.load import load

    loaded = load(source, overrides, fields)
    storage = storage_folder(loaded.spec)
    if dry_run:
        run_id = mint_run_id(loaded.spec.name)
        return _dry_run(loaded, plan_loaded(loaded), storage / run_id, run_id)
    unfinished = None if new else find_unfinished(storage, loaded)
    run = begin(loaded, storage) if unfinished is None else proceed(Run(unfinished), loaded)
    if wait:
        run.wait()
    return run


def storage_folder(spec: JobSpec | WorkflowSpec) -> Path:
    """The folder that holds the runs of a specification. Raises ``StorageError`` for what is no folder."""
    from sm_llm.storage.uri import fill, parse

    uri = fill(spec.storage, run_name=spec.name)
    location = parse(uri)
    if location.path is None:
        raise StorageError(f"{uri}: this version keeps runs in folders only")
    return location.path


def find_unfinished(storage: Path, loaded: Loaded) -> Path | None:
    """The newest run in ``storage`` with the specification's name and digest that has not completed."""
    found = [
        (record.created, root)
        for root, record in run_records(storage, f"{loaded.spec.name}-*")
        if (record.name, record.spec_digest) == (loaded.spec.name, loaded.digest)
        and Run(root).state is not RunState.COMPLETED
    ]
    return max(found)[1] if found else None


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
