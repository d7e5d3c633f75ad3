"""Traces of torch's profiler: taken when asked, stored with the run, reported by an event."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.errors import SpecError
from sm_llm.spec.loading.load import load
from sm_llm.worker.main import main


def job(**profile: Any) -> dict[str, Any]:
    return train_task(max_steps=8, logging={"every_steps": 4, "profile": profile}, checkpoint={"every_steps": 8})


@pytest.mark.integration
def test_a_trace_every_n_steps_is_published_with_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main("train", job_environment(job_file(job(every_steps=3, steps=2), run, 1))) == 0
    reported = events(run, "profile_published")
    assert [event["step"] for event in reported] == [3, 6]
    for event in reported:
        path = Path(event["uri"])
        assert path.parent == run / "profiles" / "attempt-1"
        assert path.stat().st_size == event["bytes"]
        names = {it.get("name", "") for it in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert "aten::mm" in names, "it holds the operators of the steps"
    assert [event["step"] for event in events(run, "step")] == list(range(1, 9))


def test_a_trace_longer_than_the_way_to_the_next_is_refused() -> None:
    with pytest.raises(SpecError, match=r"task\.logging\.profile\.steps.*Use at most 2"):
        load({"name": "job", "task": job(every_steps=2, steps=3)}, environ={})
