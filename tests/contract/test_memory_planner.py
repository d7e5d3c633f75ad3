"""What the memory planner chooses: the order of ways to save memory, the batch it may not change, compilation."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.contract import memory_planner
from sm_llm.contract.memory_estimate import GIB, memory_estimate
from sm_llm.contract.memory_planner import Choice, Hardware, choose
from sm_llm.errors import SpecError
from sm_llm.models.config import model_config
from sm_llm.spec.derive import derive_task
from sm_llm.spec.machines.hardware import Card
from sm_llm.spec.tasks import PLAINEST, TrainTask, open_settings, plainest, with_settings

H200 = Card("NVIDIA H200", 139.8)
CONFIG = model_config(preset="llama-3.1-8b", path=None, pretrained=None, overrides={})


def training(**fields: Any) -> TrainTask:
    task = {"data": {"format": "synthetic", "seq_length": 8192, "rows": 10_000}, "max_steps": 5000}
    task |= {"precision": {"compute": "bf16"}, "global_batch_size": 32, **fields}
    return TrainTask.model_validate(task, strict=False)


def chosen(gib: float = 139.8, gpus: int = 8, name: str = "NVIDIA H200", **fields: Any) -> Choice:
    found = choose(CONFIG, training(**fields), Hardware(Card(name, gib), gpus, min(gpus, 8)))
    assert found is not None
    return found


def checkpointing(gib: float, **fields: Any) -> str:
    return str(chosen(gib, micro_batch_size=2, **fields).values["parallelism.activation_checkpointing"])


def test_less_memory_walks_down_the_ways_to_save_it() -> None:
    kinds = [checkpointing(gib) for gib in range(140, 20, -4)]
    steps = [kind for number, kind in enumerate(kinds) if number == 0 or kinds[number - 1] != kind]
    # Every second layer takes more memory than selective, and more time: it is for inputs that are offloaded.
    assert steps == ["none", "budget", "selective", "full"]


def test_eager_layers_have_no_budget() -> None:
    kinds = {checkpointing(gib, precision={"compute": "bf16", "compile": False}) for gib in range(140, 20, -8)}
    assert kinds == {"none", "selective", "full"}


def test_what_is_chosen_is_predicted_to_fit_and_nothing_faster_is() -> None:
    for gib in (40, 60, 80, 140):
        best = chosen(gib)
        assert best.predicted_bytes is not None
        assert best.predicted_bytes <= 0.97 * gib * GIB
        task = with_settings(training(), best.values)
        estimate = memory_estimate(CONFIG, task, derive_task(task, 8), 8, Card("NVIDIA H200", gib))
        assert estimate.by_card == best.predicted_bytes
    wide = chosen(140).values
    assert wide == {
        "micro_batch_size": 4,
        "parallelism.activation_checkpointing": "budget",
        "parallelism.reshard_after_forward": True,
        "precision.compile": True,
    }
    alone = chosen(140, global_batch_size=8).values
    assert alone["parallelism.activation_checkpointing"] == "none"
    assert alone["parallelism.reshard_after_forward"] is False


def test_where_nothing_fits_the_smallest_is_taken_with_a_warning() -> None:
    found = chosen(12)
    assert found.values["parallelism.activation_checkpointing"] == "full"
    assert found.values["micro_batch_size"] == 1
    assert found.values["parallelism.reshard_after_forward"] is True
    assert "nothing is predicted to fit" in str(found)


@pytest.mark.parametrize("batch", [2, 4, 6, 16])
@pytest.mark.parametrize("seq_length", [2048, 8192])
@pytest.mark.parametrize("gib", [60, 90, 120, 139.8, 150])
def test_one_gpu_is_given_the_best_of_everything_that_could_be_tried(gib: float, seq_length: int, batch: int) -> None:
    """The whole batch at once keeps no sums of gradients: it may fit where a smaller micro-batch does not."""
    data = {"format": "synthetic", "seq_length": seq_length, "rows": 10_000}
    fields = {"data": data, "global_batch_size": batch, "precision": {"compute": "bf16", "compile": True}}
    card = Card("NVIDIA H200", gib)
    found = chosen(gib, 1, **fields)
    peaks = []
    for size in (it for it in range(1, batch + 1) if batch % it == 0):
        for kind in memory_planner.SPEEDS:
            parallelism = {"activation_checkpointing": kind, "reshard_after_forward": True}
            task = training(**fields, micro_batch_size=size, parallelism=parallelism)
            peaks.append(memory_estimate(CONFIG, task, derive_task(task, 1), 1, card).by_card)
    fits = [peak for peak in peaks if peak <= 0.97 * gib * GIB]
    assert ("the fastest that is predicted to fit" in found.reason) is bool(fits)
    assert found.predicted_bytes is not None
    assert found.predicted_bytes in (fits or [min(peaks)])


def test_what_fits_without_a_margin_is_not_called_too_large() -> None:
    fixed = {"micro_batch_size": 2, "parallelism": {"activation_checkpointing": "none", "reshard_after_forward": False}}
    peak = chosen(**fixed).predicted_bytes
    assert peak is not None
    for room, reason in ((1.04, "the fastest"), (1.01, "nothing leaves 3% of the memory free"), (0.99, "nothing is")):
        assert str(chosen(peak / GIB * room, **fixed)).partition(": ")[2].startswith(reason)


@pytest.mark.parametrize(
    ("plain", "problem"),
    [
        (None, "expected an object"),
        ({"values": {}, "reason": "x"}, "expected an object"),
        ({"values": None, "reason": "x", "predicted_bytes": 1.0}, "values must be those of micro_batch_size"),
        ({"values": {}, "reason": "x", "predicted_bytes": 1.0}, "values must be those of micro_batch_size"),
        ({"values": {"micro_batch_size": "abc"}, "reason": "x", "predicted_bytes": 1.0}, "must not be 'abc'"),
        ({"values": {"micro_batch_size": 0}, "reason": "x", "predicted_bytes": 1.0}, "must not be 0"),
        ({"values": {"micro_batch_size": 2}, "reason": 1, "predicted_bytes": 1.0}, "reason must be a text"),
        ({"values": {"micro_batch_size": 2}, "reason": "x", "predicted_bytes": "1"}, "predicted_bytes a number"),
    ],
)
def test_what_is_no_choice_is_not_read_as_one(plain: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Choice.from_json(plain, ["micro_batch_size"])


def test_a_choice_is_read_as_it_was_written() -> None:
    found = chosen()
    assert Choice.from_json(found.to_json(), list(found.values)) == found
    for name, value in found.values.items():
        other = {**found.values, name: [value]}
        with pytest.raises(ValueError, match=name):
            Choice.from_json({**found.to_json(), "values": other}, list(found.values))


@pytest.mark.parametrize("batch", [8, 24, 40, 56, 8 * 7 * 3])
def test_the_micro_batch_divides_what_the_user_asked_for(batch: int) -> None:
    found = chosen(140, global_batch_size=batch, data={"format": "synthetic", "seq_length": 512, "rows": 10_000})
    own = batch // 8
    assert own % found.values["micro_batch_size"] == 0
    assert derive_task(with_settings(training(global_batch_size=batch), found.values), 8).global_batch_size == batch


def test_without_a_global_batch_it_stays_one_sequence_for_each_rank() -> None:
    assert chosen(140, global_batch_size=None).values["micro_batch_size"] == 1


def test_what_a_user_has_set_is_left_alone() -> None:
    fixed = {"activation_checkpointing": "selective", "reshard_after_forward": True}
    found = chosen(140, parallelism=fixed)
    assert set(found.values) == {"micro_batch_size", "precision.compile"}
    whole = training(parallelism=fixed, micro_batch_size=1, precision={"compile": False})
    assert choose(CONFIG, whole, Hardware(H200, 8, 8)) is None
    assert open_settings(whole) == ()


def test_offloaded_inputs_need_layers_that_are_computed_again() -> None:
    offloads = {"offload_activations": True}
    assert chosen(140, parallelism=offloads).values["parallelism.activation_checkpointing"] == "every_nth"
    assert plainest(training(parallelism=offloads)).parallelism.activation_checkpointing == "full"  # type: ignore[union-attr]


def test_one_gpu_gathers_nothing_so_nothing_is_kept() -> None:
    assert chosen(300, gpus=1).values["parallelism.reshard_after_forward"] is True


@pytest.mark.parametrize(
    ("fields", "hardware", "compiled", "reason"),
    [
        ({}, Hardware(H200, 8, 8), True, "compiled for about"),
        ({"max_steps": 10}, Hardware(H200, 8, 8), False, "not compiled for about"),
        ({"max_steps": None, "max_epochs": 1.0, "data": {"format": "rows", "seq_length": 8192, "train": "x"}},
         Hardware(H200, 8, 8), True, "compiled"),
        ({"max_steps": 100}, Hardware(Card("NVIDIA X", 139.8), 8, 8), False, "not compiled for 100 steps"),
        ({"max_steps": 200}, Hardware(Card("NVIDIA X", 139.8), 8, 8), True, "compiled for 200 steps"),
        ({}, Hardware(H200, 8, 8, "there is no C compiler"), False, "there is no C compiler"),
        ({"parallelism": {"tensor_parallel_degree": 2}}, Hardware(H200, 8, 8), False, "tensor parallelism"),
        ({"max_steps": 10, "parallelism": {"activation_checkpointing": "budget"}},
         Hardware(H200, 8, 8), True, "compiled"),
    ],
)  # fmt: skip
def test_layers_are_compiled_where_that_pays_and_works(
    fields: dict[str, Any], hardware: Hardware, compiled: bool, reason: str
) -> None:
    found = choose(CONFIG, training(**fields), hardware)
    assert found is not None
    assert found.values["precision.compile"] is compiled
    assert reason in found.reason


def test_ways_that_torch_cannot_compile_with_split_matrices_are_not_chosen() -> None:
    split = {"parallelism": {"tensor_parallel_degree": 2}, "precision": {"compute": "bf16", "compile": True}}
    kinds = {chosen(size, **split).values["parallelism.activation_checkpointing"] for size in (10, 20, 40, 80, 300)}
    assert kinds == {"none", "selective"}


def test_cpus_and_other_engines_take_the_plainest_values() -> None:
    found = choose(CONFIG, training(), Hardware(None, 2, 2))
    assert found is not None
    assert found.values == PLAINEST
    assert found.predicted_bytes is None
    other = choose(CONFIG, training(parallelism={"strategy": "smp"}), Hardware(H200, 8, 8))
    assert other is not None
    assert other.values == {"micro_batch_size": 1, "precision.compile": False}


def test_numbers_that_do_not_fit_are_the_users_fault() -> None:
    with pytest.raises(SpecError, match="not divisible"):
        choose(CONFIG, training(global_batch_size=31), Hardware(H200, 8, 8))


def test_prices_fall_in_the_order_in_which_they_are_tried() -> None:
    prices = list(memory_planner.SPEEDS.values())
    assert list(memory_planner.SPEEDS) == ["none", "budget", "selective", "every_nth", "full"]
    assert prices == sorted(prices, reverse=True)
