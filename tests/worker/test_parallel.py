"""Every product of degrees and every family learns what a plain transformers loop does; checkpoints fit all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from conftest import launch
from parallel_configurations import (
    COPIED_4,
    DEGREES,
    FAMILIES,
    LEAN,
    PADDED_2,
    PADDED_4,
    SPLIT,
    SPLIT_4,
    family_task,
)
from plain_loop import plain_losses
from worker_jobs import events, exact_steps, losses, result_folder, train_task

from sm_llm.runs.events.events import COPY_ENGINES

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import World

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]  # the first test waits for whole launches


def largest_difference(first: dict[int, float], second: dict[int, float]) -> float:
    assert first.keys() == second.keys()
    return max(abs(first[step] - second[step]) for step in first)


def norms(run: Path) -> dict[int, float]:
    return {event["step"]: event["grad_norm"] for event in events(run, "step")}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return plain_losses(train_task(**LEAN), tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="session")
def parallel2(worlds_root: Path, forks: dict[str, str]) -> World:
    return launch(worlds_root, 2, {}, environ=forks, script="parallel_configurations.py", name="parallel-2")


@pytest.fixture(scope="session")
def parallel4(worlds_root: Path, forks: dict[str, str]) -> World:
    script = "parallel_configurations.py"
    return launch(worlds_root, 4, {}, environ=forks, script=script, name="parallel-4", seconds=880)


@pytest.fixture(scope="session")
def parallel1(worlds_root: Path, parallel4: World, forks: dict[str, str]) -> World:
    """One process takes up what four have left."""
    left = {"": parallel4.run("for-others") / "resharded"}
    return launch(worlds_root, 1, left, environ=forks, script="parallel_configurations.py", name="parallel-1")


def assert_same_training(run: Path, plain: dict[int, float], base: Path) -> None:
    """Losses of every step, gradient norms and validation."""
    assert largest_difference(losses(run), plain) < 1e-4
    assert largest_difference(norms(run), norms(base)) < 1e-4
    scores = [events(it, "validation")[-1] for it in (run, base)]
    assert scores[0]["validation_loss"] == pytest.approx(scores[1]["validation_loss"], abs=1e-5)
    assert scores[0]["tokens"] == scores[1]["tokens"] == 10 * 31


@pytest.mark.parametrize("name", DEGREES[2])
def test_two_processes_learn_what_a_plain_loop_learns(name: str, plain: dict[int, float], parallel2: World) -> None:
    assert_same_training(parallel2.run(name), plain, parallel2.run("base"))


@pytest.mark.parametrize("name", PADDED_2)
def test_padding_does_not_count_where_processes_share_rows(name: str, parallel1: World, parallel2: World) -> None:
    """Labels are counted once for all of them, and each gives the loss of its own tokens."""
    assert largest_difference(losses(parallel2.run(f"padded-{name}")), losses(parallel1.run("padded-alone"))) < 1e-5


@pytest.mark.parametrize("name", PADDED_4)
def test_padding_does_not_count_on_four_processes(name: str, parallel1: World, parallel4: World) -> None:
    assert largest_difference(losses(parallel4.run(f"padded-{name}")), losses(parallel1.run("padded-alone"))) < 1e-5


def test_labels_of_rows_that_several_processes_see_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data-parallel parts of 10 and 6 labels, each seen by two processes."""
    import torch.distributed as dist

    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.worker.device import CpuDevice
    from sm_llm.worker.training.batch_transfer import global_targets

    monkeypatch.setattr(dist, "all_reduce", lambda total: total.add_(10 + 6 + 6))
    batch = SimpleNamespace(targets=10)
    for arranged in (Layout(shard=2, tensor=2), Layout(shard=4, context=2)):
        found = global_targets([batch], padded=True, layout=arranged, device=CpuDevice())  # type: ignore[list-item]
        assert float(found) == 16


@pytest.mark.parametrize("name", DEGREES[4])
def test_four_processes_learn_what_a_plain_loop_learns(
    name: str, plain: dict[int, float], parallel4: World, parallel2: World
) -> None:
    assert_same_training(parallel4.run(name), plain, parallel2.run("base"))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_learn_what_transformers_learns(name: str, parallel1: World, parallel2: World, tmp_path: Path) -> None:
    expected = plain_losses(family_task(tmp_path, name), tmp_path / "model")
    for world in (parallel1, parallel2):
        assert largest_difference(losses(world.run(f"family-{name}")), expected) < 1e-4


@pytest.mark.parametrize("name", SPLIT)
def test_families_learn_the_same_where_their_matrices_or_sequences_are_split(
    name: str, parallel1: World, parallel2: World
) -> None:
    """Biases and a tied table over heads that are split; rotary scaling, whose frequencies are made anew."""
    assert largest_difference(losses(parallel2.run(f"split-{name}")), losses(parallel1.run(f"family-{name}"))) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_every_published_family_and_scores_the_same(name: str, parallel2: World) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from sm_llm.data.loader import open_source
    from sm_llm.spec.tasks import TrainTask

    task = TrainTask.model_validate(train_task(), strict=False)
    source = open_source(task.data, "validation", 256, task.seed)
    assert source is not None
    ids = torch.from_numpy(source.rows(np.arange(10)).input_ids)
    model, info = AutoModelForCausalLM.from_pretrained(
        result_folder(parallel2.run(f"family-{name}")), output_loading_info=True
    )
    assert (list(info["missing_keys"]), list(info["unexpected_keys"])) == ([], [])
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    recorded = events(parallel2.run(f"family-{name}"), "validation")[-1]["validation_loss"]
    assert loss == pytest.approx(recorded, abs=1e-4)


def assert_continued(run: Path, plain: dict[int, float], steps: list[int], attempts: int) -> None:
    starts = [event["step"] for event in events(run, "start_chosen")]
    assert starts == steps
    assert {event["attempt"] for event in events(run, "step")} == set(range(1, attempts + 1))
    assert largest_difference(losses(run), plain) < 1e-4


def test_CK22_CK32_a_checkpoint_continues_under_tensor_parallelism_and_back(
    plain: dict[int, float], parallel2: World
) -> None:
    """The optimiser state is resharded too: the losses are those of an unbroken run, and a notice reports it."""
    assert_continued(parallel2.run("resharded"), plain, [0, 2, 4], 3)
    reported = " ".join(event["message"] for event in events(parallel2.run("resharded"), "notice"))
    assert "tensor_parallel_degree 1 -> 2" in reported
    assert "tensor_parallel_degree 2 -> 1" in reported


def test_CK32_four_processes_distribute_anew_to_other_degrees_to_one_process_and_back(
    plain: dict[int, float], parallel4: World, parallel1: World
) -> None:
    assert_continued(parallel4.run("resharded"), plain, [0, 2, 4], 3)
    assert_continued(parallel1.run("resharded"), plain, [0, 2, 4], 3)


def test_CK30_more_processes_than_rows_of_a_parameter(parallel4: World) -> None:
    assert exact_steps(parallel4.run("narrow-broken")) == exact_steps(parallel4.run("narrow"))


def test_three_experts_on_four_processes(parallel4: World, parallel1: World) -> None:
    name = "family-mixtral"
    assert largest_difference(losses(parallel4.run(name)), losses(parallel1.run(name))) < 1e-4


@pytest.mark.parametrize("name", SPLIT_4)
def test_families_on_four_processes(name: str, parallel4: World, parallel1: World) -> None:
    """Among them a sliding window over sequences and heads that are split."""
    assert largest_difference(losses(parallel4.run(f"split-{name}")), losses(parallel1.run(f"family-{name}"))) < 1e-4


@pytest.mark.parametrize("name", ["kept", *COPIED_4])
def test_copies_between_gpus_give_the_sums_of_a_library(name: str, parallel2: World, parallel4: World) -> None:
    """Of two values a sum has one order; four are added up in another than that of gloo."""
    for found in (losses, norms):
        copied, rounded = (found(parallel4.run(f"{kind}-{name}")) for kind in ("copied", "rounded"))
        assert largest_difference(copied, rounded) < 1e-5
        assert found(parallel2.run("copied-kept")) == found(parallel2.run("rounded-kept"))
    for world, kind in ((parallel2, "kept"), (parallel4, name)):
        gathers, sums = world.results[f"copies-{kind}"]
        # Six steps of a layer and the ends at least, each from one other process or more.
        assert min(gathers, sums) > 6 * 3


@pytest.mark.parametrize("name", ["kept", *COPIED_4])
def test_a_run_reports_what_moved_its_parameters(name: str, parallel4: World) -> None:
    (by_copies,) = events(parallel4.run(f"copied-{name}"), "collectives_chosen")
    assert (by_copies["collectives"], by_copies["reason"]) == (COPY_ENGINES, "")
    (by_library,) = events(parallel4.run(f"rounded-{name}"), "collectives_chosen")
    assert by_library["collectives"] == "gloo"
    assert by_library["reason"].startswith("deterministic")
    assert events(parallel4.run("copies"), "collectives_chosen")[0]["reason"] == "", "nothing is sharded"
