"""Publishes a program's checkpoints while it runs: what it hands over, and folders that change no more."""

from __future__ import annotations

import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sm_llm.contract.program import step_of
from sm_llm.contract.published import CheckpointPublished
from sm_llm.errors import SmLlmError
from sm_llm.storage import publish as publication
from sm_llm.storage.publish import upload_part
from sm_llm.storage.uri import join
from sm_llm.worker.calls import LATE_SECONDS, closed, link_tree, quiet_since

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.storage.base import Store
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.gathering import Gathering

SETTLE_SECONDS = 30.0
"""A folder that the program did not hand over is taken for complete after so long without a change."""
KEEP_LAST = 2
MARKS = ".sm_llm"
"""Folder of a checkpoint with a file of every node, so that a node may have nothing else to store."""
_LOOK_SECONDS = 0.5


class ScriptPublisher:
    """On the first process of every node. Node 0 decides what is published next, the others join in.

    ``gather`` is among nodes, and used by this thread alone. A publication that fails is told and given up; the
    program goes on.
    """

    def __init__(
        self,
        context: WorkerContext,
        store: Store,
        gather: Gathering,
        *,
        checkpoints: Path,
        handover: Path,
        done: int,
    ) -> None:
        self._context = context
        self._store = store
        self._gather = gather
        self._checkpoints = checkpoints
        self._handover = handover
        self._done = done
        """The newest step that is published, or was given up."""
        self._resumed = done
        self._complete = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> Self:
        self._handover.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def finish(self, *, well: bool) -> None:
        """After the program: publish what is left of it; returns when that is done.

        Only if it ended ``well`` are folders taken for complete that it did not hand over and changed just now.
        """
        self._complete = well
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except SmLlmError as error:
            self._context.notice(f"checkpoints are not published any more: {error}", "warning")

    def _turn(self) -> bool:
        """One publication on all nodes; False when there will be no more."""
        step = self._next() if self._context.place.is_leader else None
        step = self._gather(step)[0]
        if step is None:
            return False
        began = time.monotonic()
        save = publication.new_save(
            self._context.job.run_id, step, world_size=self._context.place.world_size, node_count=len(self._gather(0))
        )
        save = self._gather(save)[0]
        working = self._context.scratch / "script" / "saving" / save.save_id
        try:
            sealed = self._seal(step, working)
            published = publication.publish(
                self._store,
                save,
                sealed,
                node=self._context.place.node,
                leader=self._context.place.is_leader,
                gather=self._gather,
                meta={"kind": "script", "spec_digest": self._context.job.spec_digest},
                upload=partial(self._context.agent.call, upload_part),
            )
            if self._context.place.is_leader:
                self._announce(published, step, time.monotonic() - began)
        except (SmLlmError, OSError) as error:
            self._context.notice(f"the checkpoint of step {step} was not published: {error}", "warning")
        finally:
            self._done = step
            shutil.rmtree(working, ignore_errors=True)
            shutil.rmtree(working.with_name(f"{save.save_id}.sealed"), ignore_errors=True)
            shutil.rmtree(self._handover / str(step), ignore_errors=True)
        return True

    def _next(self) -> int | None:
        """Wait for a step to publish; None once the program has ended and nothing is left."""
        while True:
            ended = self._ending.is_set()
            handed = [int(path.name) for path in self._handover.iterdir() if path.name.isdigit()]
            found = [*handed, *(step for step, _ in self._settled())]
            if newer := [step for step in found if step > self._done]:
                return max(newer)
            if ended:
                return None
            time.sleep(_LOOK_SECONDS)

    def _settled(self) -> list[tuple[int, Path]]:
        """Checkpoint folders that are complete: nothing in them has changed for long, or nobody is left to do so."""
        folders = [path for path in self._checkpoints.iterdir() if path.is_dir()] if self._checkpoints.is_dir() else []
        named = [(step, path) for path in folders if (step := step_of(path.name)) is not None]
        return [(step, path) for step, path in named if self._complete or quiet_since(path) >= SETTLE_SECONDS]

    def _seal(self, step: int, working: Path) -> Path:
        """This node's files of ``step``; at least a mark that says it has none."""
        node = self._context.place.node
        source = self._own_files(step)
        if source is not None:
            link_tree(source, working)
        closed(self._handover, step).touch()
        mark = working / MARKS / f"node-{node}.json"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text("{}\n", encoding="utf-8")
        return publication.seal(working, working.with_name(f"{working.name}.sealed"))

    def _own_files(self, step: int) -> Path | None:
        """A folder with ``<name>/…``. The first node has it at once, the others may be some seconds behind."""
        handed = self._handover / str(step)
        deadline = time.monotonic() + LATE_SECONDS
        while True:
            if handed.is_dir():
                return handed
            found = [path for number, path in self._settled() if number == step]
            if found:
                link_tree(found[0], handed / found[0].name)
                return handed
            if self._ending.is_set() or time.monotonic() > deadline or self._context.place.is_leader:
                return None
            time.sleep(_LOOK_SECONDS)

    def _announce(self, published: publication.Published, step: int, seconds: float) -> None:
        if published.commit is None or not published.won:
            self._context.notice(f"checkpoint of step {step} dropped: {published.reason}", "warning")
            return
        uri, size = join(self._store.uri, published.commit.save.slot.commit_key), published.commit.size
        self._context.emit(CheckpointPublished(step, uri, size, seconds, 0.0))
        self._context.say(f"checkpoint step {step}: {size / 2**20:.1f} MiB published in {seconds:.2f} s")
        publication.collect_garbage(
            self._store, run_id=self._context.job.run_id, keep_last=KEEP_LAST, protect={self._resumed, step}
        )


def restore_checkpoint(
    store: Store, run_id: str, checkpoints: Path, *, leader: bool, gather: Callable[[object], list[object]]
) -> tuple[int, Path] | None:
    """Bring the run's newest checkpoint back into the checkpoint folder of every node, under its own name.

    A collective among nodes. Returns its step and folder; None where the run has none. Raises ``CheckpointError``
    and ``StorageError`` on all nodes alike.
    """
    fetched = checkpoints.with_name(f"{checkpoints.name}.restored")
    restored = publication.restore(store, fetched, run_id=run_id, leader=leader, fetches=True, gather=gather)
    if restored is None:
        return None
    assert restored.commit.step is not None
    names = sorted({Path(entry.path).parts[0] for entry in restored.commit.files} - {MARKS})
    for name in names:
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        shutil.move(restored.folder / name, checkpoints / name)
    shutil.rmtree(fetched, ignore_errors=True)
    return restored.commit.step, checkpoints / names[0] if names else checkpoints
