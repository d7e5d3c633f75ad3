"""Products of degrees on all GPUs of this host, two or four: bf16, NCCL, PyTorch's own context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from conftest import launch
from gpu_parallel import DEGREES, STEPS, TOLERANCE
from parallel_configurations import FAMILIES
from worker_jobs import losses

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import World

GPUS = torch.cuda.device_count()
DEGREE = 4 if GPUS >= 4 else 2
NAMES = [*DEGREES[DEGREE], *(f"family-{name}" for name in FAMILIES)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("gpus")
    return launch(root, 1, {}, script="gpu_parallel.py", name="parallel-1")


@pytest.fixture(scope="module")
def together(alone: World) -> World:
    root: Path = alone.folder.parent
    world = launch(root, DEGREE, {}, script="gpu_parallel.py", name=f"parallel-{DEGREE}")
    print((world.folder / "table.md").read_text())
    return world


@pytest.mark.parametrize("name", NAMES)
def test_curves_agree(name: str, together: World, alone: World) -> None:
    assert name not in together.results["failed"]
    ours = losses(together.run(name))
    theirs = losses(alone.run(name if name.startswith("family") else "alone"))
    assert len(ours) == STEPS
    assert max(abs(ours[step] - theirs[step]) for step in theirs) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in DEGREES[DEGREE] if "offload" not in name])
def test_no_step_waits_for_the_device(name: str, together: World) -> None:
    assert together.results["syncs"][name] == 0
