"""Whole training jobs under torchrun on 1, 2 and 4 processes: exact semantics, exact resume, exact export."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plain_loop import plain_losses
from worker_jobs import STEPS, events, exact_steps, losses, result_folder, train_task

from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication.publish import find_final, list_checkpoints

if TYPE_CHECKING:
    from conftest import World


pytestmark = pytest.mark.timeout(600)  # the first test of a world waits for its whole launch


def largest_difference(first: dict[int, float], second: dict[int, float]) -> float:
    assert first.keys() == second.keys()
    return max(abs(first[step] - second[step]) for step in first)


@pytest.fixture(params=["world1", "world2", "world4"])
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(request.param)
    return found


def test_every_step_is_an_event(world: World) -> None:
    assert list(losses(world.run("base"))) == list(range(1, STEPS + 1))
    assert [event["step"] for event in events(world.run("base"), "throughput")] == [4, 8, 10]
    assert [event["step"] for event in events(world.run("base"), "validation")] == [5, 10]
    assert {event["tokens"] for event in events(world.run("base"), "step")} == {8 * 31}


def test_losses_do_not_depend_on_the_number_of_processes(world: World, world1: World) -> None:
    assert largest_difference(losses(world.run("base")), losses(world1.run("base"))) < 1e-5
    validations = [
        [event["validation_loss"] for event in events(it.run("base"), "validation")] for it in (world, world1)
    ]
    assert validations[0] == pytest.approx(validations[1], abs=1e-5)


def test_the_gradient_norm_is_that_of_the_unsharded_model(world: World, world1: World) -> None:
    """One process has whole gradients, and torch's own norm of them."""
    found = [{event["step"]: event["grad_norm"] for event in events(it.run("base"), "step")} for it in (world, world1)]
    assert largest_difference(*found) < 1e-4


def test_padded_rows_are_averaged_over_the_labels_of_the_global_batch(world: World, world1: World) -> None:
    assert largest_difference(losses(world.run("padded")), losses(world1.run("padded"))) < 1e-5
    counts = [[event["tokens"] for event in events(it.run("padded"), "step")] for it in (world, world1)]
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1


def test_initial_weights_are_bit_equal_on_any_number_of_processes(world: World, world1: World) -> None:
    assert world.results["initial"] == world1.results["initial"]
    assert world.results["equal_shards"] == []


@pytest.mark.parametrize(("name", "run"), [("world1", "from-2/half"), ("world4", "from-1/half")])
def test_CK30_another_number_of_processes_continues(
    name: str, run: str, world1: World, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(name)
    assert events(world.run(run), "start_chosen")[-1]["step"] == 6
    continued = {event["step"]: event["loss"] for event in events(world.run(run), "step") if event["attempt"] == 2}
    expected = {step: loss for step, loss in losses(world1.run("base")).items() if step > 6}
    assert largest_difference(continued, expected) < 1e-4


def test_the_policy_keeps_the_newest_checkpoints_and_the_final_result(world: World) -> None:
    store = FolderStore(world.run("base"))
    assert [(info.step, info.valid) for info in list_checkpoints(store)] == [(6, True), (9, True), (10, True)]
    final = find_final(store, run_id="base")
    assert final is not None
    assert final.save.world_size == world.size


def test_scratch_is_left_empty(world: World) -> None:
    """What was sealed is deleted once it is published."""
    scratch = world.run("base") / "local" / "attempt-1" / "node-0" / "scratch"
    assert [path for path in scratch.rglob("*") if path.is_file()] == []


def test_accumulating_micro_batches_equals_one_large_batch(world1: World) -> None:
    assert largest_difference(losses(world1.run("wide")), losses(world1.run("accumulated"))) < 1e-5


def test_one_process_without_fsdp_equals_fsdp_bit_for_bit(world1: World) -> None:
    """bf16 compute with fp32 masters is what FSDP2's mixed precision does."""
    assert exact_steps(world1.run("bf16")) == exact_steps(world1.run("bf16-sharded"))


def test_bf16_stays_near_fp32_and_resumes_exactly(world1: World, world2: World) -> None:
    assert 0 < largest_difference(losses(world1.run("bf16")), losses(world1.run("base"))) < 2e-2
    assert largest_difference(losses(world1.run("bf16")), losses(world2.run("bf16"))) < 2e-3
    assert exact_steps(world1.run("bf16-broken")) == exact_steps(world1.run("bf16"))


def test_fp8_stays_near_bf16_and_resumes_exactly(world1: World, world2: World) -> None:
    """Emulated, on CPUs: each product rounds its operands to fp8."""
    assert 0 < largest_difference(losses(world1.run("fp8")), losses(world1.run("bf16"))) < 5e-2
    # One process rounds weights to bf16 first; two round their own parts of the masters, by the scale of the whole.
    assert largest_difference(losses(world1.run("fp8")), losses(world2.run("fp8"))) < 1e-2
    assert exact_steps(world1.run("fp8-broken")) == exact_steps(world1.run("fp8"))


def test_bf16_masters_learn_alike_and_are_saved_as_they_are(world1: World) -> None:
    assert 0 < largest_difference(losses(world1.run("bf16-master")), losses(world1.run("bf16"))) < 5e-2
    sizes = [events(world1.run(name), "checkpoint_published")[-1]["bytes"] for name in ("bf16-master", "bf16")]
    assert sizes[0] < 0.7 * sizes[1]


def test_moments_in_bf16_learn_alike_are_saved_as_they_are_and_resume_exactly(world1: World) -> None:
    assert 0 < largest_difference(losses(world1.run("bf16-moments")), losses(world1.run("bf16"))) < 5e-2
    sizes = [events(world1.run(name), "checkpoint_published")[-1]["bytes"] for name in ("bf16-moments", "bf16")]
    assert sizes[0] < 0.75 * sizes[1]
    assert exact_steps(world1.run("bf16-moments-broken")) == exact_steps(world1.run("bf16-moments"))


def test_saving_does_not_change_training(world1: World) -> None:
    assert exact_steps(world1.run("synchronous")) == exact_steps(world1.run("base"))


def test_activation_checkpointing_does_not_change_losses(world2: World) -> None:
    assert exact_steps(world2.run("recompute")) == exact_steps(world2.run("base"))


def test_plateau_follows_validation(world1: World) -> None:
    rates = [event["learning_rate"] for event in events(world1.run("plateau"), "step")]
    scores = [event["validation_loss"] for event in events(world1.run("plateau"), "validation")]
    assert len(set(rates[4:])) > 2
    best, scale, expected = float("inf"), 1.0, []
    for score in scores:
        expected += [max(3e-4, 3e-3 * scale)] * 2
        scale *= 1.0 if score < best else 0.5
        best = min(best, score)
    assert rates[4:] == expected[4:]


def test_a_branch_continues_another_run_and_leaves_it_alone(world2: World) -> None:
    branch = world2.run("branch")
    assert exact_steps(branch) == {k: v for k, v in exact_steps(world2.run("base")).items() if k > 3}
    chosen = events(branch, "start_chosen")[0]
    assert (chosen["source"], chosen["step"]) == ("checkpoint", 3)
    assert chosen["digest"] is not None


def test_pretrained_weights_start_where_they_left_off(world2: World) -> None:
    pretrained, trained = world2.run("pretrained"), world2.run("untied")
    chosen = events(pretrained, "start_chosen")[0]
    assert (chosen["source"], chosen["step"]) == ("pretrained", 0)
    assert losses(pretrained)[1] < losses(trained)[1] - 0.1


def test_pretrained_weights_are_read_slice_by_slice_into_split_matrices(world2: World) -> None:
    """Rows of some, columns of others."""
    found = [losses(world2.run(name)) for name in ("pretrained", "pretrained-split")]
    assert largest_difference(*found) < 1e-5


@pytest.mark.parametrize("name", ["base", "bf16", "untied"])
def test_the_published_model_loads_and_scores_the_same(name: str, world2: World) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from sm_llm.data.loader import open_source

    task = TrainTask.model_validate(train_task(), strict=False)
    source = open_source(task.data, "validation", 256, task.seed)
    assert source is not None
    import numpy as np

    ids = torch.from_numpy(source.rows(np.arange(10)).input_ids)
    model = AutoModelForCausalLM.from_pretrained(result_folder(world2.run(name)))
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    recorded = events(world2.run(name), "validation")[-1]["validation_loss"]
    assert loss == pytest.approx(recorded, abs=1e-3)
    assert model.config.vocab_size == 256


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return plain_losses(train_task(), tmp_path_factory.mktemp("plain") / "model")


def test_losses_equal_a_plain_hugging_face_loop(world: World, plain: dict[int, float]) -> None:
    """The same model, rows and schedule written down without this package's worker."""
    assert largest_difference(plain, losses(world.run("base"))) < 1e-4
