"""The verbs of a run's life: begin, continue (proceed, resume, finish), stop, repeat, branch from a checkpoint."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.errors import CheckpointError, LaunchRefused, StorageError, SubmitError
from sm_llm.launcher.attempt_outcome import steps_have_worked
from sm_llm.launcher.backend import backend
from sm_llm.launcher.build_submission import build_submission, new_record
from sm_llm.launcher.continuation import ChangedRun, assert_changes_apply, assert_continues, assert_starts
from sm_llm.launcher.job_inputs import anchored
from sm_llm.launcher.observe.status import status_of
from sm_llm.launcher.planner import plan_loaded
from sm_llm.launcher.planning.input_locations import assert_inputs_exist
from sm_llm.launcher.planning.plan import assert_supported
from sm_llm.launcher.run_handle import POLL_SECONDS, RunHandle
from sm_llm.launcher.submission import Change, submit_job, submit_workflow
from sm_llm.runs.events.events import EventWriter, StopRequested
from sm_llm.runs.locate import is_own_endpoint, launch_folder, remember_launch
from sm_llm.runs.run_paths import STEPS, generate_run_id, storage_root
from sm_llm.runs.run_record import RequestedRun
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import run_store_at
from sm_llm.spec.loading.overrides import parse_fields, parse_overrides, texts, without_step
from sm_llm.storage.uri import join
from sm_llm.terminal import counted, echo, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.loading.load import Loaded
    from sm_llm.spec.loading.overrides import Override

Resume = int | Literal["newest"] | None


def startable(loaded: Loaded, folder: Path | None = None) -> list[Plan]:
    """The plans of what can be started: the gate before anything in the storage is read or written.

    Relative inputs are taken from ``folder``, by default the working directory. Raises ``PlanError``.
    """
    # Only where another folder is meant: otherwise places keep the form that they were written in.
    spec = loaded.spec if folder is None or folder == Path.cwd() else anchored(loaded.spec, folder)
    plans = plan_loaded(replace(loaded, spec=spec))
    assert_supported(plans)
    return plans


def begin(
    loaded: Loaded, storage: str, *, plans: Sequence[Plan] | None = None, folder: Path | None = None,
    made_from: str | None = None,
) -> RunHandle:  # fmt: skip
    """Start a new run below the address ``storage``; ``plans`` are those of ``startable``, where it was asked before.

    Raises ``PlanError`` (nothing was written) and ``SubmitError``.
    """
    plans = plans or startable(loaded, folder)
    assert_inputs_exist(plans)
    # Compares the checkpoint to start from with the model, which reads the storage: after what costs nothing.
    notes = assert_starts(plans)
    run_id = generate_run_id(loaded.spec.name)
    summaries = [plan.to_json() for plan in plans]
    record = new_record(
        run_id, loaded.spec, loaded.digest, loaded.origins, summaries,
        created=time.time(), folder=folder, made_from=made_from,
    )  # fmt: skip
    run_store = run_store_at(join(storage, run_id), loaded.spec.storage_options.model_dump())
    # What can be refused was refused before this: a record without an attempt is a run that waits for its job.
    run_store.create(record)
    remember_launch(run_store, record)
    _submit(plans, run_store, record)
    echo(*notes, err=True)  # only now: a launch that is refused begins nothing
    return RunHandle(run_store)


def proceed(
    run: RunHandle, loaded: Loaded, *, plans: Sequence[Plan] | None = None, resume: Resume = None,
    changes: Sequence[str] = (), by_fit: bool = False,
) -> RunHandle:  # fmt: skip
    """Start the next attempt of a run with a specification that may have ``changes``; ``by_fit``: ``launch`` asks.

    ``plans`` are those of the working directory, where they were made before.

    Raises ``PlanError`` and ``SubmitError``; then the run is as it was.
    """
    record = run.record
    folder = launch_folder(run.run_store, record)
    if plans is None or folder not in (None, Path.cwd()):
        plans = startable(loaded, folder)
    assert_inputs_exist(plans, has_begun=True)
    continued = assert_continues(
        run, plans, resume if isinstance(resume, int) else None, changes=changes, by_fit=by_fit
    )  # fmt: skip
    number = record.next_attempt

    # Only once the attempt is claimed: of two launches at once, one may retire checkpoints and change the record.
    def make() -> None:
        if isinstance(resume, int):
            _retire(run, resume, number)
        if changes:
            run.run_store.update(lambda held: held.changed(_asked(loaded, plans), number, changes))

    dropped = record.attempts[-1].dropped_sentence if record.attempts else ""
    change = Change(make, lambda: _undo(run, record, number))
    _submit(plans, run.run_store, record, resume=resume, digest=loaded.digest, change=change)
    echo(*filter(None, [dropped]), *continued.notes, err=True)
    again = RunHandle(run.run_store)
    again.continued_attempt = number
    for plan in plans:
        step = plan.step or ""
        start = {"start": continued.starts[step]} if step in continued.starts else {}
        again.continued_plans[step] = {"settings": plan.settings | start, "warnings": plan.warnings}
    return again


def _submit(
    plans: Sequence[Plan], run_store: RunStore, record: RunRecord, *, resume: Resume = None, digest: str = "",
    change: Change | None = None,
) -> None:  # fmt: skip
    target = backend(plans[0].job.backend.name)
    if "steps" in record.spec:
        submit_workflow(target, run_store, record.next_attempt, change)
    else:
        submit_job(target, build_submission(plans[0], run_store, record, resume=resume, digest=digest), change)


def _asked(loaded: Loaded, plans: Sequence[Plan]) -> RequestedRun:
    plan = [it.to_json() for it in plans]
    spec = loaded.spec.model_dump(mode="json")
    return RequestedRun(spec=spec, spec_digest=loaded.digest, origins=loaded.origins, plan=plan)


def _undo(run: RunHandle, record: RunRecord, attempt: int) -> None:
    """Undo what an attempt has changed that was claimed and then could not be started."""
    from sm_llm.storage.publication.retire import bring_back

    # Checkpoints first: whoever reads the restored record finds the ones that it continues from.
    bring_back(run.run_store.store, label=f"attempt-{attempt}")
    run.run_store.update(lambda held: held.unchanged_since(record))


def _retire(run: RunHandle, step: int, attempt: int) -> None:
    from sm_llm.storage.publication.retire import retire_after

    retire_after(run.run_store.store, step, label=f"attempt-{attempt}")


def recorded_spec(
    record: RunRecord, overrides: Sequence[Override] = (), fields: Mapping[str, Any] | None = None, *, start: str = ""
) -> Loaded:
    """The record's specification with ``overrides`` merged in; values keep the origin that the record holds.

    ``start`` is a checkpoint to start from. Raises ``SpecError``.
    """
    from sm_llm.launcher.planner import load_whole

    spec = dict(record.spec)
    if start:
        spec["task"] = {**spec["task"], "start": {"checkpoint": start}}
    loaded = load_whole(spec, overrides, fields, recorded=record.origins)
    # A value whose origin the overrides leave as it is was not changed by them: its recorded origin still holds.
    unchanged = load_whole(spec).origins
    origins = {
        path: record.origins.get(path, "the run's record") if unchanged.get(path) == origin else origin
        for path, origin in loaded.origins.items()
    }
    return replace(loaded, origins=origins)


def resume(run: RunHandle, overrides: Sequence[Override], fields: Mapping[str, Any], step: int | None) -> RunHandle:
    """Continue ``run`` from its newest checkpoint or that of ``step``; see ``Run.resume``."""
    # Two attempts at once would write the same checkpoints and events.
    if (state := run.state) in (RunState.RUNNING, RunState.RESTARTING):
        raise LaunchRefused(f"{run.id} is {state.value}. Stop it first: sm-llm stop {quoted(run.uri)}")
    if state.is_completed:
        raise LaunchRefused(f"{run.id} is completed, there is nothing left to resume.{_longer(run)}")
    _settle_changes(run)
    wanted: Resume = "newest" if step is None else step
    given = texts(overrides, fields)
    if run.kind == "workflow":
        if step is not None:
            raise LaunchRefused(f"{run.id} is a workflow; name the training run below it: {run.job.uri}")
        _assert_begun(run, given)
        wanted = None  # a step that has not begun has no checkpoint, so it may start as it was planned
    else:
        _assert_checkpoint(run, step, given)
    loaded = recorded_spec(run.record, _own(run, overrides), fields)
    _assert_own_endpoint(run, overrides, fields)
    assert_changes_apply(ChangedRun(run, recorded_spec(run.record).spec, loaded, given))
    return proceed(run, loaded, resume=wanted, changes=given)


def _settle_changes(run: RunHandle) -> None:
    """Undo changes whose attempt took no step and has no recorded end, since its launcher or supervisor was killed."""
    record = run.record
    if (number := record.unsettled) is None:
        return
    attempt, jobs = record.attempt(number), (run, *run.steps.values())
    kept = attempt is not None and steps_have_worked((it.run_store for it in jobs), attempt)
    run.run_store.update(lambda held: held if held.before != record.before else held.settled(number, kept=kept))


def _assert_own_endpoint(run: RunHandle, overrides: Sequence[Override], fields: Mapping[str, Any]) -> None:
    """Raise ``SubmitError`` where only the record names a host that signed requests would go to."""
    endpoint = (run.record.spec.get("storage_options") or {}).get("endpoint_url")
    given = {path for path, _ in (*parse_overrides(overrides)[0], *parse_fields(fields)[0])}
    is_given = bool(given & {("storage_options",), ("storage_options", "endpoint_url")})
    if endpoint is None or is_given or is_own_endpoint(run.run_store, endpoint):
        return
    raise LaunchRefused(
        f"{run.id}: its record sends requests to {endpoint}, which nothing of yours names. If you trust it, add "
        f"storage_options.endpoint_url={endpoint}; otherwise storage_options.endpoint_url=null"
    )


def _longer(run: RunHandle) -> str:
    """How to train on from the last checkpoint of a completed training."""
    job = run.job
    task = job.record.spec.get("task", {})
    lengths = {name: task.get(name) for name in ("max_steps", "max_tokens", "max_epochs")}
    given = next(((name, value) for name, value in lengths.items() if value is not None), None)
    if job.kind != "train" or given is None or not any(it.valid for it in job.checkpoints()):
        return ""
    twice = f"task.{given[0]}={2 * given[1]:g}" if isinstance(given[1], float) else f"task.{given[0]}={2 * given[1]}"
    return f" Train on from its last checkpoint in a new run: sm-llm branch {quoted(run.uri, twice)}"


def _assert_begun(workflow: RunHandle, given: Sequence[str]) -> None:
    steps = workflow.steps.values()
    if not any(step.result is not None or step.checkpoints() for step in steps):
        raise CheckpointError(
            f"{workflow.id} has no finished step and no checkpoint to resume from. {_anew(workflow, given)}"
        )


def _assert_checkpoint(run: RunHandle, step: int | None, given: Sequence[str] = ()) -> int:
    """The step that a resume would begin with. Raises ``CheckpointError``, naming what there is.

    ``given`` are changes that were asked for, which the way out repeats.
    """
    found = run.checkpoints()
    usable = [it.step for it in found if it.valid]
    if step is None and usable:
        return usable[-1]
    if step is not None and step in usable:
        return step
    damaged = "; ".join(f"step {it.step}: {it.reason}" for it in found if not it.valid)
    which = "no usable checkpoint" if step is None else f"no usable checkpoint of step {step}"
    there = f"Usable steps: {', '.join(map(str, usable)) or 'none'}{f'; damaged: {damaged}' if damaged else ''}"
    raise CheckpointError(f"{run.id} has {which}. {there}. {'' if usable else _anew(run, given)}".rstrip())


def _anew(run: RunHandle, given: Sequence[str]) -> str:
    return f"Begin anew with: sm-llm rerun {quoted(run.uri, *given)}"


def stop(run: RunHandle, *, now: bool = False, wait: bool = False) -> RunState:
    """Ask a run to stop; see ``Run.stop``."""
    attempts = run.attempts
    if not attempts or (state := run.state).is_final:
        raise SubmitError(f"{run.id} is not running: it is {run.state.value}")
    # Asked first: an event of a stop that was refused would be read by everyone who follows the run.
    run.backend.stop(run.run_store, attempts[-1], now=now)
    _note_stop(run.job, now=now)
    # Each read of the state asks the platform, and records an end once there is one.
    while wait and not (state := run.state).is_final:
        time.sleep(POLL_SECONDS)
    return state


def _note_stop(job: RunHandle, *, now: bool) -> None:
    """Write into the log of the job that runs that it was asked to stop, so that everyone who follows it sees so.

    The log of an attempt in S3 is written, and uploaded, by the machine where it runs. From elsewhere the request
    itself, which lies in S3, is what others see.
    """
    if not job.attempts:
        return
    number = job.attempts[-1].number
    if not job.run_store.has_originals(number):
        return
    writer = EventWriter(job.paths.event_file(number, "stop"), number)
    writer.write(StopRequested(now))
    writer.close()


def finish(run: RunHandle) -> RunHandle:
    """Publish the result of a run that has done all its steps; see ``Run.finish``."""
    job = run.job
    if run.state.is_completed:
        raise LaunchRefused(f"{run.id} is completed: its result is {run.result}")
    total = status_of(job).progress.total_steps
    newest = max((it.step for it in job.checkpoints() if it.valid), default=None)
    if total is None or newest is None or newest < total:
        saved = f"{newest or 0} of {counted(total, 'step')}" if total else "nothing" if newest is None else "not all"
        # A resume needs a checkpoint, or of a workflow a step that has its result.
        can_resume = newest is not None or any(it.result is not None for it in run.steps.values())
        next_ = f"Continue it with: sm-llm resume {quoted(run.uri)}" if can_resume else _anew(run, ())
        raise LaunchRefused(f"{run.id} has not done its work: {saved} saved. {next_}")
    # The next attempt finds its work done, publishes from the newest checkpoint, and trains nothing.
    return resume(run, (), {}, None)


def rerun(run: RunHandle, overrides: Sequence[Override], fields: Mapping[str, Any]) -> RunHandle:
    """Repeat ``run`` as a new one, from its record; see ``Run.rerun``."""
    _assert_own_endpoint(run, overrides, fields)
    return _new_from(run, recorded_spec(run.record, _own(run, overrides), fields))


def branch(run: RunHandle, overrides: Sequence[Override], fields: Mapping[str, Any], step: int | None) -> RunHandle:
    """Begin a new run from a checkpoint of ``run``; see ``Run.branch``."""
    job = run.job
    if job.kind != "train":
        raise LaunchRefused(f"{run.id} trains nothing, so it has no checkpoint to branch from")
    _assert_own_endpoint(job, overrides, fields)
    begins = _assert_checkpoint(job, step, texts(overrides, fields))
    with _pinned(job, begins):
        start = f"{job.uri}@{_assert_checkpoint(job, begins)}"  # it may have been collected before it was pinned
        return _new_from(job, recorded_spec(job.record, _own(job, overrides), fields, start=start))


def _own(run: RunHandle, overrides: Sequence[Override]) -> Sequence[Override]:
    """Changes by the run's own paths: a workflow's step is a job, and may be changed by its path in the workflow."""
    # A step's own run lies at WORKFLOW/steps/STEP.
    above, _, step = run.uri.rpartition("/")
    return without_step(overrides, step) if above.endswith(f"/{STEPS}") else overrides


@contextmanager
def _pinned(job: RunHandle, step: int) -> Iterator[None]:
    """Keep the checkpoint until the branch has read it, where its run may be written to.

    A branch that is refused inside reads nothing: then the pin is released.
    """
    from sm_llm.storage.publication.pins import pin

    mine = None
    try:
        # A store that may only be read is a source to branch from all the same, so a pin that fails is a warning.
        mine = pin(job.run_store.store, step)
    except StorageError as error:
        why = f"{job.id} may delete its checkpoint of step {step} before the branch has begun"
        echo(f"{why}, if it still trains: it could not be pinned there ({error})", err=True)
    try:
        yield
    except BaseException:
        with suppress(StorageError):  # the refusal is what there is to report; a pin ends by itself
            if mine is not None:
                mine.release()
        raise


def _new_from(run: RunHandle, loaded: Loaded) -> RunHandle:
    record = run.record
    # The recorded storage is where the run was launched to. The folder may have been moved since, so unless the storage
    # is changed, the new run lies beside this one.
    moved = loaded.spec.storage != record.spec["storage"]
    storage = storage_root(loaded.spec) if moved else run.storage
    return begin(loaded, storage, folder=launch_folder(run.run_store, record), made_from=record.run_id)


def differences(record: RunRecord, folder: Path | None = None) -> list[str]:
    """What is not as it was when the run was launched: versions, this package's code, the git commit in ``folder``."""
    from sm_llm.launcher.build_submission import RECORDED_PACKAGES
    from sm_llm.launcher.job_inputs import code_digest
    from sm_llm.runs.git_state import git_state
    from sm_llm.runs.run_record import package_versions

    now = package_versions(RECORDED_PACKAGES)
    # A package that is new, or gone, is a difference as well.
    names = sorted({*now, *record.versions})
    found = [
        f"{name} {record.versions.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in names
        if record.versions.get(name) != now.get(name)
    ]
    if record.code_digest not in (None, code_digest()):
        found.append("the code of sm_llm")
    git = git_state(folder, with_diff=False) if folder and record.git else None
    if git and record.git and git.commit != record.git.commit:
        found.append(f"git commit {record.git.commit[:12]} -> {git.commit[:12]}")
    return found
