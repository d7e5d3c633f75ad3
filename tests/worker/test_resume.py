"""Runs that were broken, poisoned, tampered with or changed, and how they continued (``resume_configurations``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from resume_configurations import OTHER_JOBS, TAMPERINGS
from worker_jobs import STEPS, events, exact_steps, losses, result_folder

from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication.publish import find_final, list_checkpoints

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import World

pytestmark = pytest.mark.timeout(600)  # the first test of a world waits for its whole launch


def starts(run: Path) -> list[tuple[str, int]]:
    return [(event["source"], event["step"]) for event in events(run, "start_chosen")]


def notices(run: Path) -> str:
    return "\n".join(event["message"] for event in events(run, "notice"))


def saved(run: Path) -> list[int]:
    infos = list_checkpoints(FolderStore(run), run_id=run.name)
    assert all(info.valid for info in infos), infos
    return [info.step for info in infos]


@pytest.fixture(params=["world1", "world2", "world4"])
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(request.param)
    return found


def test_CK25_CK27_CK29_three_legs_equal_an_unbroken_run(world: World) -> None:
    """Losses, gradient norms and rates bit for bit: neither data nor schedule moves twice, mid-epoch and later."""
    assert exact_steps(world.run("legs")) == exact_steps(world.run("base"))
    assert starts(world.run("legs")) == [("scratch", 0), ("checkpoint", 3), ("checkpoint", 9)]
    assert [event["step"] for event in events(world.run("legs"), "state_verified")] == [3, 9]


def test_CK26_every_step_sees_the_same_samples_however_often_it_is_broken(world: World, world1: World) -> None:
    expected = world1.results["samples"]["base"]
    assert len(expected) == STEPS
    assert world.results["samples"]["legs"] == expected
    epoch = [row for step in range(1, 7) for row in expected[str(step)]]
    assert len(set(epoch)) == len(epoch) == 48, "an epoch repeats and leaves out nothing"
    assert {row for step in range(7, 11) for row in expected[str(step)]} < set(epoch)


@pytest.mark.parametrize(("name", "run"), [("world1", "from-2/half"), ("world4", "from-1/half")])
def test_CK26_another_number_of_processes_sees_the_same_samples(
    name: str, run: str, world1: World, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(name)
    expected = world1.results["samples"]["base"]
    assert world.results["samples"][run] == {str(step): expected[str(step)] for step in range(7, 11)}


@pytest.mark.parametrize("how", TAMPERINGS)
def test_a_damaged_checkpoint_is_refused_loudly_and_the_one_before_used(how: str, world1: World) -> None:
    run = world1.run(f"{how}/half")
    assert starts(run)[-1] == ("checkpoint", 3)
    warnings = [event["message"] for event in events(run, "notice") if event["level"] == "warning"]
    assert any("checkpoint refused: step 6" in message for message in warnings)
    assert exact_steps(run) == exact_steps(world1.run("base"))
    assert saved(run) == [3, 6, 9, 10], "step 6 was saved again; what was resumed from stays"


def test_with_no_usable_checkpoint_nothing_starts_unless_forced(world1: World) -> None:
    run = world1.run("ruined/half")
    assert starts(run) == [("scratch", 0), ("scratch", 0)], "attempt 2 did not start"
    assert {event["attempt"] for event in events(run, "step")} == {1, 3}
    assert exact_steps(run) == exact_steps(world1.run("base"))
    assert saved(run) == [6, 9, 10]


def test_I7_a_run_that_published_never_begins_from_scratch_unasked(world1: World) -> None:
    """Its events report that it published, its storage shows nothing."""
    run = world1.run("emptied/half")
    assert starts(run) == [("scratch", 0), ("scratch", 0)], "attempt 2 did not start"
    assert {event["attempt"] for event in events(run, "step")} == {1, 3}
    failures = [event["message"] for event in events(run, "failed")]
    assert "an earlier attempt published step 6" in failures[-1]
    assert "task.start=scratch" in failures[-1]


def test_a_requested_step_is_where_it_continues_and_later_ones_are_quarantined(world1: World) -> None:
    run = world1.run("wanted-3/half")
    assert starts(run)[-1] == ("checkpoint", 3)
    assert "quarantined (ckpt/retired): steps 6" in notices(run)
    assert exact_steps(run) == exact_steps(world1.run("base"))
    assert saved(run) == [3, 6, 9, 10]


@pytest.mark.parametrize("name", ["wanted-4/half", "wanted-none"])
def test_a_requested_resume_that_finds_nothing_is_an_error(name: str, world1: World) -> None:
    run = world1.run(name)
    assert {event["step"] for event in events(run, "step")} <= set(range(7)), "nothing was trained anew"
    assert ("scratch", 0) not in starts(run)[1:]
    assert find_final(FolderStore(run), run_id=run.name) is None


def test_commits_of_another_run_are_ignored(world1: World) -> None:
    run = world1.run("stranger")
    assert starts(run)[-1] == ("scratch", 0)
    assert exact_steps(run) == exact_steps(world1.run("base"))


def test_another_length_of_the_schedule_is_refused_unless_it_is_stated(world1: World) -> None:
    base, longer = exact_steps(world1.run("base")), world1.run("longer/half")
    assert max(exact_steps(longer)) == 6, "nothing was trained"
    kept, new = world1.run("kept/half"), world1.run("new/half")
    assert {step: exact_steps(kept)[step] for step in base} == base
    assert {event["learning_rate"] for event in events(kept, "step") if event["step"] > 10} == {3e-4}
    rates = {event["step"]: event["learning_rate"] for event in events(new, "step")}
    assert rates[7] > float.fromhex(base[7][2])
    assert rates[13] == 3e-4
    assert "schedule_steps: 10 -> 13" in notices(new)


def test_another_global_batch_size_is_refused(world1: World) -> None:
    assert max(exact_steps(world1.run("batch/half"))) == 6


@pytest.mark.parametrize("name", sorted(OTHER_JOBS))
def test_F1_another_model_or_order_is_refused_before_it_is_built(name: str, world1: World) -> None:
    run = world1.run(f"{name}/half")
    assert max(exact_steps(run)) == 6, "nothing was trained"
    assert starts(run) == [("scratch", 0), ("checkpoint", 6)]


def test_F1_a_checkpoint_of_an_earlier_release_is_continued_and_states_what_was_not_compared(world1: World) -> None:
    run = world1.run("old/half")
    assert exact_steps(run) == exact_steps(world1.run("base"))
    assert "recorded neither model nor data" in notices(run)


def test_f01_a_pipelines_next_job_continues_what_it_can_and_else_begins_anew(world1: World) -> None:
    assert starts(world1.run("retried/half")) == [("scratch", 0), ("checkpoint", 6)]
    run = world1.run("reseeded/half")
    assert starts(run) == [("scratch", 0), ("checkpoint", 6), ("scratch", 0), ("scratch", 0)]
    assert notices(run).count("This run starts from step 0") == 2, "of another order, then of a finished run"
    assert saved(run) == [6, 9, 10]
    assert exact_steps(run)[1] != exact_steps(world1.run("base"))[1]


def test_F1_another_run_continues_on_other_data_only_where_it_asks_for_them(world1: World) -> None:
    assert events(world1.run("branch-refused"), "step") == []
    assert events(world1.run("branch-model"), "step") == []
    run = world1.run("branch")
    assert set(exact_steps(run)) == set(range(7, 11))
    assert "continued with changes: task.seed: 0 -> 5 (data order)" in notices(run)
    assert exact_steps(run)[7] != exact_steps(world1.run("base"))[7]


def test_a_restored_state_with_another_hash_is_refused(world1: World) -> None:
    assert max(exact_steps(world1.run("doubted"))) < 5


def test_CK06_processes_that_find_different_starts_do_not_start(world2: World) -> None:
    assert starts(world2.run("torn/half")) == [("scratch", 0)]
    assert max(exact_steps(world2.run("torn/half"))) == 6


def test_a_gradient_that_is_not_finite_stops_the_job_and_nothing_of_it_is_saved(world2: World) -> None:
    run = world2.run("nan-stop")
    first = {event["step"]: event for event in events(run, "step") if event["attempt"] == 1}
    assert not math.isfinite(first[5]["grad_norm"]), "the step's event tells"
    assert starts(run) == [("scratch", 0), ("checkpoint", 3)], "it had not reached its next checkpoint"
    assert exact_steps(run) == exact_steps(world2.run("base"))


def by_step(run: Path) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in events(run, "step")}


def test_skipped_steps_change_nothing_and_training_continues(world2: World) -> None:
    run, base = by_step(world2.run("nan-skip")), by_step(world2.run("base"))
    assert math.isinf(run[5]["loss"])
    assert math.isnan(run[5]["grad_norm"]), "a loss of one process with finite gradients is everyone's"
    assert [run[step]["loss"] for step in range(1, 5)] == [base[step]["loss"] for step in range(1, 5)]
    assert all(math.isfinite(run[step]["loss"]) for step in run if step != 5)
    assert run[STEPS]["loss"] != base[STEPS]["loss"]
    assert notices(world2.run("nan-skip")).count("skipped: ") == 2
    assert result_folder(world2.run("nan-skip")).is_dir()


def test_a_broken_run_with_skipped_steps_equals_an_unbroken_one(world2: World) -> None:
    assert exact_steps(world2.run("nan-skip-broken")) == exact_steps(world2.run("nan-skip"))


def test_too_many_skipped_steps_in_a_row_fail(world2: World) -> None:
    run = world2.run("nan-limit")
    assert saved(run) == [3, 6][: len(saved(run))]
    assert max(by_step(run)) <= 8, "told at the next logged step at the latest"
    assert find_final(FolderStore(run), run_id=run.name) is None


def test_going_back_repeats_a_passing_fault_away(world2: World) -> None:
    run = world2.run("nan-back")
    assert starts(run) == [("scratch", 0), ("checkpoint", 6)]
    assert exact_steps(run) == exact_steps(world2.run("base"))
    seen = [event["grad_norm"] for event in events(run, "step") if event["step"] == 8]
    assert [math.isfinite(norm) for norm in seen] == [False, True]


def test_going_back_skips_a_step_that_is_not_finite_again(world2: World) -> None:
    run = world2.run("nan-back-again")
    assert starts(run) == [("scratch", 0), ("checkpoint", 6)]
    assert losses(run) == losses(world2.run("nan-8"))


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(world2: World) -> None:
    run = world2.run("nan-nowhere")
    assert saved(run) == []
    assert find_final(FolderStore(run), run_id=run.name) is None
