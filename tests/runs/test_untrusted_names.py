"""Names in a run's storage that are none of ours never become paths on this machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.runs.events.events import Step, encode, read_events
from sm_llm.runs.replication.log_segments import files_of, segment_key
from sm_llm.runs.replication.s3_cache import S3Cache
from sm_llm.runs.run_paths import RunPaths
from sm_llm.storage.base import StoredObject

if TYPE_CHECKING:
    from pathlib import Path


class Listed:
    """A store that lists whatever it is given, and answers every read with the same bytes."""

    uri = "s3://bkt/runs/evil"

    def __init__(self, *names: str) -> None:
        self.names = names

    def list(self, prefix: str) -> list[StoredObject]:
        return [StoredObject(segment_key(name, 0), 7, None, 0.0, "tag") for name in self.names]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from sm_llm.runs.replication import s3_cache as module
    from sm_llm.storage.s3.swap import Tagged

    monkeypatch.setattr(module, "read_tagged", lambda store, key: Tagged(b"foreign", "tag"))
    return lambda *names: S3Cache(tmp_path / "cache" / "run", Listed(*names))  # type: ignore[arg-type]


BAD = [
    "events/../../../victim.txt", "events/../run.json", "/etc/victim", "events/attempt-1-x.jsonl/../../y", "run.json",
    "lock", ".mirror.json", "events/notes.txt", "events/attempt-\u0661-rank0.jsonl", "events/attempt-1-a/b.jsonl",
    "logs/attempt-1/../../../victim.txt", "logs/attempt-1/..", "logs/attempt-1/.hidden", "logs/attempt-1/a/b",
    "logs/attempt-1/a\x1b[2J", "local/attempt-1/node-0/job.json", "events/attempt-1-a\0b.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_s02_a_name_that_is_none_of_a_run_is_ignored_and_reported_once(
    cache: Any, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("important")
    found = cache(name, "events/attempt-1-rank0.jsonl", "logs/attempt-1/node-0.log")
    with caplog.at_level(logging.WARNING):
        found.refresh("events/", lambda _: True)
        found.refresh("events/", lambda _: True)
    written = sorted(it.relative_to(tmp_path).as_posix() for it in tmp_path.rglob("*") if it.is_file())
    kept = ["cache/run/.mirror.json", "cache/run/.mirror.json.lock"]
    assert written == [
        *kept,
        "cache/run/events/attempt-1-rank0.jsonl",
        "cache/run/logs/attempt-1/node-0.log",
        "victim.txt",
    ]
    assert victim.read_text() == "important"
    assert [it.levelname for it in caplog.records if repr(name) in it.getMessage()] == ["WARNING"]
    assert repr(name) in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "events/attempt-1-rank0.jsonl", "events/attempt-12-node3-watchdog.jsonl", "events/attempt-1-launcher.jsonl",
        "logs/attempt-1/node-0.log", "logs/attempt-3/supervisor.log",
    ],
)  # fmt: skip
def test_names_of_a_run_are_known(name: str) -> None:
    assert RunPaths.is_growing(name)
    assert files_of([StoredObject(segment_key(name, 0), 7, None, 0.0, "t")]).keys() == {name}


def test_one_bad_event_costs_its_own_line(tmp_path: Path) -> None:
    first, second = (encode(Step(step, 2.0, 1.0, 1e-4, 8), attempt=1, at=1.0) for step in (1, 2))
    (tmp_path / "attempt-1-rank0.jsonl").write_text(f"{first}\nnot json\n{'[' * 100_000}\n[]\n{second}\n")
    assert [it["step"] for it in read_events(tmp_path)] == [1, 2]
