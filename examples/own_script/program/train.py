"""Fits a line with DistributedDataParallel; saves every 50 steps and continues from the newest checkpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sm_llm

SAVE_EVERY = 50


def main() -> None:
    """Train, then leave the weights in ``output/``, which becomes the result of the run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    arguments = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)  # the same initial weights in every process
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)

    first = int(os.environ.get("SM_LLM_RESUME_STEP", "0"))
    if first:
        saved = Path(os.environ["SM_LLM_RESUME_FOLDER"]) / "state.pt"
        state = torch.load(saved, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    for step in range(first + 1, arguments.steps + 1):
        # The data of a step follow from its number and the rank, so a resumed run sees what an unbroken one would.
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(64, 1, generator=generator).to(device)
        loss = torch.nn.functional.mse_loss(model(x), 2 * x + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == arguments.steps:
            sm_llm.log(step, loss=loss.item())
        if step % SAVE_EVERY == 0:
            save(model, optimizer, step)

    if dist.get_rank() == 0:
        Path("output").mkdir(exist_ok=True)
        torch.save(model.module.state_dict(), "output/model.pt")
    dist.destroy_process_group()


def save(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the state once per node, then hand the folder over in every process; it is published in the background."""
    folder = Path("checkpoints") / f"step-{step}"
    if os.environ["LOCAL_RANK"] == "0":
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    dist.barrier()
    sm_llm.publish(folder, step=step)


if __name__ == "__main__":
    main()
