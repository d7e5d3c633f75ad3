"""The event log: one JSON object per line, the single source of metrics, plots, status and the training line.

Every event has ``kind``, ``time`` (seconds since the epoch) and ``attempt``. Floats are written so that they
read back bit for bit; the fields in ``EXACT``, and any float that is NaN or infinite (JSON knows neither), have a
twin ``<name>_hex`` (``float.hex``), from which readers restore them. A writer appends each line in one piece, so a
killed process leaves at most one partial last line, which readers skip.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping  # noqa: TC003 - read as a type by ``event_fields``
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

from sm_llm.owned import make_folders, opener
from sm_llm.runs.events.checkpoints import (
    CheckpointPublished,
    FinalPublished,
    NothingDone,
    ProfilePublished,
    PublicationLate,
)
from sm_llm.runs.events.event_fields import checked
from sm_llm.runs.events.failures import (
    CheckpointRestored,
    Failed,
    Recovered,
    StacksCollected,
    Stalled,
    StateVerified,
    Stopped,
)
from sm_llm.runs.run_paths import RunPaths
from sm_llm.storage.stored_names import report_once, report_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

# The numbers by which a continued training is compared with an unbroken one.
EXACT = ("loss", "validation_loss", "learning_rate", "grad_norm")
_TWIN = "_hex"
_FILE_NAME = re.compile(r"attempt-([0-9]+)-(.+)\.jsonl")
_TAIL_BYTES = 65_536
# Bytes of a line that is read as an event: stacks and samples are the longest, and far shorter.
_LONGEST_LINE = 16 << 20


@dataclass(frozen=True)
class AttemptStarted:
    """An attempt's processes are up. ``device`` is e.g. ``cpu`` or ``NVIDIA H100 80GB HBM3``."""

    world_size: int
    device: str
    total_steps: int | None
    versions: dict[str, str]
    kind: str = "attempt_started"


@dataclass(frozen=True)
class StartChosen:
    """Where training starts: ``source`` is ``scratch``, ``pretrained`` or ``checkpoint``; ``step`` already done."""

    source: str
    step: int
    uri: str | None = None
    digest: str | None = None
    kind: str = "start_chosen"


@dataclass(frozen=True)
class SettingsChosen:
    """Values of settings that are ``auto``, by their names below the task; ``is_kept``: an earlier attempt, or the run
    that this one continues, has chosen them. ``predicted_bytes`` is the peak of a GPU, by the card."""

    values: Mapping[str, Any]
    reason: str
    predicted_bytes: float | None
    is_kept: bool
    kind: str = "settings_chosen"


@dataclass(frozen=True)
class AttentionChosen:
    """The kernel that computes attention, found on rank 0 by running it once before a layer is compiled.

    ``expected`` is the fastest one for such a GPU, number format and head; None where nothing is known of that.
    ``reasons``: why it is another.
    """

    attention: str
    expected: str | None
    reasons: list[str]
    kind: str = "attention_chosen"


COPY_ENGINES = "copy engines"


@dataclass(frozen=True)
class CollectivesChosen:
    """What gathers sharded parameters and adds up gradients: ``COPY_ENGINES``, or torch's name of a library.

    ``reason``: why it is not the copy engines, where they were not forbidden; else "".
    """

    collectives: str
    reason: str
    kind: str = "collectives_chosen"


@dataclass(frozen=True)
class StartMeasured:
    """Seconds from the beginning of rank 0's process to the end of its first step, and those of each phase, in order.

    Compilation has a phase of its own.
    """

    step: int
    seconds: float
    phases: Mapping[str, float]
    kind: str = "start_measured"


@dataclass(frozen=True)
class LayersCompiled:
    """What torch.compile made of the decoder layers, counted on rank 0 during an attempt's first step.

    ``eager`` names the layers that ran without a compiled graph, ``broken`` those that ran as more than one;
    ``graph_breaks`` counts torch's reasons. ``seconds`` is what compilation took, of which graphs that were found in a
    cache take little; None in a log of an earlier release.
    """

    layers: int
    graphs: int
    eager: list[str]
    broken: list[str]
    graph_breaks: dict[str, int]
    seconds: float | None = None
    kind: str = "layers_compiled"


@dataclass(frozen=True)
class GraphsCompiled:
    """The compile caches of all nodes so far: graphs that they ``held`` before the job, and how many were compiled.

    The numbers are sums over the nodes' copies; ``nodes`` has held, compiled and failed of each. A shared folder counts
    once. ``hit_rate`` is the share of these graphs that need not be compiled; None while there are none.
    """

    cache: str
    held: int
    compiled: int
    failed: int
    hit_rate: float | None
    nodes: list[list[int]]
    kind: str = "graphs_compiled"


@dataclass(frozen=True)
class FirstStep:
    """The first step that a start has completed: changes that its attempt was resumed with stay from here on."""

    step: int
    kind: str = "first_step"


@dataclass(frozen=True)
class Step:
    """One optimiser step (1-based). Loss in nats per token over the global batch."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    kind: str = "step"


@dataclass(frozen=True)
class Logged:
    """Numbers of one step that a user's own program has logged by name."""

    step: int
    values: Mapping[str, float | None]
    """None stands for NaN or an infinity, in a log of an earlier release."""
    kind: str = "logged"


@dataclass(frozen=True)
class Throughput:
    """One logged window, ending at ``step``; times in seconds, memory in bytes (peak since the last window)."""

    step: int
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float | None
    step_seconds: float
    data_wait_seconds: float
    device_memory_bytes: int | None
    host_memory_bytes: int
    kind: str = "throughput"


@dataclass(frozen=True)
class Validation:
    """Mean loss (nats per token) and perplexity on the validation rows after ``step`` steps."""

    step: int
    validation_loss: float
    perplexity: float
    tokens: int
    kind: str = "validation"


@dataclass(frozen=True)
class Sample:
    """Text generated by the trained model."""

    prompt: str
    text: str
    kind: str = "sample"


@dataclass(frozen=True)
class Progress:
    """Progress of a long phase other than training (prepare, staging, export)."""

    phase: str
    done: float
    total: float | None = None
    unit: str = ""
    detail: str = ""
    kind: str = "progress"


@dataclass(frozen=True)
class Notice:
    """Something a person should see in the log and the status."""

    message: str
    level: str = "info"
    kind: str = "notice"


@dataclass(frozen=True)
class DataPrepared:
    """What ``prepare`` did with every token it saw."""

    account: dict[str, Any]
    kind: str = "account"


@dataclass(frozen=True)
class TrackerOpened:
    """An experiment tracker takes this run's numbers under ``id``; later attempts continue under the same."""

    tracker: str
    id: str
    uri: str | None = None
    kind: str = "tracker_opened"


@dataclass(frozen=True)
class StopRequested:
    """Somebody has asked the attempt to stop after its current step, or (``now``) to be killed."""

    now: bool
    kind: str = "stop_requested"


@dataclass(frozen=True)
class AttemptEnded:
    """Written last, by the launcher's supervisor: a ``RunState`` value and, if it failed, why."""

    state: str
    reason: str | None = None
    rank: int | None = None
    kind: str = "attempt_ended"


class NoEvent(ValueError):
    """A whole line of JSON that is not an event: nothing of ours wrote it, or another release did."""


Event = (
    AttemptStarted
    | StartChosen
    | FirstStep
    | CheckpointRestored
    | Recovered
    | StateVerified
    | SettingsChosen
    | AttentionChosen
    | CollectivesChosen
    | LayersCompiled
    | GraphsCompiled
    | StartMeasured
    | Step
    | Logged
    | Throughput
    | Validation
    | CheckpointPublished
    | PublicationLate
    | FinalPublished
    | NothingDone
    | ProfilePublished
    | Sample
    | Progress
    | Notice
    | DataPrepared
    | TrackerOpened
    | Stopped
    | Failed
    | Stalled
    | StacksCollected
    | StopRequested
    | AttemptEnded
)


def encode(event: Event, *, attempt: int, at: float) -> str:
    """One line (without the newline) for ``event``. In lists, and deeper in mappings, NaN and infinity become null."""
    record: dict[str, Any] = {"kind": event.kind, "time": at, "attempt": attempt}
    for name, value in asdict(event).items():
        if isinstance(value, float) and (name in EXACT or not math.isfinite(value)):
            record[f"{name}{_TWIN}"] = float(value).hex()
        elif isinstance(value, dict):
            odd = {key: it.hex() for key, it in value.items() if isinstance(it, float) and not math.isfinite(it)}
            record |= {f"{name}{_TWIN}": odd} if odd else {}
        # Kind, time and attempt of the line itself come first, whatever a field is called.
        record.setdefault(name, _finite(value))
    return json.dumps(record, allow_nan=False)


def _finite(value: Any) -> Any:
    """``value`` with every NaN and infinity in it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(it) for it in value]
    return value


KINDS: dict[str, type[Event]] = {it.kind: it for it in get_args(Event)}


def decode(line: str) -> dict[str, Any]:
    """The event of one line, with floats restored from their hexadecimal twins, and every field of its class.

    Raises ``NoEvent`` for JSON that is not an event, and ``ValueError`` for anything else.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or "kind" not in record:
        raise NoEvent("an event is a JSON object with a kind")
    for twin in [name for name in record if name.endswith(_TWIN) and name.removesuffix(_TWIN) in record]:
        try:
            record[twin.removesuffix(_TWIN)] = _from_hex(record[twin.removesuffix(_TWIN)], record.pop(twin))
        except (TypeError, ValueError, OverflowError) as error:
            raise NoEvent(f"{twin} is not a float in hexadecimal") from error
    try:
        return checked(record, KINDS.get(record["kind"]) if isinstance(record["kind"], str) else None)
    except ValueError as error:
        raise NoEvent(str(error)) from error


def _from_hex(value: Any, twin: Any) -> Any:
    """``value`` with the floats of its hexadecimal ``twin``: one, or those of a mapping that JSON cannot hold."""
    if isinstance(twin, dict):
        return {**value, **{key: float.fromhex(text) for key, text in twin.items()}}
    return float.fromhex(twin)


class EventWriter:
    """Appends the events of one writer to its file; threads may share it.

    A partial line that an earlier, killed process left at the end is closed first, so it cannot swallow ours.
    """

    def __init__(self, path: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        make_folders(path.parent)
        self._descriptor = opener(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._attempt = attempt
        self._clock = clock
        self._lock = threading.Lock()
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._append(b"\n")

    def write(self, event: Event) -> None:
        """Append ``event``; other processes see the whole line when this returns. Raises ``OSError`` (disk full)."""
        self._append((encode(event, attempt=self._attempt, at=self._clock()) + "\n").encode("utf-8"))

    def _append(self, data: bytes) -> None:
        with self._lock:
            while data:
                # ``write`` may take fewer bytes than it is given, on a disk that is nearly full.
                data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        os.close(self._descriptor)


def read_file(path: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Whole events from byte ``offset`` on, each with the offset behind it; a partial last line is left for later.

    Other lines are passed over: silently where a killed process left half of one, else with one warning per file.
    """
    with path.open("rb") as stream:
        stream.seek(offset)
        while raw := stream.readline(_LONGEST_LINE):
            if not raw.endswith(b"\n"):
                if len(raw) < _LONGEST_LINE:
                    return
                offset += len(raw)
                continue  # the rest of it cannot be read as an event either
            offset += len(raw)
            try:
                yield offset, decode(raw.decode("utf-8"))
            except NoEvent as error:
                report_once(str(path), "passed over a line that is not an event of this release", str(error))
            except (ValueError, RecursionError):
                continue


def last_events(path: Path) -> list[dict[str, Any]]:
    """The events at the end of a log, as many as its last 64 KiB hold; none if there is no such file."""
    try:
        # A line that this cuts in two cannot be read, and is passed over.
        return [event for _, event in read_file(path, max(0, path.stat().st_size - _TAIL_BYTES))]
    except FileNotFoundError:
        return []


def event_files(folder: Path) -> list[tuple[int, str, Path]]:
    """(attempt, writer, path) of every event log, in numeric order of attempts; other names are reported once."""
    found, unknown = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE_NAME.fullmatch(path.name)
        # The two patterns differ: this one takes a name apart, ``is_growing`` decides which names are ours.
        if match and RunPaths.is_growing(f"events/{path.name}") and path.is_file():
            found.append((int(match[1]), match[2], path))
        else:
            unknown.append(path.name)
    report_unknown(str(folder), unknown)
    return sorted(found)


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """All events of a run, attempt by attempt, each writer's in order."""
    for _, _, path in event_files(folder):
        for _, event in read_file(path):
            yield event


def newest_per_step(events: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Events of one ``kind`` by ascending step; of several attempts at a step the newest counts."""
    newest: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event.get("kind") == kind:
            # A continued attempt repeats the steps after its checkpoint, so a step may have several events.
            held = newest.get(event["step"])
            # Equal counts as newer: within one attempt the later event does.
            if held is None or event["attempt"] >= held["attempt"]:
                newest[event["step"]] = event
    return [newest[step] for step in sorted(newest)]
