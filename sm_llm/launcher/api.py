"""The Python API of the launcher: load, launch, prepare; the command line calls exactly these."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from sm_llm.errors import PlanError, StorageError
from sm_llm.runs.run_paths import RUN_RECORD, generate_run_id, storage_root
from sm_llm.storage.uri import join, parse
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planner import Source
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.run import Run
    from sm_llm.launcher.run_handle import RunHandle
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.spec.loading.load import Loaded
    from sm_llm.spec.loading.overrides import Override

__all__ = ["launch", "load_spec", "prepare"]


def load_spec(source: Source, *overrides: Override, **fields: Any) -> JobSpec | WorkflowSpec:
    """The merged, checked specification of a recipe, YAML file, mapping or object. Raises ``SpecError``."""
    from sm_llm.spec.loading.load import load

    return load(source, overrides, fields).spec


@overload
def launch(
    source: Source,
    *overrides: Override,
    wait: bool = ...,
    dry_run: Literal[False] = ...,
    new: bool = ...,
    **fields: Any,
) -> Run: ...


@overload
def launch(source: Source, *overrides: Override, dry_run: Literal[True], **fields: Any) -> list[Submission]: ...


def launch(
    source: Source,
    *overrides: Override,
    wait: bool = False,
    dry_run: bool = False,
    new: bool = False,
    **fields: Any,
) -> Run | list[Submission]:
    """Plan a job or workflow and start it.

    If the storage holds an unfinished run of the same name and specification that no process is running, that run
    continues as its next attempt (``run.continued_attempt``); ``new`` starts another. Values that change nothing
    in the result (logging, retention, storage options, ...) make no other specification.

    Args:
        source: recipe name, YAML file, mapping or specification.
        overrides: ``key.path=value``, as on the command line.
        wait: return only when the run has ended, which a notebook shows meanwhile; raises ``RunFailed`` if it failed.
        dry_run: start nothing; return what would be submitted, one Submission per job.
        new: never continue an unfinished run.
        fields: overrides by keyword.

    Raises:
        SpecError, PlanError: nothing was started or written.
        UnfinishedRun: a run of this name is unfinished and of another specification, and ``new`` is not set.
        SubmitError: the same run is running, or the backend could not start it.
    """
    if dry_run:
        return preview(source, *overrides, **fields)[1]
    from sm_llm.launcher.job_inputs import relative_inputs
    from sm_llm.launcher.lifecycle import begin, proceed, startable  # a dry run needs nothing of what starts runs
    from sm_llm.launcher.planner import load_whole
    from sm_llm.launcher.run import Run
    from sm_llm.launcher.unfinished import EarlierRun, find_unfinished
    from sm_llm.storage.s3.s3_client import one_client

    loaded = load_whole(source, overrides, fields)
    plans = refusal = None
    try:
        plans = startable(loaded)
    except PlanError as error:
        # A run that was launched from another folder has its relative inputs there.
        if new or not {it.path for it in error.issues} <= relative_inputs(loaded.spec):
            raise
        refusal = error
    # The search reads many records of one store: they share a client.
    with one_client():
        found = EarlierRun() if new else find_unfinished(storage_root(loaded.spec), loaded)
        if found.run is None and refusal is not None:
            raise refusal
        if found.run is None:
            run = Run.of(begin(loaded, storage_root(loaded.spec), plans=plans))
        else:
            run = Run.of(proceed(found.run, loaded, plans=plans, changes=found.changes, by_fit=True))
    # Only now: until here the launch could have been refused.
    if found.left_behind:
        echo(found.left_behind, err=True)
    if wait:
        _wait_for(run)
    return run


def _wait_for(run: Run) -> None:
    if _in_notebook():
        run.watch()
    run.wait()


def _in_notebook() -> bool:
    """Whether a person reads what this process prints in a notebook's cell; IPython, where it is used, is loaded."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def preview(source: Source, *overrides: Override, **fields: Any) -> tuple[list[Plan], list[Submission]]:
    """The plans of a job or workflow, and what would be submitted for them: a dry run. Starts and writes nothing.

    Also what cannot run yet or here is rendered (``Plan.unsupported``). Raises ``SpecError`` and ``PlanError``.
    """
    from sm_llm.launcher.planner import compare_local_starts, load_whole, plan_loaded

    loaded = load_whole(source, overrides, fields)
    plans = plan_loaded(loaded)
    compare_local_starts(plans)
    plans, run = with_earlier_run(plans, loaded)
    return plans, render(plans, loaded, run)


def render(plans: Sequence[Plan], loaded: Loaded, run: RunHandle | None) -> list[Submission]:
    """What would be submitted for ``plans``: the next attempt of ``run``, or a new run."""
    from sm_llm.launcher.backend import backend, workflows_of
    from sm_llm.launcher.job_inputs import rendered
    from sm_llm.spec.job import WorkflowSpec

    run_id = generate_run_id(loaded.spec.name) if run is None else run.id
    run_uri = join(storage_root(loaded.spec), run_id)
    if isinstance(loaded.spec, WorkflowSpec):
        target = workflows_of(backend(loaded.spec.backend.name))
        return target.render_workflow(loaded.spec, plans, run_id, run_uri)
    if run is not None:
        from sm_llm.launcher.build_submission import build_submission

        return [build_submission(plan, run.run_store, run.record, digest=loaded.digest) for plan in plans]
    return [rendered(plan, run_id, run_uri) for plan in plans]


def plan_from_here(source: Source, overrides: Sequence[Override]) -> tuple[list[Plan], Loaded, RunHandle | None]:
    """For the command line: ``plan`` with what can be asked in S3, the specification, and the run that ``fit`` would
    continue, if any. Raises ``SpecError`` and ``PlanError``."""
    from sm_llm.launcher.continuation import compare_starts
    from sm_llm.launcher.planner import check_from_here, load_whole, plan_with_starts

    loaded = load_whole(source, overrides)
    plans = plan_with_starts(loaded)
    is_known = check_from_here(plans)
    compare_starts(plans, remote=True)
    plans, run = with_earlier_run(plans, loaded, in_s3=is_known)
    return plans, loaded, run


def with_earlier_run(plans: list[Plan], loaded: Loaded, *, in_s3: bool = False) -> tuple[list[Plan], RunHandle | None]:
    """Plans that start where ``launch`` would, and the unfinished run that it would continue, if any.

    What ``launch`` would do beside unfinished runs of the name goes to standard error; of runs in S3 only where
    ``in_s3`` allows to ask.
    """
    storage = storage_root(loaded.spec)
    folder = parse(storage).path
    if not (in_s3 if folder is None else any(folder.glob(f"{loaded.spec.name}-*/{RUN_RECORD}"))):
        return plans, None
    from sm_llm.launcher.unfinished import foresee

    try:
        found = foresee(storage, loaded, plans)
    except StorageError as error:
        echo(f"storage: unfinished runs cannot be looked for from here: {error}", err=True)
        return plans, None
    if found.words:
        echo(found.words, err=True)
    return [replace(it, start=found.starts.get(it.step or "", "")) for it in plans], found.run


def prepare(
    *sources: str,
    seq_length: int,
    tokenizer: str | None = None,
    name: str = "prepare",
    overrides: Sequence[Override] = (),
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
