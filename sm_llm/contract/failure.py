"""Why a job failed: one record for all processes, the closed list of causes, and how a cause is recognised."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum

from sm_llm.errors import CheckpointError, DataError, SmLlmError, StorageError

LONGEST_MESSAGE = 600
"""Characters of a one-line cause; SageMaker shows the first 1,024 of ``output/failure``."""
_TRACEBACK = "Traceback (most recent call last)"
# What the training toolkit writes in front of a traceback; it holds no information.
_FRAMES = ("Framework Error:", "ExecuteUserScriptError:")
_RANK = re.compile(r"rank ([0-9]{1,9}): (.*)", re.DOTALL)
_ERROR_LINE = re.compile(
    r"(?:\[rank ?([0-9]{1,9})\]:?\s*)*([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*|$))"
)
# torchrun raises it for any failed process; the error of the process itself stands above it.
_OF_TORCHRUN = "ChildFailedError"


class Cause(StrEnum):
    """What a failure comes down to; the words are what people read."""

    DEVICE_MEMORY = "out of memory on the device"
    HOST_MEMORY = "out of memory on the host"
    DISK_FULL = "disk full"
    COLLECTIVE_TIMEOUT = "a collective operation timed out"
    NOT_FINITE = "the loss or a gradient is not finite"
    DATA = "data error"
    LIBRARY = "library mismatch"
    KILLED = "killed"
    STALLED = "stalled"
    LOST_PEER = "another process is gone"
    OTHER = "error"

    @property
    def is_consequence(self) -> bool:
        """Whether it only reports that something else, somewhere else, failed first."""
        return self is Cause.LOST_PEER


# In this order: the first pattern found decides. What each is the text of: torch's and CUDA's allocators; the host's
# allocators; errno 28 and 122; NCCL's and gloo's watchdogs; our loop; the dynamic linker and CUDA; gloo, NCCL and
# TCPStore about a closed connection.
_PATTERNS: tuple[tuple[Cause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(pattern, re.IGNORECASE))
    for cause, pattern in (
        # The last is torch's zip writer, which meets a short write before anybody sees errno 28.
        (Cause.DISK_FULL, r"No space left on device|Disk quota exceeded|disk full|inline_container.*unexpected pos"),
        (
            Cause.DEVICE_MEMORY,
            r"CUDA out of memory|OutOfMemoryError|CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC",
        ),
        (Cause.HOST_MEMORY, r"\bMemoryError\b|can't allocate memory|Cannot allocate memory|std::bad_alloc"),
        (
            Cause.COLLECTIVE_TIMEOUT,
            r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|wait timeout after|"
            r"ProcessGroupNCCL.*time(?:d )?out",
        ),
        (Cause.NOT_FINITE, r"\bnot finite\b|\bnon-finite\b|\bDetectedNaN\b"),
        (
            Cause.LIBRARY,
            r"\bImportError\b|\bModuleNotFoundError\b|undefined symbol|cannot open shared object file|"
            r"version `[^']+' not found|CUDA driver version is insufficient|no kernel image is available",
        ),
        (
            Cause.LOST_PEER,
            r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
            r"ncclRemoteError|remote process exited|NCCL communicator was aborted|"
            r"failed to recv, got 0 bytes|another process is gone",
        ),
    )
)  # fmt: skip


def cause_in(text: str) -> Cause:
    """The cause that the text of an error speaks of."""
    return next((cause for cause, pattern in _PATTERNS if pattern.search(text)), Cause.OTHER)


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception, from its type, its message and those it was raised from."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    # A chain of causes can lead back to itself.
    while current is not None and current not in seen:
        seen.append(current)
        current = current.__cause__ or current.__context__
    for link in seen:
        found = cause_in(f"{type(link).__name__}: {link}")
        if found is not Cause.OTHER:
            return found
    # Last: a disk that is full while rows are read is a full disk, and not an error of the data.
    return Cause.DATA if any(isinstance(link, DataError) for link in seen) else Cause.OTHER


@dataclass(frozen=True)
class Failure:
    """The failure of one process. ``message`` is one line; ``rank`` is None where nobody knows it."""

    cause: Cause
    message: str
    rank: int | None = None
    node: int | None = None
    host: str = ""
    step: int | None = None
    """The last step that the process had finished."""
    traceback: str = ""

    @property
    def headline(self) -> str:
        """One line for people: ``rank 1: out of memory on the device: …``."""
        rank = "" if self.rank is None else f"rank {self.rank}: "
        named = self.cause is Cause.OTHER or self.message.lower().startswith(self.cause.value)
        return f"{rank}{self.message if named else f'{self.cause.value}: {self.message}'}"

    def to_text(self) -> str:
        """The text of ``output/failure``: the headline, then the traceback."""
        return f"{self.headline}\n" + (f"\n{self.traceback.rstrip()}\n" if self.traceback else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Raises ``ValueError`` or ``TypeError`` for anything else than ``to_json`` wrote."""
        value = json.loads(text)
        return cls(**{**value, "cause": Cause(value["cause"])})

    @classmethod
    def from_text(cls, text: str) -> Failure:
        """Read ``output/failure``, ours or a script's own: its reason is kept as it stands, on one line."""
        # The form of ``headline``, by which a node's failure keeps its rank when another process reads the file.
        rank = _RANK.match(text)
        body = rank[2] if rank else text
        head, _, rest = body.partition("\n")
        # Ours, or one written alike: the reason stands above its traceback.
        if not head.startswith((_TRACEBACK, *_FRAMES)) and _TRACEBACK in rest:
            message = head.strip()
        # A bare traceback, or the training toolkit's: the exception is named at its end.
        elif _TRACEBACK in body:
            found = last_error_line(body.splitlines())
            message = "failed with a traceback" if found is None else found[0]
        else:
            message = one_line(body)
        named = next((cause for cause in Cause if message.lower().startswith(cause.value)), None)
        return cls(named or cause_in(message), one_line(message), int(rank[1]) if rank else None)


def line_in(text: str, cause: Cause) -> str:
    """The last line of an error's text that speaks of ``cause``; all of it, on one line, where none does."""
    return one_line(next((line for line in reversed(text.splitlines()) if cause_in(line) is cause), text))


def message_of(error: BaseException) -> str:
    """One line for an exception. Ours are complete; others need their type."""
    text = str(error)
    return one_line(text if isinstance(error, SmLlmError) and text else f"{type(error).__name__}: {text}")


def needs_traceback(error: BaseException) -> bool:
    """Whether a traceback would help: the errors of the user, the data and the platform explain themselves."""
    return not isinstance(error, SmLlmError) or isinstance(error, CheckpointError | StorageError)


def one_line(text: str) -> str:
    """``text`` on one line, cut at ``LONGEST_MESSAGE`` characters."""
    return " ".join(text.split())[:LONGEST_MESSAGE]


def last_error_line(lines: list[str]) -> tuple[str, int | None] | None:
    """The last line that names an exception, and the rank in front of it; torchrun's own summary does not count."""
    # From the end: of chained exceptions the last one printed is the one that ended the process.
    for line in reversed(lines):
        match = _ERROR_LINE.match(line)
        if match and _OF_TORCHRUN not in line:
            return match[2].strip(), None if match[1] is None else int(match[1])
    return None
