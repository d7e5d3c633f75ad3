"""A program's checkpoints: only whole ones are published, whatever it does to its folders meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from sm_llm.contract import program as names
from sm_llm.errors import StorageError
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication.publish import list_checkpoints, restore
from sm_llm.worker.script import calls, script_publisher
from sm_llm.worker.script.calls import closed, link_tree, publish, quiet_since
from sm_llm.worker.script.script_publisher import MARKS, ScriptPublisher
from sm_llm.worker.supervision.store_all_gather import StoreAllGather

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.storage.files import WalkedFile

OLD = 1000.0


class Notes(dict[str, str]):
    """A board in memory."""

    put = dict.__setitem__


class Cluster:
    """The publishers of a job's nodes in this process, each with folders of its own and one store."""

    def __init__(self, root: Path, nodes: int = 1) -> None:
        self.root, self.notices, self._notes = root, list[str](), Notes()
        (root / "store").mkdir()
        self.store = FolderStore(root / "store")
        self.nodes = [self._node(node, nodes) for node in range(nodes)]

    def _node(self, node: int, count: int) -> ScriptPublisher:
        context = SimpleNamespace(
            process=SimpleNamespace(is_leader=node == 0, node=node, node_count=count, world_size=count),
            job=SimpleNamespace(run_id="run", spec_digest="digest"),
            agent=SimpleNamespace(call=lambda function, *given, **named: function(*given, **named)),
            notice=lambda message, _: self.notices.append(message),
            log=lambda _: None,
            emit=lambda _: None,
        )
        self.checkpoints(node).mkdir(parents=True)
        return ScriptPublisher(
            cast("Any", context),
            self.store,
            StoreAllGather(cast("Any", self._notes), "publisher", node, count, timeout=120),
            checkpoints=self.checkpoints(node),
            handover=self.handover(node),
            done=-1,
        ).start()

    def checkpoints(self, node: int = 0) -> Path:
        return self.root / f"node-{node}" / "checkpoints"

    def handover(self, node: int = 0) -> Path:
        return self.root / f"node-{node}" / "handover"

    def write(self, step: int, node: int = 0, *, age: float = 0.0) -> Path:
        """A checkpoint folder, ready before it gets its name; nothing in it has changed for ``age`` seconds."""
        working = self.root / "written"
        working.mkdir()
        (working / f"weights-{node}").write_text(str(step))
        age_all(working, age)
        return working.rename(self.checkpoints(node) / f"checkpoint-{step}")

    def finish(self, *, complete: bool = True) -> None:
        for publisher in reversed(self.nodes):
            publisher._complete = complete
            publisher._closing.set()
        for publisher in self.nodes:
            publisher.finish(complete=complete)

    def published(self) -> list[int | None]:
        return [it.step for it in list_checkpoints(self.store)]

    def files(self, folder: Path) -> list[str]:
        """Names of the files of the newest checkpoint, without our marks."""
        found = restore(self.store, folder, run_id="run", leader=True, fetches=True, gather=lambda value: [value])
        assert found is not None
        return sorted(Path(it.path).name for it in found.commit.files if not it.path.startswith(MARKS))


def age_all(folder: Path, age: float) -> None:
    then = time.time() - age
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (then, then), follow_symlinks=False)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_publisher, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr("sm_llm.worker.supervision.store_all_gather._POLL_SECONDS", 0.02)


@pytest.fixture
def handing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes ``sm_llm.publish`` hand over to a folder."""
    monkeypatch.setenv("LOCAL_RANK", "0")

    def hand(handover: Path) -> None:
        handover.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv(names.HANDOVER, str(handover))

    return hand


def test_what_vanishes_while_it_is_read_counts_as_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint-5"
    assert quiet_since(folder) == 0
    (folder / "inner").mkdir(parents=True)
    (folder / "w").touch()
    (folder / "inner" / "w").touch()
    age_all(folder, OLD)
    assert quiet_since(folder) > OLD - 1
    for gone in ("w", "inner"):
        monkeypatch.setattr(os, "walk", walk_then(folder, lambda name=gone: (folder / name).rename(tmp_path / name)))
        assert quiet_since(folder) == 0
        monkeypatch.undo()
        (tmp_path / gone).rename(folder / gone)
        age_all(folder, OLD)


def walk_then(folder: Path, action: Callable[[], object]) -> Callable[..., Any]:
    """``os.walk`` that calls ``action`` after it has listed ``folder``."""
    walk = os.walk

    def walked(top: Path, *given: Any, **named: Any) -> Any:
        for entry in walk(top, *given, **named):
            if Path(entry[0]) == folder:
                action()
            yield entry

    return walked


def test_a_link_that_stays_dangling_does_not_hinder_publication(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    working = tmp_path / "working"
    working.mkdir()
    (working / "w").touch()
    (working / "latest").symlink_to("nowhere")
    (working / "loop").symlink_to("loop")
    age_all(working, OLD)
    working.rename(cluster.checkpoints() / "checkpoint-5")
    until(cluster.published)
    cluster.finish()
    assert cluster.files(tmp_path / "back") == ["w"]
    assert cluster.notices == [
        f"checkpoint-5/{name} is not published: it is a link that leads nowhere" for name in ("latest", "loop")
    ]


def test_a_bad_look_is_reported_once_and_does_not_end_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = []

    def quiet(folder: Path) -> float:
        polls.append(folder)
        if len(polls) < 4:
            raise PermissionError(13, "Permission denied", str(folder))
        return quiet_since(folder)

    monkeypatch.setattr(script_publisher, "quiet_since", quiet)
    cluster = Cluster(tmp_path)
    folder = cluster.write(5, age=OLD)
    until(cluster.published)
    cluster.finish()
    assert [it for it in cluster.notices if str(folder) in it] == cluster.notices
    assert len(cluster.notices) == 1


def test_a_folder_that_a_stopped_program_has_just_written_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.write(4, age=OLD)
    until(cluster.published)
    cluster.write(5)
    cluster.finish(complete=False)
    assert cluster.published() == [4]
    (notice,) = cluster.notices
    assert notice.startswith("checkpoint-5 is not published, changed within 30 s of the end of a program that failed")
    assert "sm_llm.publish(folder, step)" in notice


def touch(folder: Path) -> None:
    (folder / "weights-0").touch()


def rotate(folder: Path) -> None:
    (folder / "weights-0").unlink()
    (folder / "rest").touch()


@pytest.mark.parametrize("when", ["quiet_since", "link_tree"])
@pytest.mark.parametrize("change", [touch, rotate, shutil.rmtree])
def test_a_folder_that_changes_as_it_is_taken_waits_until_it_is_settled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], when: str
) -> None:
    """The program changes it after it was listed first, or as its first file is about to be linked."""
    changed = threading.Event()
    really = getattr(script_publisher, when)

    def changing(folder: Path, *target: Path) -> Any:
        answer = really(folder) if not target else None
        if not changed.is_set():
            change(folder)
            changed.set()
        return really(folder, *target) if target else answer

    monkeypatch.setattr(script_publisher, when, changing)
    cluster = Cluster(tmp_path)
    folder = cluster.write(5, age=OLD)
    until(changed.is_set)
    if change is touch:
        age_all(folder, OLD)
        until(cluster.published)
    cluster.finish(complete=False)
    assert cluster.published() == ([5] if change is touch else [])
    assert change is not touch or cluster.files(tmp_path / "back") == ["weights-0"]
    # What is left at the end of a program that failed or was stopped is named.
    assert [it[:12] for it in cluster.notices] == (["checkpoint-5"] if change is rotate else [])


def test_a_folder_without_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    (cluster.checkpoints() / "checkpoint-9").mkdir()
    cluster.write(5)
    cluster.finish()
    assert cluster.published() == [5]


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_file_whose_name_no_store_takes_is_published_under_another(
    is_handed_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("weights", "a\nb.txt"):
        (folder / name).write_text("x")
    if is_handed_over:
        monkeypatch.setenv(names.HANDOVER, str(cluster.handover()))
        publish(folder, 5)
    else:
        folder.rename(cluster.checkpoints() / "checkpoint-5")
    cluster.finish()
    assert cluster.published() == [5]
    found = cluster.files(tmp_path / "restored")
    assert len(found) == 2
    assert found[0].endswith("-a_b.txt")
    (notice,) = cluster.notices
    assert "checkpoint of step 5: 'a\\nb.txt' cannot be the name of a published file" in notice
    if not is_handed_over:  # the program's own file keeps its name
        assert (cluster.checkpoints() / "checkpoint-5" / "a\nb.txt").is_file()


def test_files_that_cannot_be_taken_are_reported_and_publication_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> list[WalkedFile]:
        if source.name == "checkpoint-5":
            raise OSError(28, "No space left on device")
        return link_tree(source, target)

    monkeypatch.setattr(script_publisher, "link_tree", link)
    cluster = Cluster(tmp_path)
    cluster.write(5, age=OLD)
    until(lambda: cluster.notices)
    cluster.write(6, age=OLD)
    until(cluster.published)
    cluster.finish()
    assert cluster.published() == [6]
    assert cluster.notices == [
        "the checkpoint of step 5 was not published: [Errno 28] No space left on device"
    ]  # fmt: skip


def test_a_checkpoint_is_published_though_old_ones_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise StorageError("AccessDenied")

    monkeypatch.setattr(script_publisher.publication, "collect_garbage", refuse)
    cluster = Cluster(tmp_path)
    cluster.write(5, age=OLD)
    until(cluster.published)
    cluster.finish()
    assert cluster.notices == ["old checkpoints could not be deleted: AccessDenied"]


def test_a_node_whose_files_cannot_be_taken_fails_the_checkpoint_on_all_and_the_next_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> list[WalkedFile]:
        if "node-1" in source.parts and source.name == "checkpoint-5":
            raise OSError(28, "No space left on device")
        return link_tree(source, target)

    monkeypatch.setattr(script_publisher, "link_tree", link)
    cluster = Cluster(tmp_path, nodes=2)
    for node in (1, 0):
        cluster.write(5, node, age=OLD)
    until(lambda: len(cluster.notices) == 2)
    assert all("step 5 was not published" in it and "No space left" in it for it in cluster.notices)
    for node in (1, 0):
        cluster.write(6, node, age=OLD)
    until(cluster.published)
    cluster.finish()
    assert cluster.published() == [6]
    assert cluster.files(tmp_path / "back") == ["weights-0", "weights-1"]


def test_a_stop_publishes_nothing_without_the_files_that_a_node_was_still_writing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=2)
    cluster.write(5, 1)
    cluster.write(5, 0, age=OLD)
    until((cluster.handover() / ".taken-5").is_dir)
    cluster.finish(complete=False)
    assert cluster.published() == []
    assert "checkpoint-5 was not complete in time" in cluster.notices[0]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder that the second node hands over."""
    (tmp_path / "source" / "mine").mkdir(parents=True)
    (tmp_path / "source" / "mine" / "weights-1").touch()
    return tmp_path / "source" / "mine"


def test_files_whose_copy_lasts_until_the_node_has_given_up_are_reported_as_late(
    tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, handing: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(script_publisher, "LATE_SECONDS", 0.0)
    cluster = Cluster(tmp_path, nodes=2)
    handing(cluster.handover(1))

    def slow(origin: Path, target: Path) -> list[WalkedFile]:
        left_out = link_tree(origin, target)
        cluster.write(5, age=OLD)
        until(cluster.published)
        return left_out

    monkeypatch.setattr(calls, "link_tree", slow)
    with pytest.raises(StorageError, match=r"step 5: .*mine came too late"):
        publish(mine, 5)
    cluster.finish()
    assert not list(cluster.handover(1).rglob("weights-1")), "what came too late is not kept"


def test_files_that_are_handed_over_just_before_the_node_looks_once_more_are_published(
    tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, handing: Callable[[Path], None]
) -> None:
    def handed_over_now(handover: Path, step: int) -> Path:
        if handover == cluster.handover(1) and not closed(handover, step).exists():
            publish(mine, step)
        return closed(handover, step)

    monkeypatch.setattr(script_publisher, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(script_publisher, "closed", handed_over_now)
    cluster = Cluster(tmp_path, nodes=2)
    handing(cluster.handover(1))
    cluster.write(5, age=OLD)
    until(cluster.published)
    cluster.finish()
    assert cluster.files(tmp_path / "back") == ["weights-0", "weights-1"]


@pytest.mark.parametrize("taken", [True, False])
def test_files_handed_over_to_a_node_that_gives_up_are_late_unless_it_takes_them_yet(
    tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, handing: Callable[[Path], None], taken: bool
) -> None:
    """The node gives up between the handing over and the look after it."""
    handover = tmp_path / "handover"
    handing(handover)

    def given_up(handover: Path, step: int) -> Any:
        polls = iter([False, True])

        def exists() -> bool:
            if (handover / str(step)).exists() and taken:
                (handover / str(step)).rename(handover / "taken")
            return next(polls)

        return SimpleNamespace(exists=exists)

    monkeypatch.setattr(calls, "closed", given_up)
    if taken:
        publish(mine, 5)
    else:
        with pytest.raises(StorageError, match="too late"):
            publish(mine, 5)
    assert [path.name for path in handover.iterdir()] == (["taken"] if taken else [])


def test_a_folder_may_be_handed_over_after_it_was_published_as_settled(
    tmp_path: Path, handing: Callable[[Path], None]
) -> None:
    cluster = Cluster(tmp_path)
    handing(cluster.handover())
    folder = cluster.write(5, age=OLD)
    until(cluster.published)
    publish(folder, 5)
    publish(cluster.write(6), 6)
    cluster.finish()
    assert cluster.published() == [5, 6]
    assert not [it for it in cluster.handover().iterdir() if it.is_dir()], "no copy is left behind"


def test_12f_a_step_that_cannot_be_published_any_more_is_named(
    tmp_path: Path, handing: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path)
    handing(cluster.handover())
    folder = cluster.write(5, age=OLD)
    until(cluster.published)
    until(lambda: (cluster.handover() / calls.TAKEN).exists())
    publish(folder, 3)
    publish(folder, 5)
    newer = cluster.write(6)
    publish(newer, 6)
    publish(newer, 6)
    cluster.finish()
    assert cluster.published() == [5, 6]
    printed = capsys.readouterr().out
    assert f"warning: {folder} is not published as step 3: step 5 is newer" in printed
    assert f"warning: {folder} is not published as step 5: a folder was handed over for this step before" in printed
    assert "as step 6: a folder was handed over for this step before" in printed


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        (-5, ValueError, "at least 0"),
        (2**63, ValueError, "less than"),
        (1.5, TypeError, "whole number"),
        (True, TypeError, "whole number"),
        ("x", TypeError, "whole number"),
        (None, TypeError, "whole number"),
    ],
)
def test_12f_a_step_that_is_none_is_refused_at_the_call(
    tmp_path: Path, mine: Path, step: Any, kind: type[Exception], words: str, handing: Callable[[Path], None]
) -> None:
    handing(tmp_path / "handover")
    with pytest.raises(kind, match=words):
        publish(mine, step)
    with pytest.raises(kind, match=words):
        calls.log(step, loss=1.0)
    assert not list((tmp_path / "handover").iterdir())


def test_12f_a_folder_that_cannot_be_published_is_a_storage_error(
    tmp_path: Path, handing: Callable[[Path], None]
) -> None:
    handing(tmp_path / "handover")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, words in (("nowhere", "is not there"), ("file", "is a file, not a folder"), ("empty", "holds no file")):
        with pytest.raises(StorageError, match=words):
            publish(tmp_path / name, 5)


def test_12f_values_of_a_program_are_recorded_as_they_are_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sm_llm.runs.events.run_metrics import metric_rows, to_json

    monkeypatch.setenv(names.EVENTS, str(tmp_path / "events/attempt-1-rank0-program.jsonl"))
    monkeypatch.setenv(names.ATTEMPT, "1")
    calls.log(1, loss=2.0, foo=float("nan"), bar=float("-inf"))
    calls.log(7)
    assert "warning: sm_llm.log(7) has no values: nothing is recorded" in capsys.readouterr().out
    for values, kind in (({"attempt": 3}, ValueError), ({"foo": "1.5"}, TypeError), ({"foo": None}, TypeError)):
        with pytest.raises(kind, match=next(iter(values))):
            calls.log(8, **values)  # type: ignore[arg-type]
    (row,) = metric_rows(tmp_path / "events")
    assert to_json(row) == {"step": 1, "attempt": 1, "loss": 2.0, "foo": "nan", "bar": "-inf"}


def test_a_step_that_is_text_is_handed_over_under_its_number(
    tmp_path: Path, mine: Path, handing: Callable[[Path], None]
) -> None:
    """A publisher that finds a step, but no folder of that name, would never stop searching."""
    handing(tmp_path / "handover")
    publish(mine, "005")  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "handover").iterdir()] == ["5"]
