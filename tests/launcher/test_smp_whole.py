"""Strategy smp from fetch to published model, as its own programs, on the contract double of ``torch.sagemaker``.

By hand, with ``-s``, it runs in the software of the SMP image too (torch 2.5.1, transformers 4.44.2, numpy 1).
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import transformers

from sm_llm.launcher import api
from sm_llm.models.config import both_spellings, model_config
from sm_llm.models.families.table import family
from sm_llm.models.init_weights import initial_slice
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run
    from tests.fixtures.preloaded import Preloaded

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
DOUBLE = Path(__file__).parents[1] / "fixtures" / "smp_double"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
STEPS = 120


def published_model(folder: Path) -> dict[str, bytes]:
    """Files of a tiny Llama, as a repository of the hub holds them."""
    from safetensors.numpy import save_file

    config = model_config(preset="tiny", path=None, pretrained=None, overrides=SIZES)
    whole = {
        name: initial_slice(0, name, it.shape, it, (0,) * len(it.shape), it.shape)
        for name, it in family(config).tensors(config).items()
    }
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(both_spellings({**config, "dtype": "float32"}))
    return {"config.json": text.encode(), "model.safetensors": (folder / "model.safetensors").read_bytes()}


def waited(run: Run, *, until: RunState | None = None, step: int = 0) -> Run:
    deadline = time.monotonic() + 400
    while not (run.state.is_final if until is None else newest_commit(run) >= step):
        ended_early = until is not None and run.state.is_final
        assert not ended_early, "\n".join(run.logs())
        assert time.monotonic() < deadline, "\n".join(run.logs())
        time.sleep(0.05)
    return run


def newest_commit(run: Run) -> int:
    found = [int(path.stem.removeprefix("step-")) for path in (run.root / "ckpt" / "commits").glob("step-*.json")]
    return max(found, default=0)


def kill_everything(run: Run) -> int:
    """SIGKILL to every process of a run, which name its folder in their command or environment; they are gone then."""
    killed = [process for process in psutil.process_iter() if is_of(process, run)]
    for process in killed:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(killed, timeout=30)
    return len(killed)


def is_of(process: psutil.Process, run: Run) -> bool:
    try:
        words = [*process.cmdline(), *process.environ().values()]
    except psutil.Error:
        return False
    return process.pid != os.getpid() and any(run.root.name in word for word in words)


def events_of(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunPaths(run.root).events) if event["kind"] == kind]


def test_fetch_train_kill_resume_publish(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: Preloaded
) -> None:
    print(f"\ntorch {torch.__version__}, transformers {transformers.__version__}, on the contract double")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(DOUBLE))
    preloaded.on()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.add("org/tiny-llama", published_model(tmp_path))
    storage = str(tmp_path / "runs")
    fetch = {"kind": "fetch", "source": "hf://org/tiny-llama"}
    fetched = waited(api.launch({"name": "get", "storage": storage, "task": fetch}))
    assert fetched.state is RunState.COMPLETED, "\n".join(fetched.logs())
    monkeypatch.delenv("HF_ENDPOINT")  # training needs no hub
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task = {
        "kind": "train",
        "start": {"pretrained": str(fetched.result)},
        "data": {"format": "synthetic", "seq_length": 32, "rows": 512, "validation_rows": 8},
        "parallelism": {"strategy": "smp", "hybrid_shard_degree": 2, "activation_checkpointing": "full"},
        "micro_batch_size": 2,
        "max_steps": STEPS,
        "precision": {"compute": "fp32"},
        "checkpoint": {"every_steps": 20, "verify_state": True},
        "logging": {"every_steps": 20},
    }
    job = {"name": "tune", "storage": storage, "task": task, "compute": {"processes_per_instance": 2}}
    preloaded.off()  # every process is killed
    run = waited(api.launch(job), until=RunState.RUNNING, step=20)
    print(f"SIGKILL to {kill_everything(run)} processes after the checkpoint of step {newest_commit(run)}")
    preloaded.on()
    again = waited(api.launch(job))
    assert again.root == run.root, "the same run goes on"
    assert again.state is RunState.COMPLETED, "\n".join(again.logs())
    print("\n".join(line for line in again.logs()))
    starts = events_of(again, "start_chosen")
    assert [it["source"] for it in starts] == ["pretrained", "checkpoint"]
    assert starts[1]["step"] >= 20
    assert {it["step"] for it in events_of(again, "step")} == set(range(1, STEPS + 1))
    assert events_of(again, "state_verified")
    model = transformers.AutoModelForCausalLM.from_pretrained(again.result)
    ids = torch.arange(64).reshape(2, 32)
    loss = float(model(input_ids=ids, labels=ids).loss)
    print(f"transformers reads the published model: loss {loss:.3f} on 64 tokens")
    assert 0 < loss < 20
