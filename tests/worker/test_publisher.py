"""The publisher of one process over a store that fails: what it logs, and how it bears two threads at once."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication import publish as publication
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.publishing import publisher as module
from sm_llm.worker.publishing.checkpoint_age import CheckpointAge
from sm_llm.worker.publishing.publisher import Publisher, Sealed
from sm_llm.worker.transfer.local_copies import LocalCopies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Alone:
    """The control of a world of one."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Shut(FolderStore):
    """Refuses files until it is opened."""

    is_open = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        """Files wait for it."""
        self.gate.set()

    def put_file(self, source: Path, key: str) -> Any:
        self.gate.wait(120)
        if not self.is_open:
            raise StorageError("the store is shut")
        return super().put_file(source, key)


class Bench:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.logged: list[str] = []
        self.commits_at_upload: list[list[Any]] = []
        """What was committed whenever events were uploaded."""
        self.store = Shut(root / "run")
        context: Any = SimpleNamespace(
            process=ProcessInfo(),
            copies=LocalCopies(root),
            job=SimpleNamespace(run_id="tiny"),
            agent=SimpleNamespace(call=lambda function, *arguments, **named: function(*arguments, **named)),
            emit=lambda event: None,
            upload_events=lambda: self.commits_at_upload.append([*self.store.list("ckpt/commits/")]),
            notice=lambda message, level: self.logged.append(message),
        )
        control: Any = Alone()
        self.publisher = Publisher(context, self.store, control, CheckpointAge(), 3600.0, self._announce)
        self.fault: Exception | None = None
        """What goes wrong after the next publication."""

    def _announce(self, *_: object) -> None:
        if self.fault is not None:
            raise self.fault

    def offer(self, step: int) -> Sealed:
        folder = self.root / f"working-{step}"
        folder.mkdir()
        (folder / "weights").write_bytes(b"x" * step)
        save = publication.new_save("tiny", step, world_size=1, node_count=1)
        sealed = Sealed(save, publication.seal(folder, self.root / f"sealed-{step}"), {}, 0.0, 0.0)
        control: Any = Alone()
        self.publisher.offer(sealed, control)
        return sealed


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.05)
    (tmp_path / "run").mkdir()
    found = Bench(tmp_path)
    yield found
    found.publisher.close(wait=True)


def test_events_are_stored_before_the_checkpoint_that_a_run_continues_from(bench: Bench) -> None:
    """A process that is killed right behind its commit would leave steps without a loss."""
    bench.store.is_open = True
    assert bench.offer(1).done.result(120) is not None
    assert bench.commits_at_upload == [[]]
    assert [*bench.store.list("ckpt/commits/")]


@pytest.mark.parametrize(
    ("is_awaited", "logged"), [(False, "Training continues, and"), (True, "The run waits for it, and")]
)
def test_a_save_that_fails_is_reported_with_what_happens_meanwhile(bench: Bench, is_awaited: bool, logged: str) -> None:
    bench.publisher.is_awaited = is_awaited
    sealed = bench.offer(1)
    while not bench.logged:
        assert bench.publisher.failure is None
    bench.store.is_open = True
    assert sealed.done.result(120) is not None
    assert re.search(
        rf"the store is shut \(none is published after \d+ s\)\. {logged} it is tried again", bench.logged[0]
    )


def test_nothing_is_promised_of_a_save_that_is_given_up(bench: Bench) -> None:
    bench.publisher.end_soon()
    sealed = bench.offer(1)
    with pytest.raises(StorageError, match="the store is shut"):
        sealed.done.result(120)
    assert bench.logged[0].endswith(" s)")


def test_a_save_that_a_newer_one_replaces_while_all_is_given_up_ends_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store.is_open, bench.fault = True, RuntimeError("the channel broke")
    bench.store.gate.clear()
    saves = [bench.offer(1), bench.offer(2)]
    drop = Publisher._drop

    def late(publisher: Publisher, key: str) -> None:
        bench.store.gate.set()  # the other thread gives up after this one has looked whether it did
        with pytest.raises(RuntimeError):
            saves[0].done.result(120)
        drop(publisher, key)

    monkeypatch.setattr(Publisher, "_drop", late)
    saves.append(bench.offer(3))
    for it in saves:
        with pytest.raises(RuntimeError, match="the channel broke"):
            it.done.result(120)
        assert it.folder.is_dir(), "the newest there is"
    assert not bench.publisher.is_busy
