"""Decides where training starts, the same on every process, and loads what it continues from."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_distributed

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.models.families.table import family
from sm_llm.models.safetensors_folder import SHARDS
from sm_llm.models.weights_check import check_weights, holds_shards, unread_warning
from sm_llm.runs.events.events import StartChosen
from sm_llm.runs.events.failures import CheckpointRestored, StateVerified
from sm_llm.spec.training import CheckpointStart, PretrainedStart
from sm_llm.storage.checksum import crc64_bytes, crc64_file
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.publication.retire import retire_after, retire_damaged
from sm_llm.storage.uri import is_s3, join, open_store, run_and_step
from sm_llm.worker.checkpoint.checkpoint_restore import Fetcher, rank_file
from sm_llm.worker.checkpoint.earlier import begin_anew
from sm_llm.worker.checkpoint.earlier_attempts import refuse_to_forget
from sm_llm.worker.checkpoint.shard_reader import ShardReader
from sm_llm.worker.checkpoint.state_hash import state_hash
from sm_llm.worker.strategies.base import CheckpointLibrary
from sm_llm.worker.strategies.weights import InitialWeights, PretrainedWeights, ShardedWeights, WeightReader
from sm_llm.worker.training import random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sm_llm.spec.tasks import TrainTask
    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.manifest import CommitManifest
    from sm_llm.storage.publication.publish import Restored
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.runtime.collectives import ControlGroup
    from sm_llm.worker.strategies.base import Strategy


_UNFIT = (AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, UnpicklingError, ValueError)


@dataclass(frozen=True)
class Start:
    """Where training starts. ``step`` optimiser steps are done; ``folder`` holds a fetched checkpoint's files."""

    source: str
    step: int = 0
    uri: str | None = None
    digest: str | None = None
    commit: CommitManifest | None = None
    folder: Path | None = None

    @property
    def is_own(self) -> bool:
        """Whether it continues this run, not another."""
        return self.source == "checkpoint"

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the checkpoint's commit holds; empty without one."""
        return self.commit.meta if self.commit else {}


class StartResolver:
    """Finds the start of one job. Every method is a collective."""

    def __init__(
        self, context: WorkerContext, task: TrainTask, store: Store, control: ControlGroup, strategy: Strategy
    ) -> None:
        self._context = context
        self._task = task
        self._store = store
        self._control = control
        self._strategy = strategy

    def choose(self) -> Start:
        """This run's newest valid checkpoint if it has one (``job.resume``: that one); else that of ``task.start``.

        Checkpoints that were passed over are quarantined, so that their steps can be saved again. Raises
        ``CheckpointError`` when checkpoints of this run exist but none is usable (unless ``start: scratch``
        asks for a new beginning), when a requested one is not there, this run's or another's, and when processes
        disagree.
        """
        self._abort_stale_uploads()
        return self._agreed(self._own_checkpoint() or self._requested())

    def newest(self) -> Start:
        """This run's newest valid checkpoint, to go back to. Raises ``CheckpointError`` if there is none."""
        restored = self._restore(self._store, self._context.job.run_id)
        if restored is None:
            raise CheckpointError("there is no checkpoint yet to go back to")
        return self._agreed(self._continued(restored))

    def anew(self, reason: str) -> Start:
        """Set this run's checkpoints, which another job saved, apart, and start from ``task.start``."""
        self._led(lambda: begin_anew(self._context, reason))
        return self._agreed(self._requested())

    def _abort_stale_uploads(self) -> None:
        """Rank 0: what an attempt that was killed has left half-stored costs money. This one uploads nothing yet."""
        # A folder has no uploads in parts: what is half-written there, the collection finds.
        if not self._context.process.is_leader or not is_s3(self._store.uri):
            return
        try:
            for prefix in ("ckpt/", "final/"):
                self._store.abort_unfinished(math.inf, prefix)
        except StorageError as error:
            self._context.notice(f"uploads of earlier attempts could not be aborted: {error}", "warning")

    def _agreed(self, start: Start) -> Start:
        self._assert_one_start(start)
        if self._context.process.is_node_leader:
            # What the run does not continue from is only in the way, where it begins anew above all.
            self._context.copies.keep_only(start.commit.save_id if start.commit is not None else None)
        self._report(start)
        return start

    def _own_checkpoint(self) -> Start | None:
        run_id, resume = self._context.job.run_id, self._context.job.resume
        step = resume if isinstance(resume, int) else None
        try:
            restored = self._restore(self._store, run_id, step)
        except CheckpointError as error:
            # Usable checkpoints are missing although commits exist. Training anew would silently discard the work, so
            # only an explicit wish begins from scratch.
            if self._task.start != "scratch" or resume is not None:
                raise
            self._context.notice(f"{error}\nStarting from scratch all the same, as start: scratch asks", "warning")
            self._quarantine(lambda label: retire_damaged(self._store, None, run_id=run_id, label=label))
            return None
        # Asked of all before they part ways: a process that sees no checkpoint where another does must not wait in a
        # collective that the other does not enter.
        is_seen = any(self._control.gather(restored is not None))
        if restored is not None:
            if step is not None:
                # Slots of later steps are taken: they are freed, or this attempt could not publish those steps again.
                self._quarantine(lambda label: retire_after(self._store, step, label=label))
            return self._continued(restored)
        if resume is not None:
            which = "any checkpoint" if step is None else f"a checkpoint of step {step}"
            raise CheckpointError(f"asked to resume, but {self._store.uri} does not have {which} of {run_id}")
        if self._task.start != "scratch" and not is_seen:
            refuse_to_forget(self._context, self._store, self._control.gather, anew="task.start=scratch")
        return None

    def _continued(self, restored: Restored) -> Start:
        # A commit whose step is unknown cannot be matched to a slot and stays.
        damaged = {it.step for it in restored.rejected if it.step is not None}
        if damaged:
            run_id = self._context.job.run_id
            self._quarantine(lambda label: retire_damaged(self._store, damaged, run_id=run_id, label=label))
        return self._from_checkpoint("checkpoint", self._store, restored)

    def _quarantine(self, retire: Callable[[str], list[int]]) -> None:
        """Rank 0 retires commits; all processes raise if it cannot."""

        def retired() -> None:
            if steps := retire(f"attempt-{self._context.job.attempt}"):
                listed = ", ".join(map(str, steps))
                self._context.notice(f"checkpoints quarantined (ckpt/retired): steps {listed}", "warning")

        self._led(retired)

    def _led(self, action: Callable[[], None]) -> None:
        """Rank 0 acts; all processes raise if it cannot."""
        error: StorageError | None = None
        if self._context.process.is_leader:
            try:
                action()
            except StorageError as caught:
                error = caught
        if problem := self._control.outcome(error):
            raise StorageError(f"checkpoints could not be quarantined: {problem}")

    def _requested(self) -> Start:
        if isinstance(self._task.start, PretrainedStart):
            folder = Path(self._task.start.pretrained)
            return Start("pretrained", uri=str(folder), digest=self._digest(folder))
        if isinstance(self._task.start, CheckpointStart):
            return self._foreign_checkpoint(self._task.start.checkpoint)
        return Start("scratch")

    def _foreign_checkpoint(self, uri: str) -> Start:
        run, step = run_and_step(uri)
        store = open_store(run, self._context.job.spec.storage_options.model_dump())
        restored = self._restore(store, None, step)
        if restored is None:
            which = "any checkpoint" if step is None else f"a checkpoint of step {step}"
            raise CheckpointError(f"task.start.checkpoint: {run} does not have {which}")
        return self._from_checkpoint("branch", store, restored)

    def _restore(self, store: Store, run_id: str | None, step: int | None = None) -> Restored | None:
        fetcher = Fetcher(self._context, store)
        restored = publication.restore(
            store,
            self._context.copies.folder,
            run_id=run_id,
            leader=self._context.process.is_leader,
            fetches=self._context.process.is_node_leader,
            gather=self._control.gather,
            allow_step=None if step is None else lambda found: found == step,
            # Every node leader fetches for its node; if one of them cannot, all pass this commit over.
            bring=fetcher,
        )
        self._report_restored(restored, fetcher)
        for rejected in restored.rejected if restored else ():
            self._context.notice(f"checkpoint refused: {rejected}", "warning")
        return restored

    def _report_restored(self, restored: Restored | None, fetcher: Fetcher) -> None:
        # A process that sees no checkpoint where another does gathers as well: the other must not wait for it.
        figures = (fetcher.seconds, fetcher.local_bytes, fetcher.fetched_bytes) if restored else None
        reported = [it for it in self._control.gather(figures) if it is not None]
        if restored is None:
            return
        step, seconds = restored.commit.step or 0, max(it[0] for it in reported)
        local, fetched = sum(it[1] for it in reported), sum(it[2] for it in reported)
        self._context.emit(CheckpointRestored(step, seconds, local, fetched))
        self._context.log(
            f"checkpoint of step {step}: {local / 2**20:.1f} MiB were on the nodes' disks, "
            f"{fetched / 2**20:.1f} MiB came from storage, in {seconds:.2f} s"
        )

    def _from_checkpoint(self, source: str, store: Store, restored: Restored) -> Start:
        commit = restored.commit
        uri = join(store.uri, commit.save.slot.commit_key)
        check_strategy(uri, commit.meta, self._task.parallelism.strategy, self._strategy.refusal)
        return Start(source, commit.step or 0, uri, commit.digest, commit, restored.folder)

    def _digest(self, folder: Path) -> str:
        """CRC64NVME over the names and checksums of the model's files; each node reads its own copy once."""
        digest, process = None, self._context.process
        if process.is_node_leader:
            # What decides the model: weights and their index, config, tokenizer.
            weights = (folder / SHARDS).rglob("*") if holds_shards(folder) else folder.glob("*.safetensors")
            files = sorted(it for it in [*weights, *folder.glob("*.json")] if it.is_file())
            sums = [(file.relative_to(folder).as_posix(), crc64_file(file)) for file in files]
            digest = crc64_bytes(json.dumps(sums).encode())
        found = {digest for digest in self._control.gather(digest) if digest is not None}
        if len(found) > 1:
            raise CheckpointError(f"task.start.pretrained: the nodes have different files in {folder}")
        return found.pop()

    def _assert_one_start(self, start: Start) -> None:
        # Processes that began from different states would train on without an error, and never agree again.
        facts = (start.source, start.step, start.digest, start.commit and start.commit.save_id)
        reported = self._control.gather(facts)
        if len(set(reported)) > 1:
            listed = "; ".join(f"rank {rank}: {fact}" for rank, fact in enumerate(reported))
            raise CheckpointError(f"the processes do not agree where to start: {listed}")

    def _report(self, start: Start) -> None:
        origin = f" from {start.uri} (digest {start.digest})" if start.uri else ""
        self._context.log(f"starting at step {start.step}: {start.source}{origin}")
        # In events a branch of another run is a checkpoint, too.
        source = "checkpoint" if start.commit else start.source
        self._context.emit(StartChosen(source, start.step, start.uri, start.digest))


def first_weights(context: WorkerContext, start: Start, config: Mapping[str, Any], seed: int) -> WeightReader | None:
    """The values parameters are created with; None where a checkpoint brings them.

    Raises ``CheckpointError`` for pretrained weights that are damaged, or not those of the model.
    """
    if start.commit is not None:
        return None
    if start.source != "pretrained":
        return InitialWeights(family(config).tensors(config), seed, context.process.local_world_size)
    assert start.uri is not None
    if holds_shards(Path(start.uri)):
        tensors = family(config).tensors(config)
        shards = ShardedWeights(Path(start.uri), tensors, compares_copies=context.process.is_node_leader)
        for note in shards.notes if context.process.is_leader else ():
            context.notice(note, "warning")
        return shards
    weights = PretrainedWeights(Path(start.uri), check_weights(Path(start.uri), config))
    if weights.unread:
        context.notice(str(unread_warning(weights.unread)))
    return weights


def load_checkpoint(context: WorkerContext, start: Start, strategy: Strategy, control: ControlGroup) -> dict[str, Any]:
    """Put the fetched checkpoint into model and optimiser and continue the random generators.

    Returns this rank's position in a stream ({} for rows by number, or when the world size has changed). Raises
    ``CheckpointError`` if the checkpoint does not fit the model.
    """
    assert start.folder is not None
    try:
        if isinstance(strategy, CheckpointLibrary):
            strategy.read_checkpoint(start.folder, start.step)
        else:
            reader = ShardReader(start.folder)
            # Here a refusal keeps its own words.
            reader.read_metadata()
            read_distributed(strategy.state_dict(), storage_reader=reader, process_group=control.group)
    # ``CheckpointException`` is what DCP raises for errors of any rank; the others come from its planner, where names,
    # shapes or formats of the two states differ, and from files of a library that are none.
    except (CheckpointException, *_UNFIT) as error:
        raise CheckpointError(f"{start.uri}: does not fit this job's model: {error}") from error
    # The live tensors were written in place; rounded copies and step counts follow from them.
    strategy.state_loaded()
    private = _load_private(context, start, strategy)
    _verify_state(context, start, strategy, private, control)
    stream: dict[str, Any] = private.get("stream", {})
    return stream


def _verify_state(
    context: WorkerContext, start: Start, strategy: Strategy, private: Mapping[str, Any], control: ControlGroup
) -> None:
    """Compare with the hash that each process saved, where one was (``checkpoint.verify_state``). A collective."""
    saved = private.get("state_hash")
    own = {"random": random_state.capture(strategy.device), "stream": private.get("stream")}
    # Captured after the restore: so it covers the random generators, too.
    differs = saved is not None and state_hash(strategy.state_dict(), own) != saved
    ranks = [rank for rank, it in enumerate(control.gather(differs)) if it]
    if ranks:
        raise CheckpointError(f"{start.uri}: the state restored on ranks {ranks} is not the state that was saved")
    if saved is not None:
        context.emit(StateVerified(start.step))
        context.log(f"the restored state of step {start.step} is bit for bit the saved one on all processes")


def _load_private(context: WorkerContext, start: Start, strategy: Strategy) -> dict[str, Any]:
    """What this rank alone saved; {} where the processes were arranged in another way."""
    assert start.folder is not None
    now = strategy.layout.degrees()
    # A commit without ``job`` records the world size alone.
    job = {"world_size": start.commit.save.world_size if start.commit else 0, **start.meta.get("job", {})}
    # A degree that the commit does not name is taken for unchanged.
    before = {name: job.get(name, degree) for name, degree in now.items()}
    if before == now:
        private = _saved_by(start, context.process.rank)
        try:
            random_state.restore(private["random"], strategy.device)
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{start.uri}: its random state cannot be restored: {error}") from error
        return private
    changes = ", ".join(f"{name} {before[name]} -> {degree}" for name, degree in now.items() if before[name] != degree)
    # Rank 0's stands for all: either every process reads a stream, or none does.
    if _saved_by(start, 0)["stream"]:
        raise CheckpointError(
            f"{start.uri}: was saved by other processes ({changes}), each at its own place in a stream, and cannot be "
            "continued by these. Start the same ones, or prepare the text as rows"
        )
    context.notice(
        f"the checkpoint was saved by other processes ({changes}) and is resharded: the same tokens in the same "
        "order, but sums are added in another order and random generators start anew"
    )
    return {}


def _saved_by(start: Start, rank: int) -> dict[str, Any]:
    """What a process saved for itself. Raises ``CheckpointError`` for a file that no process of ours wrote."""
    assert start.folder is not None
    try:
        found = json.loads((start.folder / rank_file(rank)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{start.uri}: {rank_file(rank)} cannot be read: {error}") from error
    if not isinstance(found, dict) or not {"random", "stream"} <= found.keys():
        raise CheckpointError(f"{start.uri}: {rank_file(rank)} is not what a process saves for itself")
    return found


def check_strategy(
    uri: str, meta: Mapping[str, Any], strategy: str, refusal: Callable[[Mapping[str, Any]], str | None]
) -> None:
    """Refuse a checkpoint (its commit's ``meta``) that this strategy cannot load, before anything is allocated.

    ``refusal`` is ``Strategy.refusal``. Raises ``CheckpointError``.
    """
    parallelism = (meta.get("layout") or {}).get("parallelism") or {}
    # A commit without it is let through: what does not fit fails when it is loaded.
    saved = parallelism.get("strategy", strategy)
    if saved != strategy:
        raise CheckpointError(
            f"{uri}: was saved by strategy {saved}, and {strategy} cannot read it. Continue with {saved}, or start a "
            "new run from a published model (start.pretrained)"
        )
    if reason := refusal(meta.get("job", {})):
        raise CheckpointError(f"{uri}: {reason}")
