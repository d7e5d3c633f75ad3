"""State is copied to buffers that were made ahead, beside what only reads it, and before what changes it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from sm_llm.worker.checkpoint import staging as module
from sm_llm.worker.checkpoint.staging import Staging
from sm_llm.worker.device import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LateDevice(CpuDevice):
    """Copies when it is waited for, as a GPU's own stream does, or when changes are about to come."""

    def __init__(self) -> None:
        super().__init__()
        self.makers: set[str] = set()
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        self.makers.add(threading.current_thread().name)
        return super().host_buffer(tensor)

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        self._pairs = list(pairs)
        return self.after_copies

    def after_copies(self) -> None:
        pairs, self._pairs = self._pairs, []
        super().copy_out(pairs)


def test_buffers_are_made_ahead_by_other_threads_and_kept() -> None:
    device = LateDevice()
    staging, state = Staging(device), {"a": torch.ones(3), "b": torch.zeros(2)}
    staging.prepare(state)
    first, wait = staging.stage(state)
    wait()
    assert threading.current_thread().name not in device.makers
    second, wait = staging.stage(state)
    wait()
    assert [it.data_ptr() for it in first.values()] == [it.data_ptr() for it in second.values()]


def test_a_change_comes_after_the_copy() -> None:
    device = LateDevice()
    staging, state = Staging(device), {"a": torch.ones(3)}
    copied, wait = staging.stage(state)
    staging.hold()
    state["a"].fill_(7)
    wait()
    assert copied["a"].tolist() == [1, 1, 1]


def test_the_copy_is_complete_once_it_was_waited_for() -> None:
    staging = Staging(LateDevice())
    copied, wait = staging.stage({"a": torch.ones(3)})
    copied["a"].zero_()
    wait()
    assert copied["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("free", "copies"), [(48 * 2, 2), (48 * 2 - 2, 1)])
def test_sets_of_buffers_take_turns_where_half_of_the_memory_holds_them(
    free: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 bytes of state in each of two processes, once or twice."""
    monkeypatch.setattr(module, "available_memory", lambda: free * 2)
    staging, state = Staging(LateDevice(), processes=2, copies=2), {"a": torch.ones(4), "b": torch.zeros(2)}
    staging.prepare(state)
    assert staging.copies == copies
    addresses = []
    for number in range(4):
        state["a"].fill_(number)
        copied, wait = staging.stage(state)
        wait()
        assert copied["a"].tolist() == [number] * 4
        addresses.append(copied["a"].data_ptr())
    assert len(set(addresses)) == copies
    assert addresses[:2] == addresses[2:]
