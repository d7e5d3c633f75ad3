"""Strategy smp on the contract double of ``torch.sagemaker`` over real FSDP1: losses, checkpoints, calls in order.

What the double has no arithmetic for (tensor, context and expert parallelism, fp8's rounding) is not shown here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from conftest import launch
from plain_loop import plain_losses
from smp_configurations import LAYOUTS, LEAN
from worker_jobs import events, exact_steps, losses, result_folder, train_task

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def smp2(worlds_root: Path, forks: dict[str, str]) -> World:
    return launch(worlds_root, 2, {}, environ=forks, script="smp_configurations.py", name="smp-2")


@pytest.fixture(scope="session")
def smp4(worlds_root: Path, smp2: World, forks: dict[str, str]) -> World:
    left = {"": smp2.run("left")}
    return launch(worlds_root, 4, left, environ=forks, script="smp_configurations.py", name="smp-4")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return plain_losses(train_task(**LEAN), tmp_path_factory.mktemp("plain") / "model")


def difference(run: Path, expected: dict[int, float]) -> float:
    found = losses(run)
    assert found.keys() == expected.keys()
    return max(abs(found[step] - expected[step]) for step in found)


def calls(world: World, name: str) -> list[tuple[str, dict[str, str]]]:
    return [(call, options) for call, options in world.results["calls"][name]]


def refusal(world: World, attempt: int) -> str:
    [message] = {it["message"] for it in events(world.run("left"), "failed") if it["attempt"] == attempt}
    return str(message)


@pytest.mark.parametrize("name", [*LAYOUTS, "whole"])
def test_losses_are_those_of_a_plain_loop(name: str, plain: dict[int, float], smp2: World) -> None:
    assert difference(smp2.run(name), plain) < 1e-4


def test_CK22_a_broken_run_continues_bit_for_bit_with_its_sharded_optimiser(smp2: World) -> None:
    assert exact_steps(smp2.run("broken")) == exact_steps(smp2.run("whole"))
    assert [event["step"] for event in events(smp2.run("broken"), "start_chosen")] == [0, 6]
    assert events(smp2.run("broken"), "state_verified"), "the hash of what every process restored was compared"


def test_CK30_CK32_another_shard_degree_is_refused_before_anything_is_allocated(smp2: World) -> None:
    message = refusal(smp2, attempt=3)
    assert "shard_degree 2 -> 1" in message
    assert "start.pretrained" in message
    assert [call for call, _ in calls(smp2, "left")] == ["init"], "no model was built"


def test_CK32_a_checkpoint_of_another_strategy_is_refused_with_what_to_do(smp2: World) -> None:
    assert "was saved by strategy smp, and fsdp cannot read it" in refusal(smp2, attempt=2)


def test_copies_of_shards_learn_the_same_and_continue_what_one_copy_left(plain: dict[int, float], smp4: World) -> None:
    """The number of copies may change: two processes left it, four of the same shard degree continue it."""
    assert difference(smp4.run("hybrid"), plain) < 1e-4
    assert difference(smp4.run("in-memory"), plain) < 1e-4
    assert difference(smp4.run("bf16"), plain) < 2e-2
    assert difference(smp4.run("left"), plain) < 1e-4
    assert [event["step"] for event in events(smp4.run("left"), "start_chosen")] == [0, 6]


@pytest.mark.parametrize("name", ["sharded", "tied", "drawn", "pretrained-fp8"])
def test_transformers_loads_what_was_published(name: str, smp2: World) -> None:
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(result_folder(smp2.run(name)), output_loading_info=True)
    assert (list(info["missing_keys"]), list(info["unexpected_keys"])) == ([], [])


def test_pretrained_weights_arrive_shard_by_shard_and_from_rank_0_alike(smp2: World) -> None:
    first = [losses(smp2.run(name))[1] for name in ("pretrained", "pretrained-fp8")]
    assert first[0] == pytest.approx(first[1], abs=1e-5)
    assert first[0] < losses(smp2.run("sharded"))[1] - 0.05, "it begins where training has ended"


def test_CV14_a_checkpoint_names_parameters_as_hugging_face_does_whatever_wraps_them(smp2: World) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    from sm_llm.worker.parameter_names import WRAPPER_WORDS

    [data] = (smp2.run("offloaded") / "ckpt" / "step-00000010").glob("*/data")
    keys = FileSystemReader(data).read_metadata().state_dict_metadata
    assert "tp0.ep0.fsdp1.model.model.layers.1.mlp.down_proj.weight" in keys
    assert not [key for key in keys if not WRAPPER_WORDS.isdisjoint(key.split("."))]


def test_the_library_is_called_in_its_order(smp2: World) -> None:
    names = [call for call, _ in calls(smp2, "drawn")]
    assert names[:4] == ["init", "transform", "DelayedParamIniter", "FSDP"]
    assert "fp8_autocast" in names
    plain = [call for call, _ in calls(smp2, "sharded")]
    assert plain[:3] == ["init", "DelayedParamIniter", "FSDP"]
    types = [options["type"] for call, options in calls(smp2, "sharded") if call == "sm_state_dict_type"]
    assert types[0] == "SM_LOCAL_STATE_DICT"
    assert types[-1] == "FULL_STATE_DICT"


def test_all_nine_parameters_reach_the_library(smp2: World) -> None:
    name, given = calls(smp2, "offloaded")[0]
    assert name == "init"
    assert given == {
        "hybrid_shard_degree": "2",
        "sm_activation_offloading": "True",
        "activation_loading_horizon": "2",
        "fsdp_cache_flush_warnings": "True",
        "allow_empty_shards": "False",
        "tensor_parallel_degree": "1",
        "context_parallel_degree": "1",
        "expert_parallel_degree": "1",
        "random_seed": "0",
    }


def test_a_process_without_the_library_states_which_image_has_it() -> None:
    from sm_llm.errors import RunFailed
    from sm_llm.worker.strategies.smp.library import symbol

    with pytest.raises(RunFailed, match=r"Only AWS's images smdistributed-modelparallel"):
        symbol("torch.sagemaker", "init")


def test_changed_degrees_that_the_launch_does_not_know_are_refused() -> None:
    """SageMaker's launch parameters win over anything that changes later, so a difference would go unseen."""
    import json
    import sys
    from types import ModuleType

    from sm_llm.errors import SpecError
    from sm_llm.spec.parallelism.smp import SmpSpec
    from sm_llm.worker.strategies.smp.library import start_library

    seen: list[Any] = []
    stand_in = ModuleType("torch.sagemaker")
    stand_in.init = lambda *given: seen.append(given)  # type: ignore[attr-defined]
    sys.modules["torch.sagemaker"] = stand_in
    try:
        launched = SmpSpec(hybrid_shard_degree=8).library_parameters(7)
        environ = {"SM_HP_MP_PARAMETERS": json.dumps(launched)}
        start_library(launched, environ)
        assert seen == [()], "what the platform handed over is the only source"
        with pytest.raises(SpecError, match="tensor_parallel_degree"):
            start_library(SmpSpec(hybrid_shard_degree=8, tensor_parallel_degree=2).library_parameters(7), environ)
    finally:
        del sys.modules["torch.sagemaker"]
