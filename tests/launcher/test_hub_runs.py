"""Whole local runs that read a gated repository with a secret token: a double of the hub, everything else is real."""

from __future__ import annotations

import contextlib
import io
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError
from sm_llm.launcher import api
from sm_llm.launcher.planner import plan
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.preloaded import Preloaded

pytestmark = pytest.mark.integration

Hub = Any
TOKEN = "hf_" + "Planted7" * 4
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}


@pytest.fixture
def planted(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token in a variable and in a file outside of where runs are kept; the folder that runs are kept in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PLANTED", TOKEN)
    storage = tmp_path / "runs"
    storage.mkdir()
    return storage


def job(storage: Path, **changes: Any) -> dict[str, Any]:
    task = {"kind": "fetch", "source": "hf://org/gated"}
    return {"name": "get", "task": task, "storage": str(storage), "secrets": {"HF_TOKEN": "env:PLANTED"}, **changes}


def ended(run: Run, seconds: float = 250) -> Run:
    deadline = time.monotonic() + seconds
    while not run.state.is_final:
        assert time.monotonic() < deadline, "\n".join(run.logs())
        time.sleep(0.05)
    return run


def traces(storage: Path) -> list[str]:
    """Files below ``storage`` that hold the token."""
    files = [path for path in storage.rglob("*") if path.is_file()]
    assert len(files) > 8
    return [str(path) for path in files if TOKEN.encode() in path.read_bytes()]


def reported(run: Run) -> str:
    """What the reading commands print of a run."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print(json.dumps(run.status().to_json()), *run.logs(), run.record, run.failure_message())
    return text.getvalue()


def test_HP21_the_token_reaches_the_hub_and_is_written_nowhere(hub: Hub, planted: Path) -> None:
    commit = next(iter(hub.add("org/gated", {"config.json": json.dumps(CONFIG).encode()}, token=TOKEN).commits))
    dry = api.launch(job(planted), dry_run=True)
    run = ended(api.launch(job(planted)))
    assert run.state is RunState.COMPLETED, "\n".join(run.logs())
    assert (run.result / "config.json").is_file()
    assert hub.authorizations["127.0.0.1", f"Bearer {TOKEN}"]
    assert traces(planted) == []
    assert TOKEN not in reported(run) + json.dumps([it.to_json() for it in dry]) + repr(dry)
    assert '"HF_TOKEN": "env:PLANTED"' in (run.root / "job.json").read_text()
    assert commit in "\n".join(run.logs())


def test_HP21_a_failing_job_does_not_report_the_token_either(hub: Hub, planted: Path) -> None:
    hub.add("org/gated", {"config.json": b"{}"}, token="another", refusal=(403, TOKEN))  # a server that echoes it
    run = ended(api.launch(job(planted)))
    assert run.state is RunState.FAILED
    assert "Accept the licence at" in (run.failure_message() or "")
    assert "public gated repos" in (run.failure_message() or ""), "a token was sent"
    assert traces(planted) == []
    assert TOKEN not in reported(run)


def test_a_secret_that_is_not_there_is_reported_before_anything_is_started(planted: Path) -> None:
    missing = planted.parent / "token"
    with pytest.raises(PlanError) as caught:
        api.launch(job(planted, secrets={"HF_TOKEN": "env:NOWHERE", "OTHER": f"file:{missing}"}))
    assert [(fault.path, fault.value) for fault in caught.value.issues] == [
        ("secrets.HF_TOKEN", "env:NOWHERE"),
        ("secrets.OTHER", f"file:{missing}"),
    ]
    assert list(planted.iterdir()) == []


def test_a_secret_that_the_worker_does_not_find_fails_the_job_by_name(hub: Hub, planted: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("")
    run = ended(api.launch(job(planted, secrets={"HF_TOKEN": f"file:{tmp_path / 'token'}"})))
    assert f"secrets.HF_TOKEN: file:{tmp_path / 'token'} is empty" in (run.failure_message() or "")


def train(storage: Path, **changes: Any) -> dict[str, Any]:
    data = {"format": "synthetic", "seq_length": 16, "rows": 64}
    task = {"kind": "train", "model": {"path": "hf://org/gated@main"}, "data": data, "max_steps": 2}
    return job(storage, name="train", task={**task, **changes})


def test_a_plan_reads_a_config_from_the_hub(hub: Hub, planted: Path) -> None:
    hub.add("org/gated", {"config.json": json.dumps(CONFIG).encode()})
    (found,) = plan(train(planted))
    assert found.model is not None
    assert found.model.vocab_size == 300


def test_a_plan_without_the_secret_warns_and_without_any_secret_fails(hub: Hub, planted: Path) -> None:
    hub.add("org/gated", {"config.json": json.dumps(CONFIG).encode()}, token=TOKEN)
    (found,) = plan(train(planted))
    assert found.model is None
    assert "the worker asks again, with its secrets" in found.warnings[0]
    with pytest.raises(PlanError, match=r"task\.model\.path.*Accept the licence"):
        plan({**train(planted), "secrets": {}})


@pytest.mark.timeout(300)
def test_a_workflow_fetches_a_gated_model_and_trains_on_from_it(hub: Hub, planted: Path, preloaded: Preloaded) -> None:
    """Train a model, put it on the hub, fetch it with the token, and train on."""
    hub.add("org/config", {"config.json": json.dumps(CONFIG).encode()})
    first = train(planted)
    first["task"]["model"] = {"path": "hf://org/config"}
    made = ended(api.launch(first))
    assert made.state is RunState.COMPLETED, "\n".join(made.logs())
    files = {it.relative_to(made.result).as_posix(): it.read_bytes() for it in made.result.rglob("*") if it.is_file()}
    hub.add("org/gated", files, token=TOKEN)
    steps = {
        "get": {"task": {"kind": "fetch", "source": "hf://org/gated"}},
        "train": {"task": {**first["task"], "model": {}, "start": {"pretrained": "steps.get.output"}}},
    }
    flow = {"name": "flow", "steps": steps, "storage": str(planted), "secrets": {"HF_TOKEN": "env:PLANTED"}}
    run = ended(api.launch(flow))
    assert run.state is RunState.COMPLETED, "\n".join(run.logs())
    assert traces(planted) == []
    direct = train(planted, model={}, start={"pretrained": "hf://org/gated"})
    again = ended(api.launch(direct))
    assert again.state is RunState.COMPLETED, "\n".join(again.logs())
    assert [row["loss"] for row in again.metrics()] == [row["loss"] for row in run.steps["train"].metrics()]
    assert traces(planted) == []
