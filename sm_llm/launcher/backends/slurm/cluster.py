"""A cluster's own commands: submit, list, cancel, and files on its shared file system."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hosts import numeric
from sm_llm.errors import SubmitError
from sm_llm.launcher.backends.slurm.nodes import FIELDS, node_of
from sm_llm.launcher.backends.slurm.shell import CLEAN, PUT, READ_ENDS, READ_LOGS, SUBMIT, UNPACK
from sm_llm.launcher.backends.slurm.states import JobRow, native_state
from sm_llm.launcher.backends.slurm.transport import NoAnswer, Transport, transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sm_llm.launcher.backend import ClusterNode

_FIELDS = ("JobID", "State", "Reason", "RestartCnt", "StartTime", "NodeList", "Comment", "WorkDir")
# In no name of a node, and in no comment of ours.
_SEPARATOR = "\x1f"
# Several calls for one answer (a table of runs, the state of a workflow) share one listing.
_FRESH_SECONDS = 2.0
# Slurm's own words; its commands have one exit code for all errors.
_INVALID = "Invalid job id"
_JOB = re.compile(r"^([0-9]+)(?:;\S+)?$", re.MULTILINE)
_NO_ACCOUNTING = "accounting storage is disabled"
# Of one log in one answer; the rest comes with the next.
_MOST_LOG_BYTES = 4 << 20

# Only these names are copied from the shared folder.
_LOG = re.compile(r"job\.log|node-[0-9]{1,6}\.log")
_END = re.compile(r"(?P<kind>outcome|failure|stopped)-(?P<restart>[0-9]{1,9})(?:-(?P<node>[0-9]{1,6}))?(?:\.json)?")


def dependency(after: Sequence[str]) -> str:
    """The value of ``sbatch --dependency`` for a job that waits for others; empty for none."""
    return f"afterok:{':'.join(after)}" if after else ""


@dataclass(frozen=True)
class Ends:
    """What the newest start of an attempt left in its folder."""

    outcome: Mapping[str, Any] | None = None
    """Exit code of the script and time; None where it did not come to its end."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Node -> its failure, in words."""
    stopped: bool = False
    """Whether the processes stopped in order."""
    last_line: str = ""
    """The last that Slurm or the script printed."""

    @property
    def last_words(self) -> str:
        """Why the job failed, where nothing else states it."""
        code = self.outcome.get("exit_code") if self.outcome else None
        words = ": ".join(it for it in (f"exit code {code}" if code else "", self.last_line) if it)
        if words or self.outcome is not None:
            return words or "the job failed"
        # Not even Slurm's own log, which is the first thing that its start on a node writes.
        return (
            "the job failed and left nothing in its folder: see that its nodes see backend.shared_folder at the same "
            "path, and that there is space left (sm-llm doctor --backend slurm)"
        )


@dataclass
class Cluster:
    """One cluster, through its login node."""

    transport: Transport
    clock: Callable[[], float] = time.monotonic
    _rows: dict[str, JobRow] = field(default_factory=dict)
    _read_at: float = float("-inf")

    @cached_property
    def name(self) -> str:
        """As the cluster calls itself. Raises ``SubmitError``."""
        found = self._setting("ClusterName")
        if found is None:
            raise SubmitError(f"scontrol on {self.transport.where} does not name its cluster")
        return found

    @property
    def resource_types(self) -> str | None:
        """Names of the generic resources (GRES) that are configured; None without any. Raises ``NoAnswer``."""
        return self._setting("GresTypes")

    def _setting(self, name: str) -> str | None:
        found = re.search(rf"^{name}\s*=\s*(\S+)", self._configuration, re.MULTILINE)
        return None if found is None or found[1] == "(null)" else found[1]

    @cached_property
    def _configuration(self) -> str:
        return self._ask("scontrol", "show", "config")

    def check_commands(self) -> None:
        """Raise ``SubmitError`` where there is no sbatch."""
        answer = self.transport.run(["sbatch", "--version"])
        if answer.code:
            raise SubmitError(
                f"{self.transport.where} has no sbatch that runs: {answer.words}. Work on a login node of the cluster, "
                "or name one: backend.ssh_host=HOST"
            )

    def submit(self, folder: str, script: str, after: Sequence[str] = ()) -> str:
        """Submit ``script``, which works in ``folder``, to start once the jobs ``after`` have ended without an error.

        Returns the job's id. Raises ``SubmitError``.
        """
        waits = dependency(after)
        answer = self.transport.run(["sh", "-c", SUBMIT, "sh", folder, script, waits])
        if answer.code:
            raise SubmitError(f"sbatch on {self.transport.where} refused the job: {answer.words}")
        # A site's own sbatch may print more. "7;NAME" names the cluster as well.
        found = _JOB.findall(answer.text)
        if not found:
            raise NoAnswer(f"sbatch on {self.transport.where} printed no number of a job: {answer.words}")
        return str(found[-1])

    def job(self, job_id: str) -> JobRow | None:
        """The job as ``squeue`` lists it, of all of this user's jobs at once; None once Slurm has forgotten it.

        Raises ``NoAnswer`` where the controller does not answer: that states nothing of the job.
        """
        # One listing for all jobs of this user spares the controller a call for each run.
        if self.clock() - self._read_at > _FRESH_SECONDS:
            self._rows = {row.job_id: row for row in self._squeue("--me")}
            self._read_at = self.clock()
        if job_id not in self._rows:  # another user's, or forgotten
            self._rows |= {row.job_id: row for row in self._squeue("--jobs", job_id)}
        return self._rows.get(job_id)

    def job_in(self, folder: str) -> JobRow | None:
        """This user's job that works in ``folder``, as ``squeue`` lists it now."""
        return next((row for row in self._squeue("--me") if row.folder == folder), None)

    def _squeue(self, *which: str) -> list[JobRow]:
        wanted = ",".join(f"{name}:{_SEPARATOR}" for name in _FIELDS)
        # Without --states=all squeue leaves out jobs that have just ended.
        answer = self.transport.run(["squeue", "--noheader", "--states=all", *which, "--Format", wanted])
        if answer.code:
            # A job that Slurm has forgotten is an error of squeue.
            if _INVALID in answer.error:
                return []
            raise NoAnswer(f"squeue on {self.transport.where}: {answer.words}")
        return [_row(line) for line in answer.text.splitlines() if line.count(_SEPARATOR) >= len(_FIELDS)]

    def nodes(self, partition: str | None = None) -> list[ClusterNode]:
        """The nodes that jobs may run on, by name. Raises ``NoAnswer``."""
        wanted = ",".join(f"{name}:{_SEPARATOR}" for name in FIELDS)
        chosen = [f"--partition={partition}"] if partition is not None else []
        answer = self.transport.run(["sinfo", "--noheader", "--Node", *chosen, "--Format", wanted])
        if answer.code:
            raise NoAnswer(f"sinfo on {self.transport.where}: {answer.words}")
        lines = [line.split(_SEPARATOR)[: len(FIELDS)] for line in answer.text.splitlines()]
        found = [node_of(line) for line in lines if len(line) == len(FIELDS)]
        # A node is listed once for each of its partitions.
        return sorted({it.name: it for it in found}.values(), key=lambda it: numeric(it.name))

    def expand(self, listed: str) -> list[str]:
        """The nodes of Slurm's compressed list, in the order of their ranks. Raises ``SubmitError``."""
        # Sorted, because ranks are given in this order, whatever order Slurm lists the nodes in.
        return sorted(self._ask("scontrol", "show", "hostnames", listed).split(), key=numeric)

    def accounted(self, job_id: str) -> JobRow | None:
        """How the job ended by the accounting database; None where that is unknown or has no end of it."""
        # -X: without steps. -D: every start of a requeued job. -P and -n: bars between fields, no header.
        argv = ["sacct", "-X", "-D", "-P", "-n", "-j", job_id, "-o", "JobID,State,Submit,NodeList,WorkDir"]
        answer = self.transport.run(argv)
        if answer.code:
            if _NO_ACCOUNTING in answer.error:
                return None
            raise NoAnswer(f"sacct on {self.transport.where}: {answer.words}")
        # A path may hold bars as well.
        lines = [line.split("|", 4) for line in answer.text.splitlines() if line.startswith(f"{job_id}|")]
        rows = sorted((it for it in lines if len(it) == 5), key=lambda it: it[2])  # by the time of its submission
        newest = JobRow(rows[-1][0], rows[-1][1], nodes=rows[-1][3], folder=rows[-1][4]) if rows else None
        # A job whose end never reached the database stays "RUNNING" there: Slurm calls it a runaway job.
        return newest if newest is not None and native_state(newest, requeues=False).state.is_final else None

    def has_accounting(self) -> bool:
        """Whether ``sacct`` has a database. Raises ``NoAnswer``."""
        # Any job: only whether there is a database is asked.
        answer = self.transport.run(["sacct", "-X", "-n", "-j", "1"])
        if answer.code and _NO_ACCOUNTING not in answer.error:
            raise NoAnswer(f"sacct on {self.transport.where}: {answer.words}")
        return answer.code == 0

    def cancel(self, job_id: str) -> None:
        """Cancel a job; one that has ended is left alone. Raises ``SubmitError``."""
        answer = self.transport.run(["scancel", job_id])
        if answer.code and _INVALID not in answer.error:
            raise SubmitError(f"scancel {job_id} on {self.transport.where}: {answer.words}")
        # The listing may still show the job as running.
        self._read_at = float("-inf")

    def read(self, path: str) -> str:
        """A small file on the shared file system; empty where there is none. Raises ``NoAnswer``."""
        answer = self.transport.run(["cat", path])
        return "" if answer.code else answer.output.decode("utf-8", "replace")

    def put(self, path: str, body: bytes) -> None:
        """Write a file on the shared file system, atomically, readable to this user alone. Raises ``SubmitError``."""
        self._shell(f"write {path}", PUT, path, stdin=body)

    def unpack(self, archive: bytes, digest: str, folder: str) -> None:
        """Unpack a ``tar.gz`` whose tar has the SHA-256 ``digest`` into ``folder``, read-only; once for all jobs."""
        # Asked first, so that the archive of a bundle that is there is not sent again.
        if self.transport.run(["test", "-d", folder]).code:
            self._shell(f"unpack the code bundle into {folder}", UNPACK, folder, digest, stdin=archive)

    def logs(self, folder: str, offsets: Mapping[str, int]) -> dict[str, bytes]:
        """What the attempt's logs hold beyond ``offsets``, by file name."""
        known = [f"{name}={offset}" for name, offset in offsets.items()]
        answer = self.transport.run(["sh", "-c", READ_LOGS, "sh", folder, str(_MOST_LOG_BYTES), *known])
        return {name: body for name, body in _blocks(answer.output) if _LOG.fullmatch(name)}

    def ends(self, folder: str) -> Ends:
        """What the newest start of the attempt in ``folder`` left there about its end."""
        answer = self.transport.run(["sh", "-c", READ_ENDS, "sh", folder])
        files = list(_blocks(answer.output))
        found = [(match, body) for name, body in files if (match := _END.fullmatch(name))]
        # A requeued job works in the same folder: only what its newest start has left counts.
        newest = max((int(match["restart"]) for match, _ in found), default=0)
        own = [(match, body) for match, body in found if int(match["restart"]) == newest]
        return Ends(
            next((_outcome(body) for match, body in own if match["kind"] == "outcome"), None),
            {int(it["node"]): body.decode("utf-8", "replace").strip() for it, body in own if it["node"] is not None},
            any(match["kind"] == "stopped" for match, _ in own),
            next((body.decode("utf-8", "replace").strip() for name, body in files if name == "job.log"), ""),
        )

    def clean(self, folder: str, done: str, days: int) -> None:
        """Remove ``done``, if it is not empty, and this user's folders in ``folder`` that nobody changed for ``days``.

        What cannot be removed stays: it stands in nobody's way.
        """
        with suppress(NoAnswer):
            self.transport.run(["sh", "-c", CLEAN, "sh", folder, done, str(days)])

    def has_option(self, option: str) -> bool:
        """Whether srun has a long option, which a plugin may add."""
        return f"--{option}" in self._ask("srun", "--help")

    def has_folder(self, path: str) -> bool:
        """Whether the login node sees a folder."""
        return self.transport.run(["test", "-d", path]).code == 0

    def _ask(self, *argv: str) -> str:
        answer = self.transport.run(argv)
        if answer.code:
            raise NoAnswer(f"{argv[0]} on {self.transport.where}: {answer.words}")
        return answer.text

    def _shell(self, action: str, script: str, *arguments: str, stdin: bytes) -> None:
        answer = self.transport.run(["sh", "-c", script, "sh", *arguments], stdin=stdin)
        if answer.code:
            raise SubmitError(f"cannot {action} on {self.transport.where}: {answer.words}")


def _row(line: str) -> JobRow:
    job_id, state, reason, restarts, *texts = line.split(_SEPARATOR)[: len(_FIELDS)]
    return JobRow(job_id, state, reason, int(restarts) if restarts.isdigit() else 0, *texts)


def _blocks(output: bytes) -> Iterable[tuple[str, bytes]]:
    """Files as the scripts above print them: name and size, a newline, then so many bytes. A cut answer ends them."""
    position = 0
    while (end := output.find(b"\n", position)) >= 0:
        name, _, count = output[position:end].decode("utf-8", "replace").rpartition(" ")
        if not count.isdigit():
            return
        position = end + 1 + int(count)
        yield name, output[end + 1 : position]


def _outcome(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    is_whole = isinstance(found, dict) and type(found.get("exit_code")) is int
    return found if is_whole else None


@cache
def cluster(ssh_host: str | None) -> Cluster:
    """The cluster behind a login node, made once: its connection and its list of jobs serve every run."""
    return Cluster(transport(ssh_host))
