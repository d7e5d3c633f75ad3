"""A run is closed to other users, opened to the group on request, and not continued where others own it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import LaunchRefused
from sm_llm.launcher.planner import plan
from sm_llm.launcher.run import Run
from sm_llm.runs.locate import assert_own_folder
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import FolderRunStore
from tests.launcher.conftest import SYNTHETIC

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

Fakes = Any
WRITES = (
    "print('log'); (scratch / 'x').mkdir(); (scratch / 'x' / 'y').write_text('y'); put(1, {'a/b': 'x'}); put(None)\n"
    "(paths.events / 'attempt-1-rank0.jsonl').write_text('')"
)


def modes(root: Path) -> Iterator[tuple[str, int]]:
    """Every file and folder of a run with its permissions; links have none of their own."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            yield str(path.relative_to(root)), stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_s16_a_run_is_closed_to_everybody_else(fakes: Fakes) -> None:
    fakes.use(WRITES)
    run = fakes.launch()
    assert fakes.end(run) is RunState.COMPLETED, list(run.logs())
    with pytest.raises(LaunchRefused):
        run.resume()
    found = dict(modes(run.root))
    assert len(found) > 15
    assert {name: oct(it) for name, it in found.items() if it & 0o077} == {}


def test_s16_a_run_in_S3_is_closed_on_this_machine(s3_fakes: Fakes, elsewhere: Any) -> None:
    elsewhere()  # a cache of its own
    s3_fakes.use(WRITES)
    run = s3_fakes.launch()
    assert s3_fakes.end(run) is RunState.COMPLETED, list(run.logs())
    assert {name: oct(it) for name, it in modes(run.root.parents[1]) if it & 0o077} == {}


def test_s16_a_run_is_opened_to_the_group_to_read_and_its_locks_are_not(fakes: Fakes) -> None:
    fakes.use(WRITES)
    fakes.options = {"shared_with_group": True}
    run = fakes.launch()
    assert fakes.end(run) is RunState.COMPLETED, list(run.logs())
    found = {name: it for name, it in modes(run.root) if not Path(name).name.startswith(("lock", ".run.json.lock"))}
    folders = {name for name in found if (run.root / name).is_dir()}
    assert {name: oct(it) for name, it in found.items() if it != (0o750 if name in folders else 0o640)} == {}
    locks = [it for name, it in modes(run.root) if name not in found]
    assert locks
    assert not [it for it in locks if it & 0o077]


def test_the_group_option_is_a_default_of_the_user_and_named_where_it_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, fakes: Fakes
) -> None:
    assert plan({**SYNTHETIC, "storage": str(fakes.storage)})[0].job.storage_options.shared_with_group is None
    monkeypatch.setenv("SM_LLM_SHARED_WITH_GROUP", "true")
    (here,) = plan({**SYNTHETIC, "storage": str(fakes.storage)})
    assert here.job.storage_options.shared_with_group is True
    assert not [it for it in here.warnings if "shared_with_group" in it]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give files away")
@pytest.mark.parametrize("what", [".", "local", "run.json"])
def test_10_a_run_of_somebody_else_is_not_continued_but_branched(fakes: Fakes, tmp_path: Path, what: str) -> None:
    fakes.use("put(1); raise OSError('no space left')")
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    os.chown(run.root / what, 12345, -1)
    with pytest.raises(LaunchRefused, match=r"belongs to another user, who could change what .* sm-llm branch"):
        Run(run.uri).resume()
    assert [it.number for it in Run(run.uri).attempts] == [1]
    fakes.use("put(None)")
    mine = Run(run.uri).branch(f"storage={tmp_path / 'mine'}")
    assert fakes.end(mine) is RunState.COMPLETED, list(mine.logs())
    assert mine.root.is_relative_to(tmp_path / "mine")


def test_a_file_that_another_launch_renames_meanwhile_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed, and gone when it is asked for: as a record on its way to its place is."""
    run_store = FolderRunStore(tmp_path / "run")
    run_store.root.mkdir()
    (run_store.root / "job.json").touch()
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / "job.json", folder / ".job.json.1.tmp"]))
    assert_own_folder(run_store)
    assert_own_folder(FolderRunStore(tmp_path / "none"))


def test_10_an_own_run_that_others_may_write_is_closed_to_them(fakes: Fakes) -> None:
    fakes.use("put(1); raise OSError('no space left')")
    run = fakes.launch()
    fakes.end(run)
    run.root.chmod(0o777)
    fakes.use("put(None)")
    again = run.resume()
    assert fakes.end(again) is RunState.COMPLETED, list(again.logs())
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o755
