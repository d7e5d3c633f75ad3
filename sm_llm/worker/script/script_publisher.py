"""Publishes a program's checkpoints while it runs: what it hands over, and folders that change no more."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sm_llm.contract.program import RESUME_FOLDER, RESUME_STEP, step_of
from sm_llm.errors import SmLlmError, StorageError
from sm_llm.runs.events.checkpoints import CheckpointPublished
from sm_llm.storage.files import link_tree, write_atomically
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.publication.publish import upload_part
from sm_llm.storage.uri import join
from sm_llm.worker.script.calls import LATE_SECONDS, TAKEN, closed, holds_file, quiet_since
from sm_llm.worker.script.plain_files import make_names_usable, sentences

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.manifest import PartManifest, Save
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.supervision.store_all_gather import StoreAllGather

SETTLE_SECONDS = 30.0
"""A folder that the program did not hand over is taken for complete after so long without a change."""
KEEP_LAST = 2
MARKS = ".sm_llm"
"""Folder of a checkpoint with a file of every node, so that a node may have nothing else to store."""
_POLL_SECONDS = 0.5
TURN_SECONDS = 10.0
"""How long after the end of a failed program its publisher may take to begin with what was handed over."""
_AT_WORK = (".taken-", ".sealed-")
_Found = TypeVar("_Found")


class ScriptPublisher:
    """On the first process of every node. Node 0 decides what is published next, the others join in.

    ``gather`` is among nodes, and used by this thread alone. A publication that fails is reported and given up; the
    program continues.
    """

    def __init__(
        self,
        context: WorkerContext,
        store: Store,
        gather: StoreAllGather,
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
        # The newest step that is published, or was given up.
        self._done = done
        self._resumed = done
        self._complete = False
        # Why a folder could not be read, as it was reported last.
        self._read_error = ""
        # Folders below the step that the run continues from, which were reported.
        self._stale: set[Path] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> Self:
        self._handover.mkdir(parents=True, exist_ok=True)
        self._note_taken()
        self._thread.start()
        return self

    def finish(self, *, complete: bool) -> None:
        """After the program: publish what is left of it; returns when that is done.

        Only if the program ended by itself are folders ``complete`` that it did not hand over and changed just now.
        """
        self._complete = complete
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            # An error outside a publication is one of the channel between nodes: without it nothing can be agreed on.
            while self._turn():
                pass
        except SmLlmError as error:
            self._context.notice(f"checkpoints are not published any more: {error}", "warning")

    def _turn(self) -> bool:
        """One publication on all nodes; False when there will be no more."""
        # Only node 0 searches. The others wait in the gather for the step that it has found.
        step = self._next() if self._context.process.is_leader else None
        step = self._gather(step)[0]
        if step is None:
            return False
        began = time.monotonic()
        save = publication.new_save(
            self._context.job.run_id, step, world_size=self._context.process.world_size, node_count=len(self._gather(0))
        )
        save = self._gather(save)[0]
        try:
            published = publication.publish(
                self._store,
                save,
                self._folder("sealed", step),
                node=self._context.process.node,
                leader=self._context.process.is_leader,
                gather=self._gather,
                meta={"kind": "script", "spec_digest": self._context.job.spec_digest},
                upload=self._upload,
            )
            if self._context.process.is_leader:
                # All nodes end a publication alike, so each of them comes to the next turn.
                self._announce(published, step, time.monotonic() - began)
        except (SmLlmError, OSError) as error:
            self._context.notice(f"the checkpoint of step {step} was not published: {error}", "warning")
        finally:
            # Published or given up, it is not taken again: a step that fails cannot block later ones.
            self._done = step
            self._clear(step)
        return True

    def _folder(self, what: str, step: int) -> Path:
        """A folder of this node's files of ``step``, beside what is handed over: ``taken``, then ``sealed``."""
        return self._handover / f".{what}-{step}"

    def _clear(self, step: int) -> None:
        """Free the files of ``step``, and what is not needed any more; what came too late, its program removes."""
        self._note_taken()  # before the rest is cleared: from here on an older step is refused where it is handed over
        over = [it for it in self._handed() if it <= step and not closed(self._handover, it).exists()]
        if over and self._context.process.is_leader:
            listed = ", ".join(map(str, sorted(over)))
            self._context.notice(f"not published, step {step} is newer: checkpoints of steps {listed}", "warning")
        folders = [
            self._folder("taken", step),
            self._folder("sealed", step),
            *(self._handover / str(it) for it in over),
        ]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _note_taken(self) -> None:
        """Let ``publish`` know which steps come too late to be published."""
        if self._done >= 0:
            with suppress(OSError):  # without it, too old a step is reported here
                write_atomically(self._handover / TAKEN, str(self._done))

    def _report_stale(self, settled: list[tuple[int, Path]]) -> None:
        """Name folders of a program that begins anew although its run continues: the run has gone further."""
        found = [path for step, path in settled if step < self._resumed and path not in self._stale]
        self._stale.update(found)
        for path in found if self._context.process.is_leader else ():
            words = f"{path.name} is not published: the run continues from step {self._resumed}, which is newer"
            self._context.notice(f"{words} ({RESUME_STEP}, {RESUME_FOLDER})", "warning")

    def report_changing(self) -> None:
        """Name the newest folder of a program that failed or was stopped, if it may be half written."""

        def changing() -> list[tuple[int, Path]]:
            newer = [it for it in self._folders() if it[0] > self._done]
            return [it for it in newer if quiet_since(it[1]) < SETTLE_SECONDS]

        left = [] if self._complete else self._listed(changing)
        if left and self._context.process.is_leader:
            rule = f"changed within {SETTLE_SECONDS:.0f} s of the end of a program that failed or was stopped"
            way = "It may be half written; sm_llm.publish(folder, step) hands a folder over at once"
            self._context.notice(f"{max(left)[1].name} is not published, {rule}. {way}", "warning")

    def _next(self) -> int | None:
        """Wait for a step and take its files of this node; None once the program has ended and nothing is left."""
        while True:
            # Read before the search: what a program leaves just before its end is then found by the last one.
            ended = self._closing.is_set()
            settled = self._settled()
            self._report_stale(settled)
            found = [*self._handed(), *(step for step, _ in settled)]
            # Only the newest: steps that it has overtaken are cleared with it.
            newest = max(found, default=self._done)
            if newest > self._done:
                if self._take_or_report(newest):
                    return newest
            elif ended:
                self.report_changing()
                return None
            time.sleep(_POLL_SECONDS)

    def _take_or_report(self, step: int) -> bool:
        """``_take``; what fails is reported and given up."""
        try:
            return self._take(step)
        except OSError as error:
            self._context.notice(f"the checkpoint of step {step} was not published: {error}", "warning")
            self._done = step
            self._clear(step)
            return False

    def _handed(self) -> list[int]:
        return self._listed(lambda: [int(path.name) for path in self._handover.iterdir() if path.name.isdigit()])

    def _settled(self) -> list[tuple[int, Path]]:
        """Checkpoint folders that are complete: nothing in them has changed for long, or nobody is left to do so."""
        return self._listed(
            lambda: [it for it in self._folders() if self._complete or quiet_since(it[1]) >= SETTLE_SECONDS]
        )

    def _folders(self) -> list[tuple[int, Path]]:
        """Checkpoint folders with a file in them, and their steps."""
        folders = [path for path in self._checkpoints.iterdir() if path.is_dir()] if self._checkpoints.is_dir() else []
        named = [(step, path) for path in folders if (step := step_of(path.name)) is not None]
        return [(step, path) for step, path in named if holds_file(path)]

    def _listed(self, listing: Callable[[], list[_Found]]) -> list[_Found]:
        """What ``listing`` finds: nothing, where the program changes folders under its eyes. It will look again."""
        try:
            return listing()
        except OSError as error:
            if str(error) != self._read_error:
                self._read_error = str(error)
                self._context.notice(f"the search for checkpoints failed and is tried again: {error}", "warning")
            return []

    def _upload(self, store: Store, save: Save, sealed: Path, node: int, **options: Any) -> PartManifest:
        """Store this node's files; at least a mark that it has none. Its failure is reported to all nodes."""
        assert save.step is not None
        taken = self._folder("taken", save.step)
        # Part of the publication, after which all nodes exchange their errors. Raising outside would leave the others
        # waiting.
        if not self._context.process.is_leader:  # the leader has taken them before it sent the step
            self._wait_for_files(save.step)
        mark = taken / MARKS / f"node-{node}.json"
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text("{}\n", encoding="utf-8")
        for folder in sorted(it for it in taken.iterdir() if it.name != MARKS):
            for text in make_names_usable(folder):
                self._context.notice(f"checkpoint of step {save.step}: {text}", "warning")
        publication.seal(taken, sealed)
        return self._context.agent.call(upload_part, store, save, sealed, node, **options)

    def _wait_for_files(self, step: int) -> None:
        """Take this node's files, if it has any; they may be some seconds behind the first node's.

        Raises ``StorageError`` if there are some that are not complete.
        """
        deadline = time.monotonic() + LATE_SECONDS
        while True:
            # Read before the search, as in ``_next``.
            last = self._closing.is_set() or time.monotonic() > deadline
            if self._take(step):
                return
            if last:
                break
            time.sleep(_POLL_SECONDS)
        # Close the step, then search once more: see ``calls.publish`` for the other side of this race.
        closed(self._handover, step).touch()
        if not self._take_handed(step) and (changing := [path for it, path in self._folders() if it == step]):
            raise StorageError(f"{changing[0]} was not complete in time")

    def _take(self, step: int) -> bool:
        """Bring this node's files of ``step`` aside, as ``<name>/…``; False if none are complete."""
        if self._take_handed(step):
            return True
        settled = self._settled_of(step)
        if settled is None:
            return False
        taken, failure = self._folder("taken", step), None
        try:
            # Linking changes no time of the program's files, so a second look shows whether the program has.
            left_out = link_tree(settled, taken / settled.name)
        except OSError as error:
            failure = error
        if self._settled_of(step) != settled:  # the program has touched, renamed or removed it meanwhile
            shutil.rmtree(taken, ignore_errors=True)
            return False
        if failure is not None:
            raise failure
        for text in sentences(settled, left_out):
            self._context.notice(text, "warning")
        return True

    def _take_handed(self, step: int) -> bool:
        with suppress(FileNotFoundError):
            (self._handover / str(step)).rename(self._folder("taken", step))
            return True
        return False

    def _settled_of(self, step: int) -> Path | None:
        return next((path for it, path in self._settled() if it == step), None)

    def _announce(self, published: publication.CommitResult, step: int, seconds: float) -> None:
        if published.commit is None or not published.won:
            self._context.notice(f"checkpoint of step {step} dropped: {published.reason}", "warning")
            return
        uri, size = join(self._store.uri, published.commit.save.slot.commit_key), published.commit.size
        self._context.emit(CheckpointPublished(step, uri, size, seconds, 0.0))
        self._context.log(f"checkpoint step {step}: {size / 2**20:.1f} MiB published in {seconds:.2f} s")
        self._collect(step)

    def _collect(self, step: int) -> None:
        """Delete what is older than ``step``. A failure leaves garbage, which the next collection finds."""
        try:
            # Also kept is the one that the program resumed from: docs/publication.md, "Garbage collection".
            publication.collect_garbage(
                self._store, run_id=self._context.job.run_id, keep_last=KEEP_LAST, protect={self._resumed, step}
            )
        except StorageError as error:
            self._context.notice(f"old checkpoints could not be deleted: {error}", "warning")


def await_publication(handover: Path, is_over: Callable[[], bool]) -> None:
    """Wait until the checkpoints that a program has handed over on this node are published, or ``is_over()``.

    One that waits for its turn is waited for ``TURN_SECONDS`` at most: the publisher never takes a step that a later
    one has overtaken, or that the first node never hands over.
    """
    turn_ends: float | None = None
    while not is_over():
        found = [path.name for path in handover.iterdir()] if handover.is_dir() else []
        if any(name.startswith(_AT_WORK) for name in found):
            # What is being published ends by itself, in success or with an error.
            turn_ends = None
        elif not any(name.isdigit() for name in found):
            return
        else:
            turn_ends = turn_ends or time.monotonic() + TURN_SECONDS
            if time.monotonic() > turn_ends:
                return
        time.sleep(_POLL_SECONDS / 5)


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
    # A checkpoint holds the program's folder under its own name; the marks of nodes are not its business.
    names = sorted({Path(entry.path).parts[0] for entry in restored.commit.files} - {MARKS})
    for name in names:
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        shutil.move(restored.folder / name, checkpoints / name)
    shutil.rmtree(fetched, ignore_errors=True)
    return restored.commit.step, checkpoints / names[0] if names else checkpoints
