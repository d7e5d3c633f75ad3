"""What this user makes is closed to others, and what others made is not used (s16)."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract import bootstrap
from sm_llm.contract.image_packages import LOCK_FILE
from sm_llm.errors import DataError, RunFailed
from sm_llm.launcher.backends.sagemaker import emulation
from sm_llm.owned import close_to_others, make_folders, opener, own_user, private_folder, temporary_folder
from sm_llm.runs.events.events import EventWriter, StopRequested
from sm_llm.runs.run_lock import hold, is_anyone_alive, is_starting, starting
from sm_llm.runs.run_paths import RunPaths
from sm_llm.storage.files import write_atomically
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.syncing.sync_memory import SyncMemory
from sm_llm.worker.scratch import DISK_ENVIRONMENT, scratch_folder
from sm_llm.worker.script.child_program import Program
from tests.fixtures.wheels import wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to act as several users")
ME, OTHER = 54321, 54322


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):o}"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def as_user(user: int, action: Callable[[], object]) -> str:
    """What ``action`` returns or raises, as text, in a process of another user."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        try:
            text = str(action())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def open_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as /tmp is: all may make files in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o1777)
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


@pytest.mark.parametrize(("folder", "mask", "file", "below"), [
    (0o700, 0o022, "600", "700"), (0o750, 0o022, "640", "750"), (0o755, 0o022, "644", "755"),
    (0o775, 0o002, "664", "775"), (0o755, 0o077, "600", "700"), (0o711, 0o022, "600", "711"),
])  # fmt: skip
def test_10_what_is_made_in_a_folder_is_as_closed_as_the_folder(
    tmp_path: Path, folder: int, mask: int, file: str, below: str
) -> None:
    tmp_path.chmod(folder)
    with umask(mask):
        make_folders(tmp_path / "a" / "b")
        write_atomically(tmp_path / "whole", "x")
        write_atomically(tmp_path / "c" / "whole", "x")
        FolderStore(tmp_path).put_if_absent("d/key", b"x")
        (tmp_path / "source").write_text("x")
        FolderStore(tmp_path).put_file(tmp_path / "source", "e/key")
        EventWriter(tmp_path / "events" / "attempt-1-x.jsonl", 1).close()
        with open(tmp_path / "opened", "w", opener=opener):
            pass
    for name in ("whole", "d/key", "e/key", "events/attempt-1-x.jsonl", "opened", "c/whole"):
        assert mode(tmp_path / name) == file, name
    for name in ("a", "a/b", "c", "d", "e", "events"):
        assert mode(tmp_path / name) == below, name


def test_10_a_process_makes_all_as_closed_as_its_run(tmp_path: Path) -> None:
    with umask(0o002):
        for folder, file in ((0o700, "600"), (0o750, "640"), (0o755, "644")):
            tmp_path.chmod(folder)
            with umask(0o002):
                assert close_to_others(tmp_path) == 0o002
                (tmp_path / "x").write_text("x")
            assert mode(tmp_path / "x") == file
            (tmp_path / "x").unlink()


def test_10_the_program_of_a_script_has_its_users_umask_back(tmp_path: Path) -> None:
    code = "import os; print(f'{os.umask(0):03o}', file=open('umask', 'w'))"
    with umask(0o077):
        for environ, expected in (({"SM_LLM_UMASK": "002"}, "002\n"), ({}, "077\n")):
            program = Program([sys.executable, "-c", code], environ, tmp_path)
            program.check()
            assert (tmp_path / "umask").read_text() == expected


def test_10_a_private_folder_is_made_and_an_own_one_is_closed(tmp_path: Path) -> None:
    assert mode(private_folder(tmp_path / "a" / "b")) == "700"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert mode(private_folder(tmp_path / "open")) == "700"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        private_folder(tmp_path / "file")
    assert own_user(tmp_path) == os.geteuid()


@is_root
def test_s16_a_folder_or_link_of_somebody_else_is_never_taken_for_an_own_one(open_tmp: Path) -> None:
    theirs = open_tmp / f"sm_llm-{ME}"
    theirs.mkdir()
    theirs.chmod(0o777)
    os.chown(theirs, OTHER, OTHER)
    assert f"{theirs} belongs to another user (number {OTHER})" in as_user(ME, temporary_folder)
    theirs.rmdir()
    victim = open_tmp / "victim"
    victim.mkdir()
    os.chown(victim, ME, ME)
    theirs.symlink_to(victim)
    os.chown(theirs, OTHER, OTHER, follow_symlinks=False)
    assert "belongs to another user" in as_user(ME, temporary_folder)
    theirs.unlink()
    assert as_user(ME, temporary_folder) == str(theirs)


@is_root
def test_s16_two_users_emulate_and_no_planted_link_is_written_to(open_tmp: Path) -> None:
    def rehearse() -> str:
        with emulation.alone(2):
            return "done"

    victim = open_tmp / "victim"
    victim.write_text("important")
    os.chown(victim, ME, ME)
    (open_tmp / "sm_llm-emulation.lock").symlink_to(victim)
    os.chown(open_tmp / "sm_llm-emulation.lock", OTHER, OTHER, follow_symlinks=False)
    assert [as_user(ME, rehearse), as_user(OTHER, rehearse)] == ["done", "done"]
    assert victim.read_text() == "important"
    assert mode(open_tmp / f"sm_llm-{ME}") == "700"


def installed(folder: Path) -> str:
    environ: dict[str, str] = {}
    bootstrap.install_missing(str(folder / "train.py"), environ)
    program = "import tinystock; print(tinystock.answer)"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


@is_root
def test_s16_packages_that_somebody_else_planted_are_not_imported(open_tmp: Path) -> None:
    job = open_tmp / "job"
    job.mkdir()
    job.chmod(0o755)
    text = f"{wheel(job)}\n"
    (job / LOCK_FILE).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    for location in (open_tmp / f"sm_llm-packages-{digest}", open_tmp / f"sm_llm-{ME}" / f"packages-{digest}"):
        location.mkdir(parents=True)
        (location / ".complete").touch()
        (location / "tinystock.py").write_text("answer = 'PLANTED'")
    for path in open_tmp.glob("sm_llm-*/**/*"):
        os.chown(path, OTHER, OTHER)
    for path in open_tmp.glob("sm_llm-*"):
        os.chown(path, OTHER, OTHER)
        path.chmod(0o777)

    def install(command: list[str], **_: Any) -> None:  # pip, of this environment, cannot be started by that user
        (Path(command[command.index("--target") + 1]) / "tinystock.py").write_text("answer = 42")

    def imported() -> str:
        bootstrap.install_missing(str(job / "train.py"), {}, install)
        return str(importlib.import_module("tinystock").answer)

    assert "Set TMPDIR" in as_user(ME, imported)
    os.rename(open_tmp / f"sm_llm-{ME}", open_tmp / "away")
    assert as_user(ME, imported) == "42"


def test_10_a_package_folder_that_was_altered_is_installed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / LOCK_FILE).write_text(f"{wheel(tmp_path)}\n")
    assert installed(tmp_path) == "42\n"
    (folder,) = (it for it in (tmp_path / "tmp").glob("sm_llm-*/packages-*") if it.is_dir())
    assert mode(folder) == "700"
    module = next(it for it in folder.rglob("tinystock*") if it.suffix == ".py" or (it.is_dir() and "-" not in it.name))
    module = module / "__init__.py" if module.is_dir() else module
    module.write_text("answer = 'ALTERED'")
    assert installed(tmp_path) == "42\n"
    (folder / "yaml.py").write_text("raise SystemExit('PLANTED')")
    assert installed(tmp_path) == "42\n"
    assert not (folder / "yaml.py").exists()


@is_root
def test_s16_converted_rows_lie_in_a_folder_of_the_user(open_tmp: Path) -> None:
    from sm_llm.data.json_rows import convert

    importlib.import_module("pyarrow.compute")  # here: another user may not read where Python lies
    source = open_tmp / "rows"
    source.mkdir()
    (source / "a.json").write_text('{"input_ids":[1,2,3,4]}\n' * 4)
    found = [Path(as_user(user, lambda: convert(source, 4, 10, None))) for user in (ME, OTHER)]
    assert [it.parent for it in found] == [open_tmp / f"sm_llm-{user}" for user in (ME, OTHER)]
    (open_tmp / f"sm_llm-{ME + 5}").mkdir()
    assert f"{DataError.__name__}: {source}: cannot be converted" in as_user(
        ME + 5, lambda: convert(source, 4, 10, None)
    )


@is_root
def test_s16_a_scratch_disk_on_which_somebody_else_made_our_folder_is_refused(open_tmp: Path) -> None:
    from sm_llm.runs.run_paths import ContainerPaths

    (open_tmp / "sm-llm").mkdir()
    os.chown(open_tmp / "sm-llm", OTHER, OTHER)
    (open_tmp / "base").mkdir()
    reported = as_user(
        ME, lambda: scratch_folder(ContainerPaths(open_tmp / "base"), "run", 0, {DISK_ENVIRONMENT: str(open_tmp)})
    )
    assert reported.startswith(RunFailed.__name__)
    assert DISK_ENVIRONMENT in reported


@is_root
def test_s16_what_somebody_else_states_was_verified_is_not_believed(open_tmp: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(open_tmp)}
    SyncMemory(Path("/data"), "s3://b/p", cache).save()
    (file,) = (open_tmp / "sm_llm" / "sync").glob("*.json")
    assert [mode(it) for it in (open_tmp / "sm_llm", file.parent, file)] == ["700", "700", "600"]
    file.write_text(json.dumps({"equal": {"k": ["tag", "tag", "crc"]}, "begun": ["k"]}))
    assert SyncMemory(Path("/data"), "s3://b/p", cache).begun == {"k"}
    os.chown(open_tmp / "sm_llm", OTHER, OTHER)
    (open_tmp / "sm_llm").chmod(0o777)
    assert as_user(ME, lambda: SyncMemory(Path("/data"), "s3://b/p", cache).begun) == "set()"


@is_root
def test_s16_who_may_only_read_a_run_cannot_hold_its_locks_and_still_sees_that_it_lives(open_tmp: Path) -> None:
    root = open_tmp / "run"
    root.mkdir()
    root.chmod(0o755)

    def take(name: str) -> str:
        descriptor = os.open(root / name, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "taken"

    for name in ("lock", "lock.starting"):  # as an earlier release made them
        (root / name).touch()
        (root / name).chmod(0o666)
    with hold(root), starting(root) as mine:
        assert mine
        assert as_user(OTHER, lambda: (is_anyone_alive(root), is_starting(root))) == "(True, True)"
    for name in ("lock", "lock.starting"):
        assert as_user(OTHER, lambda name=name: take(name)).startswith("PermissionError"), name  # type: ignore[misc]
    assert as_user(OTHER, lambda: (is_anyone_alive(root), is_starting(root))) == "(False, False)"
    assert not is_anyone_alive(root)


@is_root
def test_s16_a_link_in_a_locks_place_is_not_followed(open_tmp: Path) -> None:
    victim = open_tmp / "victim"
    victim.write_text("important")
    (open_tmp / "lock").symlink_to(victim)
    with pytest.raises(Exception, match="cannot be opened for locking"):
        hold(open_tmp)
    assert victim.read_text() == "important"


def test_10_an_event_of_the_launcher_is_as_closed_as_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir(0o700)
    writer = EventWriter(paths.event_file(1, "stop"), 1)
    writer.write(StopRequested(now=False))
    writer.close()
    assert mode(paths.event_file(1, "stop")) == "600"
