"""Small jobs that prepare or check a cluster: submitted like any other, waited for, and read by their log."""

from __future__ import annotations

import time
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.backends.slurm.batch_script import option_lines, quoted
from sm_llm.launcher.backends.slurm.states import native_state
from sm_llm.launcher.backends.slurm.transport import NoAnswer
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.launcher.backends.slurm.batch_script import Option
    from sm_llm.launcher.backends.slurm.cluster import Cluster
    from sm_llm.spec.backends.slurm import SlurmOptions

POLL_SECONDS = 1.0
KEPT_DAYS = 7
"""How long the folder of a job that failed is kept. No such job may take as long."""
_LOG = "job.log"


@dataclass(frozen=True)
class SetupJob:
    """A job of fixed shell text; every value in it is an argument."""

    name: str
    body: str
    arguments: Sequence[str]
    nodes: int = 1
    minutes: int = 10
    alone: bool = False
    """Whether it waits until no other job of this user and name is left."""

    def text(self, options: SlurmOptions, folder: str) -> str:
        """The script. Raises ``ValueError`` for a value that a line of options cannot hold."""
        chosen = {name: getattr(options, name) for name in ("partition", "account", "qos", "reservation", "constraint")}
        lines: list[Option] = [
            ("job-name", self.name),
            ("nodes", str(self.nodes)),
            ("ntasks-per-node", "1"),
            *((name, value) for name, value in chosen.items() if value is not None),
            ("time", str(self.minutes)),
            ("no-requeue", None),
            *([("dependency", "singleton")] if self.alone else []),
            ("output", f"{folder}/{_LOG}".replace("%", "%%")),
        ]
        words = " ".join(map(quoted, self.arguments))
        return f"#!/bin/bash\n{option_lines(lines)}\nset -u\numask 077\nset -- {words}\n{self.body.lstrip()}"


@dataclass(frozen=True)
class JobEnd:
    """How such a job ended, and what it printed."""

    ok: bool
    log: str

    @property
    def last_words(self) -> str:
        """The end of what it printed."""
        return " / ".join(self.log.strip().splitlines()[-3:]) or "it printed nothing"


def run_job(
    job: SetupJob, options: SlurmOptions, cluster: Cluster, tell: Callable[[str], None], *,
    wait_seconds: float, sleep: Callable[[float], None] = time.sleep,
) -> JobEnd:  # fmt: skip
    """Submit a job and wait for its end.

    Its folder goes once it has ended well, and with it those that others left a week ago. One that has not started
    after ``wait_seconds`` is cancelled: ``SubmitError`` names what it waits for. Ctrl-C cancels it, too.
    """
    # A folder of its own: several people may check the same cluster at once.
    above = f"{options.shared_folder}/setup"
    folder = f"{above}/{job.name}-{token_hex(4)}"
    script = f"{folder}/job.sh"
    cluster.put(script, job.text(options, folder).encode())
    job_id = cluster.submit(folder, script)
    tell(f"job {job_id} ({job.name}) was submitted through {cluster.transport.where}; its log is {folder}/{_LOG}")
    try:
        ended = _await(job_id, cluster, wait_seconds, sleep)
    except BaseException:
        cluster.cancel(job_id)
        raise
    end = JobEnd(ended, cluster.logs(folder, {}).get(_LOG, b"").decode("utf-8", "replace"))
    # The log of a job that failed stays for whoever looks for the reason.
    cluster.clean(above, folder if end.ok else "", KEPT_DAYS)
    return end


def _await(job_id: str, cluster: Cluster, wait_seconds: float, sleep: Callable[[float], None]) -> bool:
    started = time.monotonic()
    while True:
        try:
            # squeue forgets jobs after MinJobAge, which may be shorter than a wait on a busy machine.
            row = cluster.job(job_id) or cluster.accounted(job_id)
        except NoAnswer:  # nothing has happened to the job; a controller that is busy answers later
            sleep(POLL_SECONDS)
            continue
        native = native_state(row) if row is not None else None
        if native is None:
            raise SubmitError(f"Slurm no longer knows job {job_id}")
        if native.state.is_final:
            return native.state is RunState.COMPLETED
        if native.state is RunState.PENDING and time.monotonic() - started > wait_seconds:
            raise SubmitError(f"job {job_id} has not started within {wait_seconds:.0f} s: it is {native.detail}")
        sleep(POLL_SECONDS)
