"""A trial of copies in which rank 0 reads wrong numbers: ``torchrun --nproc-per-node=2 faulty_peer.py FOLDER``."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import peer_memory

from sm_llm.spec.parallelism.base import Layout
from sm_llm.worker.strategies.fsdp import peer_copies


def main(folder: Path) -> None:
    # Who waits in vain for the other one fails.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    peer_copies.symmetric = peer_memory.PeerMemory(folder)  # type: ignore[assignment]
    read = peer_memory._Shared.get_remote_tensor

    def wrong(*arguments: Any) -> torch.Tensor:
        return torch.full_like(read(*arguments), 7)

    device = Mock(torch_device=torch.device("cpu"), copy_obstacle=Mock(return_value=""))
    assert dist.group.WORLD is not None
    sharing = peer_copies.Sharing(device, Layout(1, 2, 1, 1), 2, dist.group.WORLD, 64)
    with patch.object(peer_memory._Shared, "get_remote_tensor", read if dist.get_rank() else wrong):
        found = peer_copies.PeerCollectives(sharing, is_asked_for=True, sums=True)
    reasons: list[Any] = [None, None]
    dist.all_gather_object(reasons, found.reason)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps({"reasons": reasons}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
