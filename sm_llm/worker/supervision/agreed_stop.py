"""All processes stop after the same step: one flag, summed up on CPUs while the step runs, and one last decision."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig

from sm_llm.runs.events.failures import Stopped
from sm_llm.runs.stopped import StopRecord
from sm_llm.worker.runtime.stop import Stopping
from sm_llm.worker.transfer.agent_process import working_seconds

if TYPE_CHECKING:
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.runtime.collectives import ControlGroup

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds from torchrun's SIGTERM to its SIGKILL, where torchrun takes it (torch 2.13 and newer)."""
STOCK_SECONDS = 30.0
"""The same, in every other torchrun."""
# For what comes after a save: leaving the process group, and Python's own end.
_MARGIN_SECONDS = 2.0


def torchrun_seconds() -> float:
    """How long the torchrun above this process lets it live after SIGTERM; infinite without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return math.inf
    # Asked of the installed torchrun itself, not of a version number.
    is_configurable = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
    return float(os.environ.get(SHUTDOWN_VARIABLE, STOCK_SECONDS)) if is_configurable else STOCK_SECONDS


@dataclass(frozen=True)
class Decision:
    """What all processes do about a request: save a checkpoint, or report why not."""

    reason: str
    saves: bool
    detail: str = ""
    seconds: float | None = None
    """How long may be waited for publications; None: as long as it takes."""


class Stopper:
    """The flag is a collective that runs beside the step: opened before it and read after it.

    A request that arrives before a step begins stops the job after that step, a later one after the next. The device
    takes no part in it, and hosts wait at most for the slowest to begin the same step.
    """

    def __init__(self, context: WorkerContext, control: ControlGroup) -> None:
        self._context = context
        self._control = control
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None
        self.grace_seconds = min(context.job.spec.backend.stop_seconds, torchrun_seconds())
        context.agent.grace_seconds = self.grace_seconds
        context.agent.is_stopping = lambda: context.requests.reason is not None

    def announce(self) -> None:
        """Log it if torchrun leaves less time than the job asks for."""
        wanted = self._context.job.spec.backend.stop_seconds
        if self.grace_seconds < wanted:
            self._context.notice(
                f"this torchrun kills its processes {self.grace_seconds:.0f} s after SIGTERM, before the "
                f"{wanted:.0f} s of backend.stop_seconds: a checkpoint that takes longer is not begun then"
            )

    def open(self) -> None:
        """Before a step: put this process's flag in."""
        requests = self._context.requests
        if self._context.process.is_leader:
            # One process reads the file system; the flag brings the request to all others.
            requests.check_file(self._context.run.stop_file)
        self._flag.fill_(int(requests.reason is not None))
        if self._control.world_size > 1:
            # On gloo, in a thread of its own: it runs while the devices compute the step.
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._control.group, async_op=True)

    def is_asked(self) -> bool:
        """After a step: whether any process was asked before it began; the same answer everywhere."""
        if self._work is not None:
            # The same sum on all processes, so all of them stop after the same step.
            self._work.wait()
            self._work = None
        return bool(self._flag.item())

    def decide(self, expected_seconds: float | None) -> Decision:
        """Whether a save is begun: only if it is expected to fit what is left of the shortest grace time.

        ``expected_seconds`` is rank 0's experience with earlier saves. Without any, it is tried: a save that is cut
        short leaves the commit before it in force. A collective.
        """
        requests = self._context.requests
        # Clocks of different hosts are never compared: each process reports what is left of its own time.
        reported = self._control.gather((requests.reason, requests.seconds_left(self.grace_seconds), expected_seconds))
        # There is one: the flag was set by a process that had been asked, and a request is never withdrawn.
        reason = next(reason for reason, _, _ in reported if reason is not None)
        left = min((left for _, left, _ in reported if left is not None), default=math.inf) - _MARGIN_SECONDS
        expected = reported[0][2]
        seconds = None if left == math.inf else working_seconds(max(0.0, left))
        if expected is None or expected <= left:
            return Decision(reason, saves=True, seconds=seconds)
        took = f"a save takes about {expected:.1f} s and {max(0.0, left):.1f} s of the grace time are left"
        return Decision(reason, saves=False, detail=f"no checkpoint was begun, for {took}", seconds=seconds)

    def stopping(self, step: int, decision: Decision, newest: int | None) -> Stopping:
        """What ends the job on all processes, after ``step``; ``newest`` is rank 0's newest published step."""
        newest = self._control.broadcast(newest)
        record = StopRecord(reason=decision.reason, step=step, checkpoint=newest, detail=decision.detail)
        self._context.emit(Stopped(step, record.reason, record.checkpoint, record.detail))
        self._context.log(record.sentence)
        return Stopping(record)
