"""The whole workflow for Trainium on this machine: a double of the hub and contract doubles of the Neuron SDK."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from plain_loop import plain_losses, write_initial_model
from worker_jobs import MODEL, events, losses, search_path, train_task

from sm_llm.convert.report import read_manifest
from sm_llm.convert.work import MANIFEST
from sm_llm.launcher import api
from sm_llm.models.config import model_config
from sm_llm.runs.run_states import RunState
from sm_llm.spec.tasks import TrainTask
from tests.fixtures.sampling import pick

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run
    from tests.fixtures.preloaded import Preloaded

Hub = Any
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
DOUBLE = Path(__file__).parents[1] / "fixtures" / "nxd_double"
CONFIG = {**MODEL, "vocab_size": 304, "tie_word_embeddings": False}
STEPS = ["model", "prepare", "convert", "precompile", "train", "back"]
KILLED = pick(STEPS, 2)
LENGTH = 6


def training(**changes: Any) -> dict[str, Any]:
    """The training, as the plain loop has it too: two ranks hold the model, every step is clipped."""
    return train_task(
        **{
            "model": {"preset": "tiny", "config": CONFIG},
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "max_steps": LENGTH,
            "optim": {"max_grad_norm": 0.5},
            "validation": {"every_steps": LENGTH},
            "checkpoint": {"every_steps": 3},
            **changes,
        }
    )


def workflow(storage: Path, text: Path, hub: Hub) -> dict[str, Any]:
    rows = "steps.prepare.output"
    data = {"format": "rows", "train": f"{rows}/train", "validation": f"{rows}/validation", "seq_length": 32}
    nxd = {"strategy": "nxd", "tensor_parallel_degree": 2, "flash_attention": False, "result": "nxd"}
    start = {"pretrained": "steps.convert.output"}
    task = training(model={"preset": None}, start=start, data=data, parallelism=nxd)
    task["model"].pop("config", None)
    prepare = {"sources": [str(text)], "train_tokenizer": {"vocab_size": 300}, "seq_length": 32}
    two = {"processes_per_instance": 2}
    return {
        "name": "trainium",
        "storage": str(storage),
        "steps": {
            "model": {
                "task": {"kind": "fetch", "source": "hf://org/tiny@main"},
                "environment": {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"},
            },
            "prepare": {"task": {"kind": "prepare", **prepare, "validation_fraction": 0.2}},
            "convert": {
                "task": {"kind": "convert", "source": "steps.model.output", "to": "nxd", "tensor_parallel_degree": 2}
            },
            "precompile": {"task": {"kind": "precompile", "training": task, "extract_steps": 2}, "compute": two},
            "train": {"task": task, "compute": two, "after": ["precompile"]},
            "back": {"task": {"kind": "convert", "source": "steps.train.output", "to": "hf", "verify": True}},
        },
    }


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([search_path(), str(DOUBLE)]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(DOUBLE / "bin"), os.environ["PATH"]]))
    monkeypatch.syspath_prepend(str(DOUBLE))


@pytest.fixture
def flow(
    tmp_path: Path, doubles: None, hub: Hub, preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    # Only the step that fetches has another hub: the fork server starts programs with its own variables alone.
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = model_config(preset="tiny", path=None, pretrained=None, overrides=CONFIG)
    write_initial_model(tmp_path / "initial", config, seed=0)
    hub.add("org/tiny", {it.name: it.read_bytes() for it in (tmp_path / "initial").iterdir()})
    (tmp_path / "text.txt").write_text("\n".join(f"{it} plus {it} makes {2 * it}." for it in range(400)))
    (tmp_path / "runs").mkdir()
    return workflow(tmp_path / "runs", tmp_path / "text.txt", hub)


def ended(run: Run, kill: list[str], seconds: float = 400.0) -> Run:
    """Wait for the run's end; processes of the first step in ``kill`` die as soon as there are any."""
    deadline = time.monotonic() + seconds
    while not run.state.is_final:
        assert time.monotonic() < deadline, "\n".join(run.logs())
        if kill and killed(run.root / "steps" / kill[0]):
            kill.pop(0)
        time.sleep(0.05)
    return run


def killed(step: Path) -> bool:
    """SIGKILL to everything that runs for a step; whether there was anything."""
    found = False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SAGEMAKER_BASE_DIR", "").startswith(str(step)):
                process.kill()
                found = True
    return found


def test_CV07_NX01_NX05_weights_go_round_and_training_is_that_of_the_plain_loop(
    flow: dict[str, Any], tmp_path: Path
) -> None:
    kill = list(KILLED)
    run = api.launch(flow)
    for _ in KILLED:
        assert ended(run, kill).state is not RunState.COMPLETED, "a step was killed"
        run = api.launch(flow)
    assert not kill
    assert ended(run, []).state is RunState.COMPLETED, "\n".join(run.logs())
    steps = dict(run.steps)
    assert list(steps) == STEPS
    # One that had published just before is not run again.
    assert {name for name, it in steps.items() if it.attempts[0].state is RunState.FAILED} == set(KILLED)
    rows = steps["prepare"].result
    data = {"format": "rows", "train": str(rows / "train"), "seq_length": 32}
    expected = plain_losses(training(data=data), tmp_path / "plain")
    found = losses(steps["train"].root)
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in found) < 1e-5
    # Training compiled nothing that was not compiled ahead.
    graphs = events(steps["train"].root, "graphs_compiled")[-1]
    assert (graphs["compiled"], graphs["hit_rate"]) == (0, 1.0)
    assert read_manifest(steps["train"].result / MANIFEST)["tensor_parallel_degree"] == 2
    # Whoever looks for the trained weights finds their place in the log, the events and the run.
    [published] = events(steps["train"].root, "final_published")
    assert published["uri"] == str(steps["train"].result)
    assert any(f"published: {published['uri']} " in line for line in steps["train"].logs())
    [reported] = events(steps["train"].root, "validation")
    validation = {**data, "validation": str(rows / "validation")}
    loss = loss_of(steps["back"].result, training(data=validation))
    assert loss == pytest.approx(reported["validation_loss"], abs=1e-5)


@torch.no_grad()
def loss_of(folder: Path, fields: dict[str, Any]) -> float:
    """Mean token loss of a Hugging Face folder over the validation rows, by transformers."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    from sm_llm.data.loader import open_source
    from sm_llm.data.source import Source

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert (list(info["missing_keys"]), list(info["unexpected_keys"])) == ([], [])
    task = TrainTask.model_validate(fields, strict=False)
    source = open_source(task.data, "validation", int(model.config.vocab_size), task.seed)
    assert isinstance(source, Source)
    assert source.count
    ids = torch.from_numpy(source.rows(np.arange(source.count)).input_ids)
    return float(model(input_ids=ids, labels=ids).loss)
