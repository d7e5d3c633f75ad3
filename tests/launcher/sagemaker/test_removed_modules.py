"""Imports that a program's image does not hold are warned of when it is planned."""

from __future__ import annotations

import importlib.machinery
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning import removed_modules
from tests.launcher.sagemaker.conftest import SCRIPT, plan_of

if TYPE_CHECKING:
    from pathlib import Path

SMP = {"strategy": "smp", "hybrid_shard_degree": 8}


def warnings(tmp_path: Path, text: str, *overrides: str, smp: bool = True) -> list[str]:
    (tmp_path / "train.py").write_text(text)
    task: dict[str, Any] = {**SCRIPT["task"], "source": str(tmp_path), **({"parallelism": SMP} if smp else {})}
    return [it for it in plan_of({**SCRIPT, "task": task}, *overrides).warnings if "imports" in it]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from torch.sagemaker.distributed.fsdp import checkpoint", "removed with SMP 2.7"),
        ("import torch.sagemaker.distributed.fsdp.checkpoint as c", "state_dict_saver"),
        ("def f():\n    from torch.sagemaker.distributed.fsdp.checkpoint import save_model_checkpoint", "removed"),
        ("import smdistributed.modelparallel.torch as smp", "SMP v1"),
        ("from torch.sagemaker.offload import smart_offload", "not known to be in the library"),
    ],
)
def test_C10_a_module_that_the_image_no_longer_has_is_warned_of(text: str, words: str, tmp_path: Path) -> None:
    (found,) = [it for it in warnings(tmp_path, text) if words in it]
    assert "task.source/train.py" in found


@pytest.mark.parametrize(
    "text",
    [
        "import torch.sagemaker as tsm",
        "from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save",
        "from torch.sagemaker.moe.moe_config import MoEConfig",
        "from torch.sagemaker.delayed_param import DelayedParamIniter",
        "from torch.sagemaker.utils.process_group_utils import get_global_ranks",
        "from torch.distributed.fsdp import FullyShardedDataParallel",
        "this is not Python",
    ],
)
def test_C10_what_the_library_has_is_not(text: str, tmp_path: Path) -> None:
    assert warnings(tmp_path, text) == []


def test_C10_an_older_image_still_has_it_and_another_line_has_nothing_of_it(tmp_path: Path) -> None:
    old = "from torch.sagemaker.distributed.fsdp.checkpoint import save_model_checkpoint"
    assert warnings(tmp_path, old, "backend.image_version=2.3.1") == []
    (found,) = warnings(tmp_path, "import torch.sagemaker", smp=False)
    assert "task.parallelism.strategy=smp" in found


@pytest.mark.parametrize("contract", ["null", "sagemaker"])
def test_12f_a_local_plan_reads_the_program_as_well(contract: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def x(:")
    (tmp_path / "other.py").write_text("import torch.sagemaker as tsm\nfrom torch.sagemaker.offload import x\n")
    job = {"name": "s", "task": {"kind": "script", "entry": "train.py", "source": str(tmp_path)}}
    changes = [] if contract == "null" else ["backend.contract=sagemaker", "compute.processes_per_instance=1"]
    reported = "\n".join(plan(job, *changes)[0].warnings)
    assert "task.entry: train.py does not start under Python" in reported
    assert "imports torch.sagemaker, which this environment does not hold" in reported


def test_12f_the_library_is_a_part_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch" / "sagemaker").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("")
    assert not removed_modules._has_library()
    monkeypatch.setattr(removed_modules, "find_spec", lambda _: importlib.machinery.PathFinder.find_spec(
        "torch", [str(tmp_path)]))  # fmt: skip
    assert removed_modules._has_library()
