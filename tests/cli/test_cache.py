"""Neuron's cache of compiled graphs: what is in it, failed graphs and stale locks."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from sm_llm.cli.app import app
from sm_llm.errors import StorageError
from sm_llm.launcher.tools.neuron_cache import cache_location, clear, ls, unlock

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "neuronxcc-2.23.6484.0+3b612583", "neuronxcc-2.25.3371.0+f524f7f8"
FILES = {
    f"{OLD}/MODULE_1+aa/model.hlo_module.pb": b"graph",
    f"{OLD}/MODULE_1+aa/model.neff": b"program",
    f"{OLD}/MODULE_1+aa/model.done": b"",
    f"{OLD}/MODULE_2+aa/model.hlo_module.pb": b"graph",
    f"{OLD}/MODULE_2+aa/model.log": b"too many instructions",
    f"{NEW}/MODULE_1+bb/model.hlo_module.pb": b"graph",
    f"{NEW}/MODULE_1+bb/model.hlo_module.pb.lock": b"",
    f"{NEW}/MODULE_3+bb.lock": b"",
    "notes.txt": b"mine",
}


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    for name, body in FILES.items():
        path = tmp_path / "neuron-compile-cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    os.utime(tmp_path / "neuron-compile-cache" / f"{NEW}/MODULE_3+bb.lock", (1, 1))
    return tmp_path


def left(storage: Path) -> set[str]:
    root = storage / "neuron-compile-cache"
    return {it.relative_to(root).as_posix() for it in root.rglob("*") if it.is_file()}


def test_graphs_are_listed_with_their_state(storage: Path) -> None:
    found = [(it.compiler, it.graph, it.state) for it in ls(str(storage))]
    assert found == [
        (OLD, "MODULE_1+aa", "compiled"),
        (OLD, "MODULE_2+aa", "failed"),
        (NEW, "MODULE_1+bb", "not compiled"),
    ]
    assert cache_location(str(storage)) == cache_location(f"{storage}/neuron-compile-cache/")


def test_failed_graphs_are_deleted_and_nothing_else(storage: Path) -> None:
    done = clear(str(storage))
    assert set(FILES) - left(storage) == set(done.keys)
    assert {it.rpartition("/")[0] for it in done.keys} == {f"{OLD}/MODULE_2+aa"}


def test_all_graphs_of_one_compiler_are_deleted(storage: Path) -> None:
    clear(str(storage), failed_only=False, compiler="2.23.6484.0")
    assert not [it for it in left(storage) if it.startswith(OLD)]
    assert "notes.txt" in left(storage), "what is not Neuron's stays"
    assert f"{NEW}/MODULE_1+bb/model.hlo_module.pb" in left(storage)


def test_stale_locks_are_deleted_and_those_of_a_compiler_at_work_stay(storage: Path) -> None:
    assert unlock(str(storage)).keys == (f"{NEW}/MODULE_3+bb.lock",)
    assert f"{NEW}/MODULE_1+bb/model.hlo_module.pb.lock" in left(storage)
    assert len(unlock(str(storage), older_than_minutes=0).keys) == 1
    assert not [it for it in left(storage) if it.endswith(".lock")]
    with pytest.raises(StorageError, match="0 or more"):
        unlock(str(storage), older_than_minutes=float("nan"))


def test_the_verbs_print_what_they_found_and_did(storage: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["cache", "ls", str(storage)])
    assert f"{OLD}: 1 compiled, 1 failed, 0 not compiled, 38 B" in shown.stdout
    listed = json.loads(runner.invoke(app, ["cache", "ls", str(storage), "--json"]).stdout)
    assert [it["state"] for it in listed] == ["compiled", "failed", "not compiled"]
    assert "deleted 2 files" in runner.invoke(app, ["cache", "clear", str(storage)]).stdout
    assert "deleted 1 lock of" in runner.invoke(app, ["cache", "unlock", str(storage)]).stdout
    assert "deleted 5 files" in runner.invoke(app, ["cache", "clear", str(storage), "--all"]).stdout
    assert left(storage) == {"notes.txt"}


def test_the_age_of_a_lock_is_by_the_storages_clock(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock here that runs ahead would take the locks of compilers that still run for old ones."""
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert unlock(str(storage)).keys == (f"{NEW}/MODULE_3+bb.lock",)
    assert not [it for it in left(storage) if "clock-" in it]
