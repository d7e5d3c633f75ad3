"""fp8 over several processes: weights that they share unevenly, and whatever checkpoints activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from conftest import launch
from fp8_configurations import PARALLELISM
from test_worlds import largest_difference
from worker_jobs import losses

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest, worlds_root: Path, forks: dict[str, str]) -> World:
    script = "fp8_configurations.py"
    return launch(worlds_root, request.param, {}, environ=forks, script=script, name=f"fp8-{request.param}")


def test_fp8_trains_near_bf16(world: World) -> None:
    """Three processes have 22, 22 and 20 of 64 rows: those weights are gathered in bf16, and all are trained."""
    assert 0 < largest_difference(losses(world.run("fp8-plain")), losses(world.run("bf16-plain"))) < 3e-2


@pytest.mark.parametrize("name", [it for it in PARALLELISM if it != "plain"])
def test_what_is_computed_again_or_offloaded_changes_no_loss(name: str, world: World) -> None:
    assert losses(world.run(f"fp8-{name}")) == losses(world.run("fp8-plain"))
