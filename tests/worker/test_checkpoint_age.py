"""The age of the newest published checkpoint: when it is too old, and how often that is reported."""

from __future__ import annotations

from sm_llm.worker.publishing.checkpoint_age import CheckpointAge


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def saved_every(checkpoint_age: CheckpointAge, clock: Clock, seconds: float, *steps: int) -> None:
    for step in steps:
        clock.now += seconds
        checkpoint_age.saved(step)


def test_CK01_publication_is_late_after_twice_the_interval_and_reported_again_when_that_has_doubled() -> None:
    clock = Clock()
    checkpoint_age = CheckpointAge(clock)
    saved_every(checkpoint_age, clock, 100, 10)
    clock.now += 5
    assert checkpoint_age.published(10) == 0
    saved_every(checkpoint_age, clock, 95, 20)
    clock.now += 190
    assert checkpoint_age.late() is None
    assert checkpoint_age.sentence == ""
    clock.now += 11
    alarm = checkpoint_age.late()
    assert alarm is not None
    assert (alarm.step, alarm.age_seconds, alarm.waiting_step) == (10, 296.0, 20)
    assert checkpoint_age.sentence == "last published step 10, 296 s ago"
    assert checkpoint_age.late() is None
    clock.now += 210
    assert checkpoint_age.late() is not None
    checkpoint_age.published(20)
    assert checkpoint_age.sentence == ""
    assert checkpoint_age.late() is None


def test_what_took_long_before_may_take_long_again() -> None:
    clock = Clock()
    checkpoint_age = CheckpointAge(clock)
    saved_every(checkpoint_age, clock, 10, 1)
    clock.now += 400
    assert checkpoint_age.late() is not None
    checkpoint_age.published(1)
    saved_every(checkpoint_age, clock, 10, 2)
    clock.now += 700
    assert checkpoint_age.late() is None


def test_short_intervals_are_no_reason_for_an_alarm_within_a_minute() -> None:
    clock = Clock()
    checkpoint_age = CheckpointAge(clock)
    saved_every(checkpoint_age, clock, 0.1, 1, 2, 3)
    clock.now += 59
    assert checkpoint_age.late() is None
    clock.now += 2
    assert checkpoint_age.late() is not None


def test_saves_that_newer_ones_replaced_are_counted_and_a_published_one_covers_the_older() -> None:
    clock = Clock()
    checkpoint_age = CheckpointAge(clock)
    checkpoint_age.begin(5)
    saved_every(checkpoint_age, clock, 10, 6, 7, 8)
    checkpoint_age.superseded(6)
    checkpoint_age.superseded(7)
    assert checkpoint_age.unpublished_seconds == 20
    assert checkpoint_age.failed("no").superseded == 2
    assert checkpoint_age.step == 5
    assert checkpoint_age.published(8) == 2
    assert checkpoint_age.unpublished_seconds == 0
    assert checkpoint_age.published(9) == 0
