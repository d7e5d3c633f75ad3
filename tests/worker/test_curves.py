"""Loss curves of 200 steps on real text: bf16 follows fp32, fp8 (emulated on CPUs) stays in a band around it.

Where there is a GPU they are its own: ``pytest -m integration tests/worker/test_curves.py -s`` prints the distances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from worker_jobs import events, job_environment, job_file, losses, result_folder, train_task

from sm_llm.worker.main import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
STEPS, LENGTH = 200, 64
MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BANDS = {"bf16": 0.002, "fp8": 0.01}
"""Of the mean of 20 neighbouring losses, nats, at every step: four times what was seen (0.0005 and 0.0025)."""
WINDOW = 20


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the documentation that comes with Python."""
    run = tmp_path_factory.mktemp("text") / "rows"
    tokenizer = {"vocab_size": MODEL["vocab_size"], "max_bytes": 200_000}
    task = {"kind": "prepare", "sources": ["builtin:python-docs"], "seq_length": LENGTH, "train_tokenizer": tokenizer}
    assert main("prepare", job_environment(job_file(task, run, 1))) == 0
    return result_folder(run) / "train"


@pytest.fixture(scope="module")
def curves(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses by number format; the same initial weights and rows."""
    folder, found = tmp_path_factory.mktemp("curves"), {}
    for compute in ("fp32", *BANDS):
        task = train_task(
            model={"preset": "tiny", "config": MODEL},
            data={"format": "rows", "train": str(rows), "seq_length": LENGTH},
            micro_batch_size=8,
            max_steps=STEPS,
            precision={"compute": compute},
            optim={"learning_rate": 1e-3, "min_learning_rate": 1e-4},
            validation={"every_steps": None},
            checkpoint={"every_steps": STEPS},
            logging={"every_steps": 50},
            deterministic=False,
        )
        # Products of fp32 in TF32 would be a reference with 10 bits.
        torch.backends.cuda.matmul.allow_tf32 = False
        assert main("train", job_environment(job_file(task, folder / compute, 1))) == 0
        found[compute] = [loss for _, loss in sorted(losses(folder / compute).items())]
        (attention,) = events(folder / compute, "attention_chosen")
        print(f"{compute}: attention {attention['attention']}, last loss {found[compute][-1]:.4f}")
    return found


def means(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unfold(0, WINDOW, 1).mean(1)


def test_the_reference_learns(curves: dict[str, list[float]]) -> None:
    assert len(curves["fp32"]) == STEPS
    assert curves["fp32"][-1] < curves["fp32"][0] - 1.2


@pytest.mark.parametrize("compute", BANDS)
def test_a_curve_follows_that_of_fp32(compute: str, curves: dict[str, list[float]]) -> None:
    distance = (means(curves[compute]) - means(curves["fp32"])).abs().max().item()
    print(f"{compute}: largest distance of means of {WINDOW} losses {distance:.4f}")
    assert curves[compute] != curves["fp32"], "it is computed in another format"
    assert distance < BANDS[compute]
