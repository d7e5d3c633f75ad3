"""The jobs of AWS's examples for Slurm, in small on a cluster of virtual nodes."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

import sm_llm
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import RunState
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.loading.load import load
from tests.launcher.slurm.test_slurm_end_to_end import spec
from tests.launcher.test_smp_whole import DOUBLE, SIZES, published_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.slurm import SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_llama_is_fine_tuned_with_smp_on_own_json_rows(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The training of llama-2-70b-finetune-smp-slurm, on the contract double of ``torch.sagemaker``."""
    (tmp_path / "model").mkdir()
    for name, body in published_model(tmp_path).items():
        (tmp_path / "model" / name).write_bytes(body)
    line = json.dumps({"input_ids": list(range(20)), "attention_mask": [1] * 20}) + "\n"
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.json").write_text(line * 8)
        (tmp_path / folder / "b.json.gz").write_bytes(gzip.compress((line * 8).encode()))
    recipe = load("llama-2-70b-finetune-smp-slurm", environ={}).spec
    assert isinstance(recipe, WorkflowSpec)
    task = recipe.steps["train"].model_dump(mode="json", exclude_unset=True)["task"]
    task |= {
        "start": {"pretrained": str(tmp_path / "model")},
        "data": {
            "format": "json_rows",
            "train": str(tmp_path / "train"),
            "validation": str(tmp_path / "test"),
            "seq_length": 32,
        },
        "parallelism": {"strategy": "smp", "hybrid_shard_degree": 2, "activation_checkpointing": "full"},
        "precision": {"compute": "fp32"},
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "max_steps": 4,
        "checkpoint": {"every_steps": 2},
        "validation": {"every_steps": 2},
        "logging": {"every_steps": 1},
    }
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(DOUBLE)}
    run = sm_llm.launch(spec(tmp_path, task=task, environment=environment), wait=True)
    assert run.state is RunState.COMPLETED, "\n".join(run.logs())
    events = list(read_events(run.events))
    assert [it["step"] for it in events if it["kind"] == "validation"] == [2, 4]
    assert all(it["host_memory_bytes"] > 0 for it in events if it["kind"] == "throughput")
    assert {it["source"] for it in events if it["kind"] == "start_chosen"} == {"pretrained"}
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.result)
    assert model.config.hidden_size == SIZES["hidden_size"]
