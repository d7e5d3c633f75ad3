"""Steps that are not finite: masked on the device, read by the host late, and judged by policy."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

import torch

from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.runs.events.events import Step
    from sm_llm.spec.training import NotFiniteSpec
    from sm_llm.worker.device import Device


class RollBack(Exception):
    """All processes go back to the newest checkpoint, together."""


def poisoned(loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """``factor``, the gradient to begin the backward pass of ``loss`` with; NaN if the loss is not finite.

    So the norm of the gradient, which all processes share, also shows a loss on one of them. (An infinite loss can
    have finite gradients.)
    """
    # 0 times infinity or NaN is NaN; anything else leaves the factor. No branch, so the host does not wait.
    return (loss.detach() * 0 + factor).to(loss.dtype)


def not_finite(norm: torch.Tensor) -> torch.Tensor:
    """1 (fp32, on the device of ``norm``) if it is NaN or infinite, else 0. The host does not wait."""
    return torch.isfinite(norm).logical_not().to(torch.float32)


NOT_FINITE = 1.0
NO_TARGETS = 2.0
"""Flags of a step whose update is not applied."""


def flag_of(norm: torch.Tensor, targets: torch.Tensor | int) -> torch.Tensor:
    """0 (fp32, on the device of ``norm``) for a step to apply, else why not: ``NOT_FINITE`` or ``NO_TARGETS``.

    A step without ``targets`` has no label that counts in its whole global batch. The host does not wait.
    """
    if isinstance(targets, int):
        return not_finite(norm) if targets else torch.full_like(norm, NO_TARGETS, dtype=torch.float32)
    return torch.where(targets == 0, NO_TARGETS, not_finite(norm))


class NonFiniteWatch:
    """Reads the flags of all steps, in order, a fixed number of steps late: all processes learn at the same step.

    That number is the device's own: on a CPU a flag is there when the step is, and is read at once.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending: deque[tuple[int, Callable[[], float]]] = deque()
        self._without_targets: list[int] = []

    def note(self, step: int, flag: torch.Tensor) -> None:
        """Begin to read the flag of ``step``. ``bad_steps`` comes before the next one."""
        self._pending.append((step, self._device.read_later(flag)))

    def bad_steps(self, *, settle: bool) -> list[int]:
        """The steps now known not to have been finite; ``settle`` waits for the device to know about all."""
        bad = []
        while self._pending and (settle or len(self._pending) > self._device.lag_steps):
            # In order, and never early: a process that read ahead of the others would act alone.
            step, read = self._pending.popleft()
            kind = read()
            if kind == NO_TARGETS:
                self._without_targets.append(step)
            elif kind:
                bad.append(step)
        return bad

    def without_targets(self) -> list[int]:
        """Steps without a label to learn from, of those that ``bad_steps`` has read since the last call."""
        found, self._without_targets = self._without_targets, []
        return found


class Action(Enum):
    """What follows from steps that were not finite."""

    CONTINUE = "continue"
    GO_BACK = "go back"
    FAIL = "fail"


class _Row:
    """How many steps have followed one another up to the last one that was counted."""

    def __init__(self) -> None:
        self._length = 0
        self._last: int | None = None

    def count(self, step: int) -> int:
        """The length of the row that ``step`` ends; steps come in ascending order, or again after going back."""
        self._length = self._length + 1 if step - 1 == self._last else 1
        self._last = step
        return self._length


class NonFinitePolicy:
    """Applies ``task.not_finite``. Every process judges the same steps, so every process comes to the same end."""

    def __init__(self, spec: NotFiniteSpec) -> None:
        self._spec = spec
        self._bad = _Row()
        self._went_back = 0
        self._repeated: set[int] = set()
        self._empty = 0
        self._without_labels = _Row()
        # The message about the last judgement.
        self.message = ""

    def judge_empty(self, steps: Sequence[int]) -> None:
        """``steps`` had no label to learn from: count them, or raise ``DataError`` if the policy is to stop."""
        self._empty += len(steps)
        listed = ", ".join(map(str, steps))
        self.message = f"step {listed}: the global batch has no label to learn from"
        if self._spec.policy == "stop":
            raise DataError(self.message)
        # One report may hold steps that lie apart.
        longest = max(self._without_labels.count(step) for step in steps)
        if longest >= self._spec.limit:
            raise DataError(f"{self.message}; {longest} in a row, which is task.not_finite.limit")
        self.message += f"; skipped, {self._empty} so far"

    def judge(self, bad: Sequence[int], known: Sequence[Step] = ()) -> Action:
        """What to do about the ``bad`` steps, ascending and not empty; ``known`` may hold their numbers."""
        first = bad[0]
        values = next((f" (loss {it.loss}, gradient norm {it.grad_norm})" for it in known if it.step == first), "")
        self.message = f"step {first}: the loss or a gradient is not finite{values}, its update was not applied"
        if self._spec.policy == "stop":
            return self._fail("lower the learning rate, check the data, or see task.not_finite.policy")
        # A step that is not finite again after going back never will be: it has the same data and begins from the same
        # state. It is skipped then.
        if self._spec.policy == "rollback" and not self._repeated.issuperset(bad):
            return self._go_back(bad)
        for step in bad:
            if (length := self._bad.count(step)) >= self._spec.limit:
                return self._fail(f"{length} in a row, which is task.not_finite.limit")
        self.message += f"; skipped: {', '.join(map(str, bad))}"
        return Action.CONTINUE

    def _go_back(self, bad: Sequence[int]) -> Action:
        self._repeated.update(bad)
        self._went_back += 1
        if self._went_back > self._spec.limit:
            return self._fail(f"went back {self._spec.limit} times already, as often as task.not_finite.limit allows")
        self.message += "; going back to the newest checkpoint"
        return Action.GO_BACK

    def _fail(self, why: str) -> Action:
        self.message += f": {why}. Checkpoints hold nothing of it"
        return Action.FAIL
