"""Decides where training starts, the same on every process, and loads what it continues from."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_distributed

from sm_llm.contract.events import StartChosen
from sm_llm.errors import CheckpointError
from sm_llm.spec.checkpoint import CheckpointStart, PretrainedStart
from sm_llm.storage import publish as publication
from sm_llm.storage.checksum import crc64_bytes, crc64_file
from sm_llm.storage.uri import join, open_store
from sm_llm.worker import random_state
from sm_llm.worker.checkpoint import rank_file
from sm_llm.worker.weights import InitialWeights, PretrainedWeights, WeightReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.models.family import Tensor
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.storage.base import Store
    from sm_llm.storage.manifest import CommitManifest
    from sm_llm.storage.publish import Restored
    from sm_llm.worker.collectives import Agreement
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.strategies.base import Strategy

_CHECKPOINT_URI = re.compile(r"(?P<run>.+?)(?:@(?P<step>\d+))?")


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
        """What the checkpoint's commit tells; empty without one."""
        return self.commit.meta if self.commit else {}


class Starter:
    """Finds the start of one job. Every method is a collective."""

    def __init__(self, context: WorkerContext, task: TrainTask, store: Store, control: Agreement) -> None:
        self._context = context
        self._task = task
        self._store = store
        self._control = control

    def choose(self) -> Start:
        """This run's newest valid checkpoint if it has one; else what ``task.start`` says.

        Raises ``CheckpointError`` when checkpoints of this run exist but none is usable (unless ``start: scratch``
        asks for a new beginning), when another run's checkpoint is asked for and not there, and when processes
        disagree.
        """
        start = self._own_checkpoint() or self._requested()
        self._assert_agreement(start)
        self._tell(start)
        return start

    def _own_checkpoint(self) -> Start | None:
        try:
            restored = self._restore(self._store, self._context.job.run_id)
        except CheckpointError as error:
            if self._task.start != "scratch":
                raise
            self._context.notice(f"{error}\nStarting from scratch all the same, as start: scratch asks", "warning")
            return None
        return None if restored is None else self._from_checkpoint("checkpoint", self._store, restored)

    def _requested(self) -> Start:
        if isinstance(self._task.start, PretrainedStart):
            folder = Path(self._task.start.pretrained)
            return Start("pretrained", uri=str(folder), digest=self._digest(folder))
        if isinstance(self._task.start, CheckpointStart):
            return self._foreign_checkpoint(self._task.start.checkpoint)
        return Start("scratch")

    def _foreign_checkpoint(self, uri: str) -> Start:
        match = _CHECKPOINT_URI.fullmatch(uri)
        assert match is not None
        store, step = open_store(match["run"]), match["step"]
        restored = self._restore(store, None, None if step is None else int(step))
        if restored is None:
            which = "any checkpoint" if step is None else f"a checkpoint of step {step}"
            raise CheckpointError(f"task.start.checkpoint: {match['run']} does not have {which}")
        return self._from_checkpoint("branch", store, restored)

    def _restore(self, store: Store, run_id: str | None, step: int | None = None) -> Restored | None:
        restored = publication.restore(
            store,
            self._context.scratch / "restored",
            run_id=run_id,
            leader=self._context.place.is_leader,
            fetches=self._context.place.is_node_leader,
            gather=self._control.gather,
            allow_step=None if step is None else lambda found: found == step,
        )
        for rejected in restored.rejected if restored else ():
            self._context.notice(f"checkpoint refused: {rejected}", "warning")
        return restored

    def _from_checkpoint(self, source: str, store: Store, restored: Restored) -> Start:
        commit = restored.commit
        uri = join(store.uri, commit.save.slot.commit_key)
        return Start(source, commit.step or 0, uri, commit.digest, commit, restored.folder)

    def _digest(self, folder: Path) -> str:
        """CRC64NVME over the names and checksums of the model's files; each node reads its own copy once."""
        digest, place = None, self._context.place
        if place.is_node_leader:
            files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
            digest = crc64_bytes(json.dumps([(file.name, crc64_file(file)) for file in files]).encode())
        found = {digest for digest in self._control.gather(digest) if digest is not None}
        if len(found) > 1:
            raise CheckpointError(f"task.start.pretrained: the nodes have different files in {folder}")
        return found.pop()

    def _assert_agreement(self, start: Start) -> None:
        facts = (start.source, start.step, start.digest, start.commit and start.commit.save_id)
        told = self._control.gather(facts)
        if len(set(told)) > 1:
            listed = "; ".join(f"rank {rank}: {fact}" for rank, fact in enumerate(told))
            raise CheckpointError(f"the processes do not agree where to start: {listed}")

    def _tell(self, start: Start) -> None:
        origin = f" from {start.uri} (digest {start.digest})" if start.uri else ""
        self._context.say(f"starting at step {start.step}: {start.source}{origin}")
        source = "checkpoint" if start.commit else start.source
        self._context.emit(StartChosen(source, start.step, start.uri, start.digest))


def first_weights(start: Start, tensors: Mapping[str, Tensor], seed: int) -> WeightReader:
    """The values parameters are created with; a checkpoint overwrites them."""
    if start.source == "pretrained":
        assert start.uri is not None
        return PretrainedWeights(Path(start.uri), tensors)
    return InitialWeights(tensors, seed)


def load_checkpoint(context: WorkerContext, start: Start, strategy: Strategy, control: Agreement) -> dict[str, Any]:
    """Put the fetched checkpoint into model and optimiser and continue the random generators.

    Returns this rank's position in a stream ({} for rows by number, or when the world size has changed). The fetched
    files are deleted afterwards. Raises ``CheckpointError`` if the checkpoint does not fit the model.
    """
    assert start.folder is not None
    # The manifest was verified before: only then may DCP's metadata, a pickle, be opened.
    try:
        read_distributed(strategy.state_dict(), checkpoint_id=start.folder, process_group=control.group)
    except (CheckpointException, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{start.uri}: does not fit this job's model: {error}") from error
    strategy.state_loaded()
    private = _load_private(context, start)
    control.barrier()
    if context.place.is_node_leader:
        shutil.rmtree(start.folder, ignore_errors=True)
    return private


def _load_private(context: WorkerContext, start: Start) -> dict[str, Any]:
    assert start.folder is not None
    saved_world = start.commit.save.world_size if start.commit else 0
    if saved_world != context.place.world_size:
        if json.loads(rank_file(start.folder, 0).read_text(encoding="utf-8"))["stream"]:
            raise CheckpointError(
                f"{start.uri}: was saved by {saved_world} processes, each at its own place in a stream; it cannot be "
                f"continued by {context.place.world_size}. Start {saved_world} processes, or prepare the text as rows"
            )
        context.notice(
            f"the checkpoint was saved by {saved_world} processes and is continued by {context.place.world_size}: the "
            "same tokens in the same order, but sums are added in another order and random generators start anew"
        )
        return {}
    private = json.loads(rank_file(start.folder, context.place.rank).read_text(encoding="utf-8"))
    random_state.restore(private["random"])
    stream: dict[str, Any] = private["stream"]
    return stream
