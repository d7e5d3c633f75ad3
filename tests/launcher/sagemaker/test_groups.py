"""Jobs of several instance types are planned with the slowest and the smallest of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from tests.launcher.sagemaker.conftest import TINY, plan_of, render

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.errors import Issue

    Faults = Callable[..., list[Issue]]

LARGE: dict[str, Any] = {
    **TINY["task"],
    "model": {"preset": "llama-3-8b"},
    "data": {"format": "synthetic", "seq_length": 4096},
    "micro_batch_size": 4,
    "parallelism": {"activation_checkpointing": "none"},
    "max_steps": 10_000,
}


def of(*types: str, first: str | None = None, **fields: Any) -> dict[str, Any]:
    groups = [{"name": f"g{n}", "instance_type": name, "instance_count": 1} for n, name in enumerate(types)]
    return {
        "source": {**TINY, "task": LARGE},
        "compute": {"instance_count": len(types), "instance_type": first or types[0]},
        "backend": {**TINY["backend"], "instance_groups": groups},
        **fields,
    }


def limit(*types: str, first: str | None = None) -> tuple[int, str]:
    sent = render(**of(*types, first=first)).request
    plan = plan_of(**of(*types, first=first))
    return sent["StoppingCondition"]["MaxRuntimeInSeconds"], plan.facts["time limit"]


@pytest.mark.parametrize("first", ["ml.p5.48xlarge", "ml.p4d.24xlarge"])
def test_C12_the_time_limit_follows_the_slowest_group_whichever_is_named(first: str) -> None:
    """A job of H100 and A100 takes as long as its A100 nodes."""
    mixed, reason = limit("ml.p5.48xlarge", "ml.p4d.24xlarge", first=first)
    assert mixed == limit("ml.p4d.24xlarge", "ml.p4d.24xlarge")[0]
    assert mixed > limit("ml.p5.48xlarge", "ml.p5.48xlarge")[0]
    assert "3.12e+14 FLOP/s" in reason
    assert "slowest instance group" in reason


def test_C12_memory_is_that_of_the_smallest_gpu() -> None:
    plan = plan_of(**of("ml.p5.48xlarge", "ml.p4d.24xlarge"))
    assert any("of 40 GiB" in warning for warning in plan.warnings)
    (warning,) = [it for it in plan_of(**of("ml.p5.48xlarge", "ml.p5e.48xlarge")).warnings if "out of memory" in it]
    assert "of 80 GiB" in warning


def test_C12_efa_is_named_only_where_all_nodes_have_it() -> None:
    both = render(**of("ml.g5.8xlarge", "ml.g5.8xlarge")).request["Environment"]
    assert both["FI_PROVIDER"] == "efa"
    sent = render(**of("ml.g5.8xlarge", "ml.g5.4xlarge"))
    assert "FI_PROVIDER" not in sent.request.get("Environment", {})
    assert any("ml.g5.4xlarge has no EFA" in it for it in plan_of(**of("ml.g5.8xlarge", "ml.g5.4xlarge")).warnings)


def test_C12_the_volume_is_that_of_nodes_without_disks_of_their_own() -> None:
    wanted = of("ml.p5.4xlarge", "ml.p3.2xlarge", task=TINY["task"])
    sent = render(wanted.pop("source"), "backend.max_run_seconds=3600", **wanted).request
    assert sent["ResourceConfig"]["VolumeSizeInGB"] == 100


@pytest.mark.parametrize("types", [("ml.g5.xlarge", "ml.m5.xlarge"), ("ml.m5.xlarge", "ml.g5.xlarge")])
def test_C12_groups_of_other_accelerators_are_refused(types: tuple[str, str], faults: Faults) -> None:
    found = faults(**of(*types, task=TINY["task"]))
    (fault,) = [it for it in found if it.path == "backend.instance_groups"]
    assert "same kind" in fault.message
    assert "ml.m5.xlarge has no accelerator" in str(fault)


def test_C12_a_type_that_no_group_has_is_refused(faults: Faults) -> None:
    (fault,) = faults(**of("ml.p4d.24xlarge", "ml.p4de.24xlarge", first="ml.p5.48xlarge"))
    assert (fault.path, "no instance group" in fault.message) == ("compute.instance_type", True)
    assert "ml.p4d.24xlarge" in fault.remedy


def test_C12_the_strategy_must_run_on_every_group(faults: Faults) -> None:
    smp = {**LARGE, "parallelism": {"strategy": "smp"}}
    types = ("ml.p4d.24xlarge", "ml.g5.48xlarge")
    (fault,) = [it for it in faults(**of(*types, task=smp)) if "SMP" in it.message]
    assert (fault.path, fault.value) == ("backend.instance_groups", "ml.g5.48xlarge")


def test_C12_only_the_module_of_machines_reads_the_row_of_the_one_type() -> None:
    """A rule that asked ``instance(compute.instance_type)`` would plan a job of groups with one of its types."""
    sources = {path.name: path.read_text() for path in Path(sm_llm.__file__).parent.rglob("*.py")}
    assert [name for name, text in sources.items() if re.search(r"\binstance\([^)]*compute\.instance_type", text)] == []
