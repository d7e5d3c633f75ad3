"""The oracle of training: a job's model, rows and schedule with transformers and AdamW alone, on one process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from sm_llm.data.loader import open_source
from sm_llm.data.order import row_indices
from sm_llm.models.config import both_spellings, model_config
from sm_llm.models.families.table import family
from sm_llm.models.init_weights import initial_slice
from sm_llm.spec.tasks import TrainTask
from sm_llm.worker.training.schedule import learning_rate

if TYPE_CHECKING:
    from pathlib import Path


def write_initial_model(folder: Path, config: dict[str, Any], seed: int) -> None:
    """A published folder of the initial weights; transformers itself makes its parameters of the tensors."""
    folder.mkdir(parents=True)
    tensors = family(config).tensors(config)
    whole = {
        name: initial_slice(seed, name, it.shape, it, (0,) * len(it.shape), it.shape) for name, it in tensors.items()
    }
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(both_spellings({**config, "dtype": "float32"})))


def plain_losses(fields: dict[str, Any], folder: Path) -> dict[int, float]:
    """Loss of every step of the job that ``worker_jobs.train_task`` describes."""
    task = TrainTask.model_validate(fields, strict=False)
    config = model_config(preset=task.model.preset, path=task.model.path, pretrained=None, overrides=task.model.config)
    write_initial_model(folder, config, task.seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    free = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in model.named_parameters() if not ("norm" in name or name.endswith("bias"))]
    groups = [
        {"params": decayed, "weight_decay": task.optim.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=task.optim.betas, eps=task.optim.eps)
    source = open_source(task.data, "train", config["vocab_size"], task.seed)
    batch, rows, steps = task.global_batch_size or 1, source.count or 0, task.max_steps or 0  # type: ignore[union-attr]
    found = {}
    for step in range(1, steps + 1):
        chosen = row_indices(np.arange((step - 1) * batch, step * batch), rows, task.seed, True)
        ids = torch.from_numpy(source.rows(chosen).input_ids)  # type: ignore[union-attr]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.optim.max_grad_norm or 0.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(task.optim, step, steps, task.optim.warmup_steps or 0)
        optimizer.step()
        optimizer.zero_grad()
        found[step] = loss.item()
    return found
