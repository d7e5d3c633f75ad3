"""Proves that a broken run of a given job continues exactly: it is run unbroken, and broken twice, and compared."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import BREAK_ENVIRONMENT
from sm_llm.errors import Issue, RunFailed, SpecError
from sm_llm.launcher.api import launch
from sm_llm.runs.events.events import newest_per_step, read_events
from sm_llm.runs.run_paths import storage_root
from sm_llm.runs.run_states import RunState
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.publication.find import find_newest
from sm_llm.storage.uri import join
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sm_llm.launcher.planner import Source
    from sm_llm.launcher.run import Run
    from sm_llm.spec.loading.load import Loaded
    from sm_llm.spec.loading.overrides import Override

DEFAULT_STEPS = 24
# A checkpoint at every step then: fewer leave no room for two breaks between checkpoints.
FEWEST_STEPS = 6
_FOLDER = "resume-proof"


@dataclass(frozen=True)
class ResumeCheck:
    """What two runs of the same job have in common, one of them broken twice and continued.

    States are everything that is restored: parameters, optimiser state, random generators, place in the data.
    """

    steps: int
    device: str
    must_be_equal: bool
    """Whether the numbers must be equal bit for bit: on CPUs, and on GPUs with ``task.deterministic``."""
    continued_from: tuple[int, ...]
    equal_losses: int
    largest_loss_difference: float
    equal_rates: int
    restored_states: int
    """Restored states that had the hash they were saved with, on all processes; any other ends a run."""
    equal_last_state: bool
    runs: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether resume is exact, as far as the device is."""
        exact = self.equal_losses == self.steps and self.equal_last_state
        continued = len(self.continued_from) == 2 == self.restored_states and min(self.continued_from) > 0
        return continued and self.equal_rates == self.steps and (exact or not self.must_be_equal)

    def to_json(self) -> dict[str, Any]:
        """The proof as JSON values."""
        return {"ok": self.ok, **asdict(self)}

    def text(self) -> str:
        """The proof for people."""
        after = " and ".join(map(str, self.continued_from)) or "no checkpoint at all"
        lines = [
            f"{counted(self.steps, 'step')} on {self.device}, unbroken, and broken twice and continued from step "
            f"{after}",
            f"  losses         {self.equal_losses} of {self.steps} equal bit for bit "
            f"(largest difference {self.largest_loss_difference:.3g})",
            f"  learning rates {self.equal_rates} of {self.steps} equal bit for bit",
            f"  states         {self.restored_states} of 2 restored bit for bit as saved; "
            f"after the last step {'equal' if self.equal_last_state else 'different'}",
        ]
        if not self.must_be_equal:
            lines.append("  this device adds up in no fixed order; task.deterministic=true would make all of it equal")
        kept = f"; the runs are kept: {', '.join(self.runs)}"
        return "\n".join([*lines, "resume is exact" if self.ok else f"resume is NOT exact{kept}"])


def check_resume(
    source: Source, *overrides: Override, steps: int = DEFAULT_STEPS, tell: Callable[[str], None] = lambda _: None
) -> ResumeCheck:
    """Run the first ``steps`` steps of a training job twice on its backend, once broken by SIGKILL twice, and compare.

    The job keeps its own schedule. Of a workflow the last training step is proved; the steps before it run once. The
    runs go to ``resume-proof`` in the job's storage and are deleted if all is well.

    Raises:
        SpecError, PlanError: the job cannot be run.
        RunFailed: a run ended in another way than it was broken.
    """
    from sm_llm.spec.loading.load import load

    loaded = load(source, overrides)
    folder = join(storage_root(loaded.spec), _FOLDER)
    tell(f"running {counted(steps, 'step')} unbroken")
    # new: an unfinished run of an earlier proof must not be continued.
    unbroken = launch(source, *overrides, *_shortened(loaded, steps), f"storage={json.dumps(folder)}", new=True)
    unbroken.wait()
    tell(f"running them again, broken before steps {' and '.join(map(str, _breaks(steps)))}")
    broken = _broken(unbroken.job, steps, folder)
    proof = compare_runs(unbroken.job, broken)
    if proof.ok:
        for run in (unbroken, broken):
            _remove(run)
        with suppress(OSError):  # an earlier proof's runs are still there
            Path(folder).rmdir()
    return proof


def _remove(run: Run) -> None:
    if run.run_store.is_remote:
        store = run.run_store.store
        store.delete(it.key for it in store.list(""))
    shutil.rmtree(run.root)


def _breaks(steps: int) -> tuple[int, int]:
    """Each a few steps after a checkpoint, so that some are repeated."""
    every = _interval(steps)
    return 2 * every + 1 + every // 2, 4 * every + 1 + every // 2


def _interval(steps: int) -> int:
    return max(1, steps // 6)


def _shortened(loaded: Loaded, steps: int) -> list[str]:
    """What makes a short job with many checkpoints of a training job, as overrides."""
    prefix, task, world_size = _training(loaded)
    if steps < FEWEST_STEPS:
        raise SpecError(
            [
                Issue(
                    "resume-check-too-short",
                    "--steps",
                    "too few to break twice between checkpoints",
                    steps,
                    f"At least {FEWEST_STEPS}",
                )
            ]
        )
    changes: dict[str, Any] = {
        # Exactly one length may be given, so the job's own is cleared.
        "max_steps": steps,
        "max_tokens": None,
        "max_epochs": None,
        "optim.schedule_steps": _span(task, world_size) or steps,
        "checkpoint.every_steps": _interval(steps),
        # Every save then holds a hash of the state, and a restore that differs ends the run.
        "checkpoint.verify_state": True,
        # The proof's two runs are nobody's experiment.
        "logging.sinks": {},
    }
    return [f"{prefix}task.{path}={json.dumps(value)}" for path, value in changes.items()]


def _training(loaded: Loaded) -> tuple[str, TrainTask, int]:
    """Where the training task of a specification is, and its number of processes."""
    spec = loaded.spec
    if not isinstance(spec, WorkflowSpec):
        candidates = [("", spec.task, spec.compute)]
    else:
        candidates = [(f"steps.{name}.", step.task, step.compute or spec.compute) for name, step in spec.steps.items()]
    found = [(prefix, task, compute.world_size) for prefix, task, compute in candidates if isinstance(task, TrainTask)]
    if not found:
        raise SpecError(
            [
                Issue(
                    "resume-check-without-training",
                    "task.kind",
                    "there is no training to prove",
                    remedy="Name a training job",
                )
            ]
        )
    # The last training of a workflow: those before it are its inputs.
    return found[-1]


def _span(task: TrainTask, world_size: int) -> int | None:
    """The steps of the job's own schedule, where they are known before its data are read."""
    from sm_llm.spec.derive import derive_task

    return derive_task(task, world_size).schedule_steps


def _broken(unbroken: Run, steps: int, folder: str) -> Run:
    """The same job, broken twice and continued, until it is completed."""
    # From the record: the second run has exactly the values of the first, whatever the source holds by now.
    spec = dict(unbroken.record.spec)
    breaks = ",".join(map(str, _breaks(steps)))
    environment = {**spec.get("environment", {}), BREAK_ENVIRONMENT: breaks}
    run = launch({**spec, "environment": environment, "storage": folder}, new=True)
    for step in _breaks(steps):
        _see_it_break(run, step)
        run = run.resume()
    run.wait()
    return run


def _see_it_break(run: Run, step: int) -> None:
    try:
        run.wait()
    except RunFailed:
        reached = max((row["step"] for row in run.metrics()), default=0)
        # A failure at a later step, or another outcome, is a real fault of the job and not the planned break.
        if run.state is RunState.FAILED and reached < step:
            return
        raise
    raise RunFailed(f"{run.uri}: was to break before step {step}, but completed")


def compare_runs(unbroken: Run, broken: Run) -> ResumeCheck:
    """What two completed runs of the same job have in common."""
    first, second = (list(read_events(run.events)) for run in (unbroken, broken))
    steps = {it["step"]: it for it in newest_per_step(first, "step")}
    again = {it["step"]: it for it in newest_per_step(second, "step")}
    pairs = [(one, again[step]) for step, one in steps.items() if step in again]
    started = next(event for event in first if event["kind"] == "attempt_started")
    states = [_last_states(run) for run in (unbroken, broken)]
    return ResumeCheck(
        steps=len(steps),
        device=started["device"],
        must_be_equal=started["device"] == "cpu" or bool(unbroken.record.spec["task"]["deterministic"]),
        continued_from=tuple(event["step"] for event in second if event["kind"] == "start_chosen")[1:],
        equal_losses=_equal(pairs, "loss"),
        largest_loss_difference=max((abs(one["loss"] - two["loss"]) for one, two in pairs), default=0.0),
        equal_rates=_equal(pairs, "learning_rate"),
        restored_states=sum(event["kind"] == "state_verified" for event in second),
        equal_last_state=states[0] == states[1] and bool(states[0]),
        runs=(unbroken.uri, broken.uri),
    )


def _equal(pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str) -> int:
    # By their digits: == would take 0.0 and -0.0 for equal, and NaN for unequal to itself.
    return sum(float(one[name]).hex() == float(two[name]).hex() for one, two in pairs)


def _last_states(run: Run) -> dict[str, str]:
    """The hash of the last saved state of every process."""
    store = run.run_store.store
    commit = find_newest(store, run_id=run.id).commit
    if commit is None:
        return {}
    names = [entry.path for entry in commit.files if entry.path.startswith("rank-")]
    bodies = {name: store.get(f"{commit.save.data_prefix}{name}") for name in names}
    return {name: json.loads(body)["state_hash"] for name, body in bodies.items() if body is not None}
