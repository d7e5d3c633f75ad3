"""Runs whose worker is a few lines of plain Python, so that the launcher is tested without torch."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher import api, lifecycle, run
from sm_llm.launcher.backends.local import backend as local
from sm_llm.launcher.backends.local.container import PORT, entry_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from sm_llm.runs.run_states import RunState

PUBLISH = """
import json, os, pathlib, sys, time
from sm_llm.contract.job_file import JobFile
from sm_llm.runs.events.events import EventWriter, FirstStep
from sm_llm.runs.run_lock import hold
from sm_llm.runs.run_paths import RunPaths
from sm_llm.storage.publication.publish import new_save, publish, seal
from sm_llm.storage.uri import open_store
job = JobFile.read(pathlib.Path(os.environ["SM_LLM_JOB_FILE"]))
paths = RunPaths(pathlib.Path(os.environ["SM_LLM_RUN_FOLDER"]))
scratch = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"]) / "scratch"
node = int(sys.argv[1])

def put(step, files={"result.txt": "done"}):
    working = scratch / f"working-{step}"
    working.mkdir()
    for name, text in files.items():
        (working / name).parent.mkdir(exist_ok=True)
        (working / name).write_text(text)
    save = new_save(job.run_id, step, world_size=1, node_count=1)
    sealed = seal(working, scratch / f"sealed-{step}")
    store = open_store(job.run_uri, job.spec.storage_options.model_dump())
    publish(store, save, sealed, node=0, leader=True, gather=lambda value: [value])

def stepped(step):
    EventWriter(paths.event_file(job.attempt, "rank0"), job.attempt).write(FirstStep(step))
"""
"""Start of a fake worker: ``put(step)`` publishes a checkpoint, ``put(None)`` the result; ``stepped(step)`` reports
the first step of its start; ``node`` is its number.
"""

SYNTHETIC: dict[str, Any] = {
    "name": "fake",
    "task": {
        "kind": "train",
        "model": {
            "preset": "tiny",
            "config": {
                "vocab_size": 300,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        },
        "data": {"format": "synthetic", "seq_length": 16, "rows": 64, "validation_rows": 8},
        "max_steps": 8,
    },
}
"""A training job with a model of about 30 thousand parameters."""


@dataclass
class FakeRuns:
    """Launches ``SYNTHETIC`` below ``storage`` with a fake worker in torchrun's place."""

    storage: Path | str
    monkeypatch: pytest.MonkeyPatch
    options: dict[str, Any] = field(default_factory=dict)
    """How ``storage`` is reached, where it is in S3."""

    def use(self, text: str) -> None:
        """From now on every submission's entrypoint is ``PUBLISH`` and ``text``, run by Python itself."""

        def command(job: Any, node: int, rendezvous: str, base: Path) -> tuple[str, ...]:
            return sys.executable, str(entry_script(base, job.task.kind)), str(node), rendezvous, PORT

        self.monkeypatch.setattr(local, "_torchrun", command)
        self.monkeypatch.setattr(local, "entrypoint_source", lambda kind: self.worker(text))

    @staticmethod
    def worker(text: str) -> str:
        """The whole script of a fake worker."""
        return PUBLISH + text

    def spec(self, **changes: Any) -> dict[str, Any]:
        return {**SYNTHETIC, "storage": str(self.storage), "storage_options": self.options, **changes}

    def launch(self, *overrides: str, new: bool = False, **changes: Any) -> Run:
        return api.launch(self.spec(**changes), *overrides, new=new)

    @staticmethod
    def wait_until(true: Callable[[], object], seconds: float = 150.0) -> None:
        """Wait for a condition; fail the test if it does not come true."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    def end(self, run: Run) -> RunState:
        """Wait for the end, however it ends."""
        self.wait_until(lambda: run.state.is_final)
        return run.state


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    # The detached processes import this package from wherever the tests do.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    for module in (run, lifecycle):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    return FakeRuns(tmp_path / "runs", monkeypatch)


@pytest.fixture
def s3_fakes(fakes: FakeRuns, bucket: str, s3_server: Any) -> FakeRuns:
    """``fakes`` whose runs are kept in S3."""
    fakes.storage, fakes.options = f"s3://{bucket}/runs", {"endpoint_url": s3_server.endpoint}
    fakes.monkeypatch.setenv("SM_LLM_ENDPOINT_URL", s3_server.endpoint)
    return fakes


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes this process one of another machine: nothing of the runs lies in its caches."""
    return lambda name="elsewhere": monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
