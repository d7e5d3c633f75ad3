"""The train task: from where training starts, step by step, to a published Hugging Face model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sm_llm.contract.identity import IDENTITY
from sm_llm.data.loader import Batches
from sm_llm.data.soundness import name_rows, rows_of_step
from sm_llm.data.source import Source
from sm_llm.errors import CheckpointError, DataError, RunFailed
from sm_llm.runs.events.events import AttemptStarted, FirstStep, Step
from sm_llm.spec.tasks import TrainTask, settings
from sm_llm.terminal import counted, quoted
from sm_llm.worker.checkpoint.checkpoint import Checkpointer
from sm_llm.worker.checkpoint.continuation_check import check_continuation, own_identity
from sm_llm.worker.checkpoint.recovery import Recovery
from sm_llm.worker.checkpoint.start_resolver import Start, StartResolver, first_weights, load_checkpoint
from sm_llm.worker.checkpoint.state_hash import state_hash
from sm_llm.worker.inputs.graph_cache import extracts_graphs, open_cache
from sm_llm.worker.inputs.space import check_space, own_bytes
from sm_llm.worker.results.deliver import deliver, export_result, is_delivered
from sm_llm.worker.runtime.collectives import ControlGroup
from sm_llm.worker.runtime.fault_injection import fault_step, inject_fault
from sm_llm.worker.runtime.start_phases import FIRST_STEP
from sm_llm.worker.strategies.base import CheckpointLibrary
from sm_llm.worker.strategies.table import find_device, make_strategy
from sm_llm.worker.supervision.agreed_stop import Stopper
from sm_llm.worker.training import random_state, start_report
from sm_llm.worker.training.automatic import assert_equal, with_choices
from sm_llm.worker.training.batch_transfer import global_targets, loss_share
from sm_llm.worker.training.checkpoint_interval import interval_message
from sm_llm.worker.training.job_setup import Setup, config_of, set_up, settled
from sm_llm.worker.training.nonfinite_policy import Action, NonFinitePolicy, NonFiniteWatch, RollBack
from sm_llm.worker.training.profile import Profiler
from sm_llm.worker.training.schedule import Plateau, learning_rate
from sm_llm.worker.training.step_metrics import StepBuffer, ThroughputMeter
from sm_llm.worker.validate import not_finite_warning, sentence, validate
from sm_llm.worker.versions import versions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sm_llm.data.source import Batch
    from sm_llm.spec.job import JobSpec
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.inputs.graph_cache import CompileCache
    from sm_llm.worker.strategies.base import Strategy
    from sm_llm.worker.training.compiled_graphs import CompiledGraphs


def run(context: WorkerContext, job: JobSpec) -> None:
    """Train ``job.task`` (its sources are local), resume where this run stopped, and publish the model."""
    assert isinstance(job.task, TrainTask)
    phases = context.start_phases
    phases.enter("choosing the settings")
    device = find_device(job.task.parallelism.strategy, context.process)
    task = settled(job.task, device)
    config = config_of(task)
    task = with_choices(context, task, config, device)
    phases.enter("looking for compiled graphs")
    # Before anything is computed: that is when the first graphs are compiled. As it is written, as precompile sees it.
    cache: CompileCache | CompiledGraphs | None = open_cache(context, job.task, config)
    if cache is None and task.precision.compile is True:
        # Only here: torch of the SMP image, which compiles nothing, has not all of what it uses.
        from sm_llm.worker.training.compiled_graphs import open_graphs

        cache = open_graphs(context, task, config, device)
    strategy = make_strategy(task, context.process, device)
    phases.enter("connecting the processes")
    strategy.setup()
    phases.enter("reading the data")
    setup = set_up(task, strategy.layout, context.process.local_world_size, context.scratch)
    kind = GraphExtraction if extracts_graphs() else Trainer
    kind(context, setup, strategy, cache).run()
    strategy.close()  # only now: a process that fails must not wait for the others to leave with it


_BUILDING = {
    "scratch": "building the model and drawing its initial weights",
    "pretrained": "building the model and reading its weights",
}


class Trainer:
    """One attempt at a training job, on one process. All processes go through every method together."""

    computes = True

    def __init__(
        self,
        context: WorkerContext,
        setup: Setup,
        strategy: Strategy,
        cache: CompileCache | CompiledGraphs | None = None,
    ) -> None:
        self.context = context
        self.cache = cache
        self.setup = setup
        self.task = setup.task
        self.strategy = strategy
        # The loop's own group: threads that save and publish have theirs.
        self.control = ControlGroup()
        assert_equal(self.control.gather(settings(self.task)))
        self.store = context.store
        self.plateau = Plateau()
        self.steps = StepBuffer(strategy.device, strategy.layout.tensor)
        self.last_step: Step | None = None
        self.reports = 0
        self.has_begun = False
        self.library = strategy if isinstance(strategy, CheckpointLibrary) else None
        self.checkpointer = Checkpointer(
            context, self.store, self.task.checkpoint, self.control, strategy.device, self.library
        )
        self.stopper = Stopper(context, self.control)
        self.resolver = StartResolver(context, self.task, self.store, self.control, strategy)
        self.finite = NonFiniteWatch(strategy.device)
        self.nonfinite = NonFinitePolicy(self.task.not_finite)
        self.profiler = Profiler(context, self.task.logging.profile, strategy.device)
        self.recovery = Recovery(context)
        self.breaks_before = fault_step(context.job.attempt)

    def run(self) -> None:
        """Every step that is not done yet, then the publication of the model."""
        self.announce()
        if is_delivered(self.context, self.control):
            self.forget_copies()
            return
        done = self.begin().step
        # Shielded: a step cannot be finished without the compilers that it has started.
        with self.context.requests.deferred(), self.context.requests.shielded(), ExitStack() as stack:
            stack.callback(lambda: self.batches.close())  # whichever are open by then
            stack.push(lambda kind, *_: self.profiler.close(wait=kind is None))
            # Entered last, so left first: its background threads still write events and read no data.
            stack.enter_context(self.checkpointer)
            self.context.marker.begin(done)
            while done < self.setup.total_steps:
                try:
                    self.advance(done + 1)
                    done += 1
                except RollBack:
                    # Raised by all processes after the same step, since all have read the same flags.
                    done = self.go_back()
            asked = self.context.requests.reason
            with self.context.marker.during("publication"):
                folder = self.export()
        # Noted while the last save was on its way. One that came before the last step was done is not heeded: the
        # result is worth more.
        if asked is None:
            self.context.requests.heed()
        with self.context.marker.during("publication"):
            self.save_graphs()
            self.publish(folder)
        self.forget_copies()

    def export(self) -> Path | None:
        """Write the result to this node's disk, beside the last save, which is complete and published afterwards."""
        self.context.start_phases.enter("publishing the result")
        # An engine may take its model apart for the export.
        self.checkpointer.hold()
        try:
            return export_result(self.context, self.setup, self.strategy)
        finally:
            # Also where the export has failed: then the next attempt needs no step.
            self.checkpointer.finish()

    def publish(self, folder: Path | None) -> None:
        """Publish the result."""
        assert folder is not None
        deliver(self.context, self.setup, self.strategy, self.store, self.control, folder)

    def forget_copies(self) -> None:
        """The result is published, so nothing continues from the checkpoints on this node's disk."""
        if self.context.process.is_node_leader:
            self.context.copies.forget()

    def save_graphs(self) -> None:
        """Bring what was compiled to the cache that later jobs have."""
        if self.cache is not None:
            self.cache.report(self.control.gather)
            self.cache.save()

    def advance(self, step: int) -> None:
        """Take ``step`` and do what is due after it."""
        if step == self.breaks_before:
            self.checkpointer.finish()
            inject_fault()
        # Before the step: the exchange of flags runs beside the computation.
        self.stopper.open()
        with self.profiler.of(step):
            self.take_step(step, self.next_batches())
        if is_first := not self.has_begun:
            self.report_start(step)
        self.context.marker.done(step)
        derived, is_last = self.setup.derived, step == self.setup.total_steps
        # After the last step the run is done anyway: its result is worth more than a stop.
        halts = self.stopper.is_asked() and not is_last
        reports = self.is_due(step, self.task.logging.every_steps)
        validates = self.is_due(step, derived.validation_every)
        saves = self.is_due(step, derived.checkpoint_every)
        # Whatever writes numbers or parameters down must know that all steps before were finite; only then does the
        # host wait.
        self.heed_flags(settle=is_first or halts or reports or validates or saves)
        if is_first:
            self.context.emit(FirstStep(step))
        if halts:
            self.halt(step)
        if reports:
            self.report(step)
        if validates:
            self.validate(step)
        if saves:
            # Nor is the last one waited for here: what comes after it only reads what is saved.
            self.save(step, required=is_last)

    def report_start(self, step: int) -> None:
        """After an attempt's first step: how long it took to get there, and what runs as compiled graphs."""
        self.has_begun = True
        # Once in a start: a step that is only queued on the device is not completed.
        self.strategy.device.wait()
        self.recovery.stepped(step)
        start_report.report_start(self.context, step, self.strategy.compilation())
        # Now, since a job may be killed long before its end, and the next one would compile all of it again.
        self.save_graphs()

    def heed_flags(self, *, settle: bool) -> None:
        """Act on steps that were not finite, as far as they are known; ``settle`` makes them all known."""
        bad = self.finite.bad_steps(settle=settle)
        if empty := self.finite.without_targets():
            self.heed_empty(empty)
        if not bad:
            return
        # Flushed first: the message names the loss of the step, which is still on the device.
        action = self.nonfinite.judge(bad, self.flush())
        if action is not Action.CONTINUE:
            with self.context.marker.during("checkpoint"):
                self.checkpointer.finish()
        if action is Action.FAIL:
            raise RunFailed(self.nonfinite.message)
        self.context.notice(self.nonfinite.message, "warning")
        if action is Action.GO_BACK:
            raise RollBack

    def heed_empty(self, steps: Sequence[int]) -> None:
        """Skip or refuse ``steps`` that had no label to learn from, naming their rows."""
        try:
            self.nonfinite.judge_empty(steps)
        except DataError as error:
            with self.context.marker.during("checkpoint"):
                self.checkpointer.finish()
            locations = ""
            if isinstance(self.setup.train, Source):
                rows = rows_of_step(self.setup.train, steps[0], self.setup.derived.global_batch_size)
                locations = f" ({name_rows(self.setup.train, rows)})"
            raise DataError(f"{error}{locations}. {self._ways_past_empty()}") from None
        self.context.notice(self.nonfinite.message, "warning")

    def _ways_past_empty(self) -> str:
        """What to do about batches without labels; rows that are taken out change the data, which no resume accepts."""
        # Without a checkpoint a resume is refused, and a run that begins anew needs the change as well.
        verb = "rerun" if self.checkpointer.published_step is None else "resume"
        skip = quoted(self.context.store.uri, "task.not_finite.policy=skip")
        return f"Skip them: sm-llm {verb} {skip}. Changed rows need a new run (fit --new)"

    def go_back(self) -> int:
        """Continue from this run's newest checkpoint, in this very attempt; returns its step."""
        with self.context.marker.during("start"):
            self.batches.close()
            try:
                # What is in flight was published in ``heed_flags``, so this is the newest that can be had.
                start = self.resolver.newest()
            except CheckpointError as error:
                raise RunFailed(f"{self.nonfinite.message}, but {error}") from error
            self.continue_from(start)
        self.context.marker.begin(start.step)
        return start.step

    def announce(self) -> None:
        """Log what runs where."""
        name = self.strategy.device.name
        world_size = self.context.process.world_size
        self.stopper.announce()
        self.context.emit(AttemptStarted(world_size, name, self.setup.total_steps, versions()))
        self.context.log(
            f"attempt {self.context.job.attempt}: {counted(world_size, 'process')} on {name} in "
            f"{self.task.precision.compute}, {counted(self.setup.total_steps, 'step')} of "
            f"{self.setup.derived.tokens_per_step:,} tokens"
        )
        for doubt in self.setup.warnings:
            self.context.notice(doubt, "warning")
        start_report.report_products(self.context, self.task, self.setup.config)

    def begin(self) -> Start:
        """Choose the start, build model and optimiser, load what training continues from, open the data."""
        # Read from the data before a start is chosen: a checkpoint of other data is refused before anything is built.
        self.identity = own_identity(self.context, self.setup, self.control)
        phases = self.context.start_phases
        phases.enter("choosing a checkpoint to continue from")
        with self.recovery.restoring():
            start = self.continuable(self.resolver.choose())
        # A checkpoint replaces these states later, where it was saved by the same arrangement of processes.
        random_state.seed_everything(self.task.seed, self.context.process.rank, self.strategy.device)
        phases.enter(_BUILDING.get(start.source, "building the model"))
        if start.source == "scratch":
            self.context.notice("draws the initial weights")
        weights = first_weights(self.context, start, self.setup.config, self.task.seed)
        self.strategy.build(self.setup.config, weights)
        self.strategy.train_mode(True)
        start_report.report_attention(self.context, self.strategy.attention())
        start_report.report_collectives(self.context, self.strategy.collectives())
        # The sizes of shards are known only now; training has cost nothing yet.
        state = self.strategy.state_dict()
        own = own_bytes(state) if self.library is None else self.library.checkpoint_bytes()
        check_space(self.context, self.control, own, self.task.checkpoint.keep_last)
        self.checkpointer.prepare(state)
        if start.commit is not None:
            phases.enter("loading the checkpoint")
        with self.recovery.restoring():
            self.continue_from(start)
        phases.enter(FIRST_STEP)
        return start

    def continuable(self, start: Start) -> Start:
        """``start``, if this job may continue its checkpoint; else ``CheckpointError``.

        Where another job of the platform has left that checkpoint in the run, the run begins anew instead.
        """
        if start.commit is None:
            return start
        try:
            check_continuation(self.context, start, self.identity, self.setup)
        except CheckpointError as error:
            # Only rank 0 knows of a job that was replaced.
            if not start.is_own or self.control.broadcast(self.context.replaced_job) is None:
                raise
            return self.continuable(self.resolver.anew(str(error)))
        return start

    def continue_from(self, start: Start) -> None:
        """Load the checkpoint of ``start``, if it is one, and open the data behind it."""
        stream: dict[str, Any] = {}
        if start.commit is not None:
            stream = load_checkpoint(self.context, start, self.strategy, self.control)
            # The schedule's only state: any other is a function of the step.
            self.plateau.load(start.commit.meta["plateau"])
            if start.is_own:
                self.checkpointer.protect(start.step)
        self.batches = self.open_batches(start.step, stream)
        # A new one, so that loading does not count as time of steps.
        self.meter = ThroughputMeter(self.setup.costs(self.strategy.device), self.strategy.device, start.step)

    def open_batches(self, done_steps: int, stream: dict[str, Any]) -> Batches:
        """This rank's micro-batches from the first step on that is not done."""
        derived = self.setup.derived
        return Batches(
            self.setup.train,
            micro_batch_size=derived.micro_batch_size,
            accumulation_steps=derived.accumulation_steps,
            rank=self.strategy.data_parallel_rank,
            degree=self.strategy.layout.data,
            start_step=done_steps,
            total_steps=self.setup.total_steps,
            state=stream,
        )

    def next_batches(self) -> list[Batch]:
        """This rank's micro-batches of the next step; if they never come, the watchdog can report it."""
        self.context.marker.phase = "waiting for data"
        batches = next(self.batches)
        self.context.marker.phase = "step"
        return batches

    def take_step(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """One optimiser step. Its loss is the mean over all labels of the global batch that count.

        A step that is not finite, or has no label that counts, changes nothing. Nothing here waits for the device.
        """
        strategy, layout = self.strategy, self.strategy.layout
        # Counted over the whole batch before the backward pass, because the loss is a mean over all of its labels.
        targets = global_targets(micro_batches, padded=self.setup.train.padded, layout=layout, device=strategy.device)
        loss_sum = strategy.forward_backward(micro_batches, loss_share(layout, targets))
        rate = self.learning_rate(step)
        self.checkpointer.hold()
        norm, flag = strategy.update(rate, self.task.optim.max_grad_norm, targets)
        self.finite.note(step, flag)
        self.steps.record(step, loss_sum, norm, targets, rate)
        # A long interval between reports would otherwise hold ever more scalars on the device.
        if self.steps.is_full:
            self.flush()

    def learning_rate(self, step: int) -> float:
        """The rate that ``step`` uses."""
        warmup = self.setup.derived.warmup_steps or 0
        return learning_rate(self.task.optim, step, self.setup.schedule_steps, warmup, self.plateau.scale)

    def is_due(self, step: int, every: int | None) -> bool:
        """Whether something that happens every so many steps happens now: always at the last step."""
        return step == self.setup.total_steps or (every is not None and step % every == 0)

    def flush(self) -> list[Step]:
        """Write, and return, the events of all steps recorded so far. Waits for the device."""
        steps = self.steps.flush()
        for step in steps:
            self.context.emit(step)
            self.last_step = step
        return steps

    def report(self, step: int) -> None:
        """The training line of a logged step."""
        # Here and not in every step: it is a collective.
        self.checkpointer.check()
        self.flush()
        window = self.meter.read(step, self.batches.wait_seconds)
        self.context.emit(window)
        # Only now is the duration of a step known.
        if not self.reports:
            sentence, warns = interval_message(
                self.setup.derived.checkpoint_every, self.setup.total_steps, window.step_seconds
            )
            self.context.notice(sentence, "warning" if warns else "info")
        self.reports += 1
        if self.last_step is not None:
            line = self.meter.line(self.last_step, window, self.setup.total_steps)
            self.context.log(" | ".join(filter(None, [line, self.checkpointer.alarm])))

    def validate(self, step: int) -> None:
        """Loss and perplexity on the validation rows, if there are any."""
        if self.setup.validation is None:
            return
        micro_batch_size, max_rows = self.task.micro_batch, self.task.validation.max_rows
        with self.meter.paused(), self.context.marker.during("validation"):
            found = validate(
                self.strategy, self.setup.validation, step=step, micro_batch_size=micro_batch_size, max_rows=max_rows
            )
        self.plateau.observe(found.validation_loss, self.task.optim)
        self.context.emit(found)
        self.context.log(sentence(found, self.setup.total_steps))
        if self.computes and (warning := not_finite_warning(found)):
            self.context.notice(warning, "warning")

    def save(self, step: int, *, required: bool = False, waits: bool = False) -> None:
        """Begin a checkpoint (``Checkpointer.save``). Events first: whatever a commit covers is in the log."""
        with self.meter.paused(), self.context.marker.during("checkpoint"):
            self.flush()
            # The live tensors; ``Checkpointer.save`` copies them before it returns.
            state = self.strategy.state_dict()
            # What differs by process and cannot be resharded.
            private: dict[str, Any] = {
                "random": random_state.capture(self.strategy.device),
                "stream": self.batches.state(),
            }
            if self.task.checkpoint.verify_state:
                private["state_hash"] = state_hash(state, private)
            meta = {
                "plateau": self.plateau.state(),
                "job": self.setup.layout.degrees(),
                IDENTITY: self.identity,
                "spec_digest": self.context.job.spec_digest,
                "versions": versions(),
            }
            self.checkpointer.save(step, state, private, meta, required=required, waits=waits)

    def halt(self, step: int) -> None:
        """Stop after ``step``, as somebody asked: save if that fits in, and raise ``Stopping`` on all processes."""
        decision = self.stopper.decide(self.checkpointer.expected_seconds)
        # From here on nothing waits longer than the grace time allows.
        self.checkpointer.hurry(decision.seconds)
        if decision.saves:
            self.save(step, required=True, waits=True)
        with self.context.marker.during("stop"):
            self.flush()
            done = self.checkpointer.finish()
            # Read after ``finish``: the report names the checkpoint that the run will continue from.
            stopping = self.stopper.stopping(step, decision, self.checkpointer.published_step)
        if done:  # else threads still wait for answers of the other processes
            self.strategy.close()
        raise stopping


class GraphExtraction(Trainer):
    """A training that is run for its graphs (``neuron_parallel_compile``): it takes the same steps, but nothing is
    computed, so no number counts and nothing is saved or published."""

    computes = False

    def heed_flags(self, *, settle: bool) -> None:
        """Read them, as training does, and pass over them."""
        self.finite.bad_steps(settle=settle)
        self.finite.without_targets()

    def save(self, step: int, *, required: bool = False, waits: bool = False) -> None:
        """Nothing: copies to the host are no graphs."""

    def export(self) -> None:
        """Nothing."""

    def publish(self, folder: Path | None) -> None:
        """Nothing."""
