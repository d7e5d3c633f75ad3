"""The age of the newest published checkpoint: when it is too old, and how often that is told."""

from __future__ import annotations

from sm_llm.worker.publishing.freshness import Freshness


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def saved_every(freshness: Freshness, clock: Clock, seconds: float, *steps: int) -> None:
    for step in steps:
        clock.now += seconds
        freshness.saved(step)


def test_CK01_publication_is_late_after_twice_the_interval_and_told_again_when_that_has_doubled() -> None:
    clock = Clock()
    freshness = Freshness(clock)
    saved_every(freshness, clock, 100, 10)
    clock.now += 5
    assert freshness.published(10) == 0
    saved_every(freshness, clock, 95, 20)
    clock.now += 190
    assert freshness.late() is None
    assert freshness.sentence == ""
    clock.now += 11
    alarm = freshness.late()
    assert alarm is not None
    assert (alarm.step, alarm.age_seconds, alarm.waiting_step) == (10, 296.0, 20)
    assert freshness.sentence == "last published step 10, 296 s ago"
    assert freshness.late() is None
    clock.now += 210
    assert freshness.late() is not None
    freshness.published(20)
    assert freshness.sentence == ""
    assert freshness.late() is None


def test_what_took_long_before_may_take_long_again() -> None:
    clock = Clock()
    freshness = Freshness(clock)
    saved_every(freshness, clock, 10, 1)
    clock.now += 400
    assert freshness.late() is not None
    freshness.published(1)
    saved_every(freshness, clock, 10, 2)
    clock.now += 700
    assert freshness.late() is None


def test_short_intervals_are_no_reason_for_an_alarm_within_a_minute() -> None:
    clock = Clock()
    freshness = Freshness(clock)
    saved_every(freshness, clock, 0.1, 1, 2, 3)
    clock.now += 59
    assert freshness.late() is None
    clock.now += 2
    assert freshness.late() is not None


def test_saves_that_newer_ones_replaced_are_counted_and_a_published_one_covers_the_older() -> None:
    clock = Clock()
    freshness = Freshness(clock)
    freshness.begin(5)
    saved_every(freshness, clock, 10, 6, 7, 8)
    freshness.superseded(6)
    freshness.superseded(7)
    assert freshness.unpublished_seconds == 20
    assert freshness.failed("no").superseded == 2
    assert freshness.step == 5
    assert freshness.published(8) == 2
    assert freshness.unpublished_seconds == 0
    assert freshness.published(9) == 0
