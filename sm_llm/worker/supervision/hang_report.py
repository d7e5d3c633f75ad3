"""After an alarm: collects the stacks of all processes that can answer and names those that cannot, or are behind."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.failure import Cause, Failure
from sm_llm.runs.events.events import EventWriter
from sm_llm.runs.events.failures import StacksCollected, Stalled

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.runtime.key_value_store import KeyValueStore

ANSWER_SECONDS = 3.0
"""How long the report waits for answers."""
_STATES = {"T": "is stopped (SIGSTOP)", "t": "is held by a debugger", "D": "waits for a disk or network file system"}


@dataclass(frozen=True)
class RankReport:
    """Where one process is: steps done, what it is doing, and the stacks of its threads."""

    rank: int
    step: int
    phase: str
    text: str


class HangReport:
    """One process's part in it. The lowest rank that answers writes the events and decides the outcome."""

    def __init__(
        self,
        context: WorkerContext,
        kv_store: KeyValueStore | None,
        alarm: dict[str, Any],
        own: RankReport,
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._kv_store = kv_store
        self._alarm = alarm
        self._own = own
        self._clock = clock
        self._began = clock()

    def answer(self) -> None:
        """Put this process's answer in the store."""
        if self._kv_store is not None:
            self._kv_store.put(f"answer/{self._own.rank}", json.dumps(asdict(self._own)))

    def outcome(self) -> Failure | None:
        """The failure to end the job with; None while answers may still come, and for all ranks but the lowest.

        Should the lowest end before it has reported, the next one takes its place.
        """
        waited = self._clock() - self._began
        if waited < ANSWER_SECONDS:
            return None
        answers = self._answers()
        turn = [answer.rank for answer in answers].index(self._own.rank)
        # Ranks take their turns one waiting time apart: if the lowest has reported, the job is over before the next
        # one's turn.
        if waited < ANSWER_SECONDS * (1 + turn):
            return None
        return self._judge(answers)

    def _answers(self) -> list[RankReport]:
        if self._kv_store is None:
            return [self._own]
        texts = [self._kv_store.get(f"answer/{rank}") for rank in range(self._context.process.world_size)]
        return [RankReport(**json.loads(text)) for text in texts if text is not None]

    def _judge(self, answers: list[RankReport]) -> Failure:
        process = self._context.process
        silent = sorted(set(range(process.world_size)) - {answer.rank for answer in answers})
        # While a rank is silent, those that wait for it are behind through no fault of their own.
        behind = [] if silent else _behind(answers)
        guilty = next(iter(silent or behind), None)
        message = self._sentence(answers, silent, behind)
        self._report(answers, Stalled(self._alarm["seconds"], self._alarm["median"], silent, behind, message))
        stack = next((answer.text for answer in answers if answer.rank == guilty), self._own.text)
        step = min(answer.step for answer in answers)
        return Failure(Cause.STALLED, message, guilty, None, socket.gethostname(), step, stack)

    def _sentence(self, answers: list[RankReport], silent: list[int], behind: list[int]) -> str:
        step, seconds = max(answer.step for answer in answers), self._alarm["seconds"]
        if silent:
            named = "; ".join(self._fate(rank) for rank in silent)
            return f"stalled after step {step}: {named} (no sign of life for {seconds:.0f} s)"
        usual = self._alarm["median"]
        usually = "" if usual is None else f", a step takes {usual:.2f} s"
        where = {answer.rank: answer.phase for answer in answers}
        if not behind:
            return f"stalled after step {step}: no step for {seconds:.0f} s{usually}; no rank is behind the others"
        named = ", ".join(f"rank {rank} ({where[rank]})" for rank in behind)
        return f"stalled after step {step}: no step for {seconds:.0f} s{usually}; behind the others: {named}"

    def _fate(self, rank: int) -> str:
        """What a rank that gives no answer is doing, as far as its machine's kernel shows this process."""
        reported = self._kv_store.get(f"process/{rank}") if self._kv_store is not None else None
        if reported is None:
            return f"rank {rank} has never answered"
        host, pid = json.loads(reported)
        if host != socket.gethostname():
            return f"rank {rank} does not answer (process {pid} on {host})"
        try:
            # Behind the last parenthesis: the program's name, in parentheses, may hold blanks and parentheses itself
            # (proc(5)).
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return f"rank {rank} does not answer: its process {pid} is gone"
        return f"rank {rank} does not answer: its process {pid} {_STATES.get(state, f'is in state {state}')}"

    def _report(self, answers: list[RankReport], stalled: Stalled) -> None:
        attempt = self._context.job.attempt
        try:
            log = EventWriter(self._context.run.event_file(attempt, f"rank{self._own.rank}-watchdog"), attempt)
            log.write(stalled)
            for answer in answers:
                log.write(StacksCollected(answer.rank, answer.step, answer.phase, answer.text))
            log.close()
        except OSError:  # the outcome still goes to output/failure and stderr
            return


def _behind(answers: list[RankReport]) -> list[int]:
    """Ranks that have come less far: fewer steps, or in the same step still waiting for data or doing other things."""
    steps = min(answer.step for answer in answers)
    last = [answer for answer in answers if answer.step == steps]
    if len(last) == len(answers):
        last = [answer for answer in answers if answer.phase != "step"]
    # If all are equally far, none of them explains the stall.
    return [answer.rank for answer in last] if len(last) < len(answers) else []
