"""The plain way that ``recovery.py`` compares with: torchrun, FSDP2 and DCP, and a save every few steps.

``torchrun … plain_recovery.py FOLDER EVERY`` continues from the newest whole checkpoint in FOLDER and writes a line per
step, and two about its start, to FOLDER/steps.jsonl.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main(folder: Path, every: int) -> None:
    """Train until somebody ends it."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    for layer in model.model.layers:
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    note(folder, mark="started")
    step = newest(folder)
    if step:
        held = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(held, checkpoint_id=folder / f"step-{step}")
        set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"])
    note(folder, mark="restored")
    while True:
        step += 1
        tokens = torch.randint(0, CONFIG["vocab_size"], (2, 128))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(folder, step=step, start=os.environ["SLURM_RESTART_COUNT"])
        if step % every == 0:
            save(folder, step, model, optimizer)


def note(folder: Path, **fields: object) -> None:
    """A line of rank 0, with the time."""
    if dist.get_rank() == 0:
        with (folder / "steps.jsonl").open("a") as log:
            log.write(json.dumps({**fields, "time": time.time()}) + "\n")


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One checkpoint, whole once it has its name; the one before the last goes."""
    held = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    temporary = folder / f"writing-{step}"
    dcp.save(held, checkpoint_id=temporary)
    dist.barrier()
    if dist.get_rank() == 0:
        temporary.rename(folder / f"step-{step}")
        for old in sorted(steps(folder))[:-2]:
            shutil.rmtree(folder / f"step-{old}")


def steps(folder: Path) -> list[int]:
    """Those that have a whole checkpoint."""
    return [int(path.name.partition("-")[2]) for path in folder.glob("step-*")]


def newest(folder: Path) -> int:
    """The newest of them, the same on every process."""
    found = [max(steps(folder), default=0)]
    dist.broadcast_object_list(found)
    return found[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
