"""Any history of saves, faults, kills, races and collections against a model of what must remain."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sm_llm.errors import StorageError
from sm_llm.storage.publication.publish import collect_garbage, fetch, find_newest, list_checkpoints, restore, verify
from sm_llm.storage.transfer import CopyTransfer
from tests.fixtures.sampling import number

KEEP = 2
OPERATION = st.integers(0, 40)
MODE = st.sampled_from(["before", "torn", "after", "refused", "lost"])


def machine(make_bench: Any, faulty: Any, killed: Any, contents: Any) -> type[RuleBasedStateMachine]:
    class History(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.folder = Path(tempfile.mkdtemp())
            for name in ("run", "scratch"):
                (self.folder / name).mkdir()
            self.bench = make_bench(self.folder / "run", self.folder / "scratch")
            self.step = 0
            self.acknowledged = 0
            self.possible: set[int] = set()

        def teardown(self) -> None:
            shutil.rmtree(self.folder)

        def _save(self, store: Any, run_id: str | None = None) -> Any:
            return self.bench.publish(self.step, store=store, run_id=run_id)

        @rule(gap=st.sampled_from([0, 1, 9, 90]), at=OPERATION, mode=MODE)
        def save(self, gap: int, at: int, mode: str) -> None:
            self.step += gap
            self.possible.add(self.step)
            try:
                won = self._save(faulty(self.bench.store, at, mode)).won
            except (StorageError, killed):
                return
            assert won or self.step <= max(self.acknowledged, *self.possible)
            self.acknowledged = max(self.acknowledged, self.step if won else 0)

        @rule(gap=st.integers(1, 5))
        def save_undisturbed(self, gap: int) -> None:
            self.step += gap
            self.possible.add(self.step)
            assert self._save(self.bench.store).won
            self.acknowledged = self.step

        @rule(gap=st.integers(1, 5))
        def race(self, gap: int) -> None:
            self.step += gap
            self.possible.add(self.step)
            outcomes = [self._save(self.bench.store).won for _ in range(2)]
            assert outcomes == [True, False]
            self.acknowledged = self.step

        @rule(ahead=st.integers(1, 50))
        def another_run_saves(self, ahead: int) -> None:
            self.bench.publish(100_000 + self.step + ahead, run_id="another-run")

        @rule(at=OPERATION, mode=MODE, age=st.sampled_from([0.0, 1e10]))
        def collect(self, at: int, mode: str, age: float) -> None:
            before = self._valid()
            store = faulty(self.bench.store, at, mode)
            with contextlib.suppress(StorageError, killed):
                collect_garbage(store, run_id=self.bench.run_id, keep_last=KEEP, clock=lambda: age)
            assert self._valid()[-KEEP:] == before[-KEEP:]

        @rule(at=OPERATION, mode=MODE)
        def restore(self, at: int, mode: str) -> None:
            target, store = self.folder / "restored", faulty(self.bench.store, at, mode)
            bring = partial(fetch, store, transfer=CopyTransfer(workers=1))
            reported = {"run_id": self.bench.run_id, "leader": True, "fetches": True, "gather": lambda it: [it]}
            try:
                restored = restore(store, target, bring=bring, **reported)
            except (StorageError, killed):
                return
            if restored is None:
                assert self.acknowledged == 0
                return
            step = restored.commit.step
            assert step in self.possible
            assert step >= self.acknowledged
            assert {it: (restored.folder / it).read_bytes() for it in contents(step)} == contents(step)

        def _valid(self) -> list[int]:
            return [it.step for it in list_checkpoints(self.bench.store, run_id=self.bench.run_id) if it.valid]

        @invariant()
        def the_newest_is_whole_and_nothing_acknowledged_is_lost(self) -> None:
            found = find_newest(self.bench.store, run_id=self.bench.run_id)
            assert found.rejected == ()
            if found.commit is None:
                assert self.acknowledged == 0
                return
            assert found.commit.step in self.possible
            assert found.commit.step >= self.acknowledged
            assert verify(self.bench.store, found.commit, deep=True) == []

    return History


def test_no_history_loses_or_invents_a_checkpoint(bench: Any, faulty: Any, killed: Any, contents: Any) -> None:
    run_state_machine_as_test(
        machine(type(bench), faulty, killed, contents),
        settings=settings(
            max_examples=8,
            stateful_step_count=10,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.integration
def test_no_long_history_loses_or_invents_a_checkpoint(bench: Any, faulty: Any, killed: Any, contents: Any) -> None:
    run_state_machine_as_test(
        machine(type(bench), faulty, killed, contents),
        settings=settings(
            max_examples=number(15, whole=60),
            stateful_step_count=20,
            suppress_health_check=list(HealthCheck),
        ),
    )
