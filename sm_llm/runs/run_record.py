"""run.json: what a run is, where every value came from, what it ran on, its attempts and its outcome."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sm_llm.errors import StorageError, SubmitError
from sm_llm.file_names import name_problem
from sm_llm.runs.git_state import GitState
from sm_llm.runs.run_lock import exclusive
from sm_llm.runs.run_states import RunState
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.storage.base import SMALL_BYTES
from sm_llm.storage.files import read_regular, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

VERSION = 1
MOST_ATTEMPTS = 999_999_999
"""The largest number of an attempt: names of event logs and log folders have nine digits for it."""
LATEST = 253_402_300_799
"""The last second of the year 9999, since the epoch: what a calendar can show."""


def _plain_name(name: str) -> str:
    """Names in a record become folders: of steps, of copies on this machine."""
    if problem := "it holds a slash" if "/" in name else name_problem(name):
        raise ValueError(f"{name!r} cannot be a name: {problem}")
    return name


def _usable_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """What reading a run needs of its specification. The rest may be another release's."""
    if not isinstance(spec.get("backend"), dict) or not isinstance(spec["backend"].get("name"), str):
        raise ValueError("backend.name must be text")
    if "steps" in spec:
        if not isinstance(spec["steps"], dict) or not spec["steps"]:
            raise ValueError("steps must be a mapping with at least one step")
        for step in spec["steps"]:
            _plain_name(step)
    elif not isinstance(spec.get("task"), dict) or not isinstance(spec["task"].get("kind"), str):
        raise ValueError("task.kind must be text")
    options = spec.get("storage_options")
    values = list(options.values()) if isinstance(options, dict) else [] if options is None else [options]
    if not all(isinstance(it, bool) or _is_text_or_none(it) for it in values) or not isinstance(options, dict | None):
        raise ValueError("storage_options must be a mapping of texts, true and false")
    return spec


def _usable_plan(plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is shown of a plan where its run begins or continues."""
    for step in plan:
        if not _is_text_or_none(step.get("step")):
            raise ValueError("step must be text")
        for name in ("settings", "facts"):
            values = step.get(name, {})
            if not isinstance(values, dict) or not all(isinstance(it, str) for it in values.values()):
                raise ValueError(f"{name} must be a mapping of texts")
        warnings = step.get("warnings", [])
        if not isinstance(warnings, list) or not all(isinstance(it, str) for it in warnings):
            raise ValueError("warnings must be a list of texts")
    return plan


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


_Name = Annotated[str, AfterValidator(_plain_name)]
# Bounded, because numbers of a record are shown as dates and added up: any value that passes must not raise there.
_Moment = Annotated[float, Field(ge=0, le=LATEST)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Number = Annotated[int, Field(ge=1, le=MOST_ATTEMPTS)]
_Spec = Annotated[dict[str, Any], AfterValidator(_usable_spec)]
_Plan = Annotated[list[dict[str, Any]], AfterValidator(_usable_plan)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class AttemptStart(_Block):
    """Where an attempt's training began, as its worker reported: ``scratch``, ``pretrained`` or ``checkpoint``."""

    source: str
    step: _Count
    uri: str | None = None
    digest: str | None = None


class InputManifest(_Block):
    """What an input was when an attempt read it.

    ``digest`` is the CRC64NVME of the list of its files, over their contents (``of: content``) or, for large inputs,
    their names, sizes and modification times (``of: listing``).
    """

    uri: str
    files: _Count
    bytes: _Count
    digest: str
    of: Literal["content", "listing"]


class Attempt(_Block):
    """One start of the run. Times in seconds since the epoch; an attempt without ``state`` has not ended yet."""

    number: _Number
    native_id: str
    """Empty while a launcher has only claimed the attempt."""
    host: str | None = None
    started: _Moment
    ended: _Moment | None = None
    state: RunState | None = None
    reason: str | None = None
    rank: _Count | None = None
    """The first failing rank, where it is known."""
    billable_seconds: _Count | None = None
    """Seconds that the platform bills, of all nodes together; None where nothing is billed, or not yet known."""
    used_seconds: _Count | None = None
    """Seconds that its nodes ran, all of them together, where the platform reports it; spot bills fewer."""
    start: AttemptStart | None = None
    request: str | None = None
    """The request as it was sent: its file, relative to the run's folder."""
    inputs: dict[str, InputManifest] = Field(default_factory=dict)
    """Dotted path -> what was read there."""
    dropped_changes: tuple[str, ...] = ()
    """The overrides it was resumed with, where the run did not keep them: it ended before its first step."""

    @classmethod
    def claim(cls, number: int, native_id: str = "", request: str | None = None) -> Attempt:
        """An attempt that this machine is about to start now; ``native_id`` where it is known before the start."""
        return cls(
            number=number, native_id=native_id, host=socket.gethostname(), started=time.time(), request=request
        )  # fmt: skip

    @property
    def is_claim(self) -> bool:
        """Whether nothing runs yet, but nobody else may start it."""
        return not self.native_id

    @property
    def dropped_sentence(self) -> str:
        """Which changes the run did not keep, in one line; empty where there are none."""
        if not self.dropped_changes:
            return ""
        changes = ", ".join(self.dropped_changes)
        return f"attempt {self.number} ended before its first step, so the run has not kept its changes: {changes}"

    def native_uri(self, backend: str) -> str:
        """The address of its job: ``BACKEND://ID``; a process id counts on the host that started it alone."""
        location = self.native_id if "/" in self.native_id else f"{self.host or socket.gethostname()}/{self.native_id}"
        return f"{backend}://{location}"

    def is_open_in(self, record: RunRecord) -> bool:
        """Whether ``record`` holds this very attempt, of this very job, and no end of it."""
        # The number alone is not enough: after a rollback another launch may have used it again.
        mine = (self.number, self.native_id, None)
        return any((it.number, it.native_id, it.state) == mine for it in record.attempts)


def _ascending(attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    numbers = [it.number for it in attempts]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"attempts must be in ascending order, got {numbers[:20]}")
    return attempts


class RequestedRun(_Block):
    """What a run was asked for: its specification, and what follows from it."""

    spec: _Spec
    spec_digest: str
    origins: dict[str, str] = Field(default_factory=dict)
    plan: _Plan = Field(default_factory=list)


class RunRecord(_Block):
    """The record of one run; see the field texts. Written by the launcher only."""

    version: int = VERSION
    run_id: _Name
    name: _Name
    created: _Moment
    """Seconds since the epoch."""
    spec: _Spec
    """The merged specification, as JSON; ``load_spec`` gives the object."""
    spec_digest: str
    origins: dict[str, str] = Field(default_factory=dict)
    """Dotted path of a value -> where it came from."""
    plan: _Plan = Field(default_factory=list)
    """The plan the run was started with, one summary per step (one for a job)."""
    git: GitState | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    """Package -> version, with ``python``."""
    code_digest: str | None = None
    """SHA-256 over the files of the sm_llm package that launched the run."""
    host: dict[str, str] = Field(default_factory=dict)
    """The launching machine; ``folder`` is what relative inputs are relative to."""
    made_from: str | None = None
    """The run that this one repeats or branches from."""
    changes: dict[_Number, tuple[str, ...]] = Field(default_factory=dict)
    """Attempt -> the overrides it was resumed with; ``spec`` has them merged in."""
    before: RequestedRun | None = None
    """While an attempt with changes runs: what it takes the place of, in case it ends before its first step."""
    trackers: dict[str, str] = Field(default_factory=dict)
    """Experiment tracker -> the run's id there, the same in all attempts."""
    in_pipeline: bool = False
    """Whether a pipeline of SageMaker starts it, whenever its step is reached."""
    cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """In US dollars, once the backend's time is priced; None until then."""
    attempts: Annotated[tuple[Attempt, ...], AfterValidator(_ascending)] = ()
    outcome: RunState | None = None
    """The final state, once there is one; None while the run lasts or can be continued."""

    def load_spec(self) -> JobSpec | WorkflowSpec:
        """The specification as an object. Raises ``pydantic.ValidationError`` if this release has other fields."""
        return (WorkflowSpec if "steps" in self.spec else JobSpec).model_validate(self.spec)

    def with_attempt(self, attempt: Attempt) -> RunRecord:
        """This record with ``attempt`` added, or put in place of the one with its number; the outcome follows it."""
        # Records are frozen: every change is a new one, which a conditional write stores or not.
        others = [it for it in self.attempts if it.number != attempt.number]
        return self._of(sorted((*others, attempt), key=lambda it: it.number))

    def attempt(self, number: int) -> Attempt | None:
        """The attempt of this number; None if it is not there, or was rolled back."""
        return next((it for it in self.attempts if it.number == number), None)

    def without_attempt(self, number: int) -> RunRecord:
        """This record without an attempt that was never started."""
        return self._of([it for it in self.attempts if it.number != number])

    def asked(self) -> RequestedRun:
        """What the run is asked for now."""
        return RequestedRun(spec=self.spec, spec_digest=self.spec_digest, origins=self.origins, plan=self.plan)

    def asking(self, asked: RequestedRun) -> RunRecord:
        """This record of a run that is asked for this from now on."""
        return self.model_copy(update={name: getattr(asked, name) for name in RequestedRun.model_fields})

    def changed(self, asked: RequestedRun, attempt: int, changes: Sequence[str]) -> RunRecord:
        """This record as ``attempt`` asks for it; what that takes the place of is kept until the attempt has ended."""
        # One of this number whose launcher was killed has left its own: what it replaced is still what to go back to.
        before = self.before if self.unsettled == attempt else self.asked()
        update = {"changes": {**self.changes, attempt: tuple(changes)}, "before": before}
        return self.asking(asked).model_copy(update=update)

    def unchanged_since(self, earlier: RunRecord) -> RunRecord:
        """This record with everything that it was asked for as in an ``earlier`` one."""
        # The attempts stay: only what the run is asked for goes back.
        names = (*RequestedRun.model_fields, "changes", "before")
        return self.model_copy(update={name: getattr(earlier, name) for name in names})

    def settled(self, attempt: int, *, kept: bool) -> RunRecord:
        """This record once ``attempt`` has ended: with its changes if they are ``kept``, else as it was before them."""
        if kept or self.before is None or attempt not in self.changes:
            return self.model_copy(update={"before": None})
        dropped = self.changes[attempt]
        changes = {number: it for number, it in self.changes.items() if number != attempt}
        attempts = tuple(
            it.model_copy(update={"dropped_changes": dropped}) if it.number == attempt else it for it in self.attempts
        )
        return self.asking(self.before).model_copy(update={"changes": changes, "before": None, "attempts": attempts})

    @property
    def unsettled(self) -> int | None:
        """The attempt whose changes may still be undone; None where there is none."""
        return max(self.changes, default=None) if self.before is not None else None

    def _of(self, attempts: Sequence[Attempt]) -> RunRecord:
        last = attempts[-1].state if attempts else None
        # What was interrupted is no outcome: the same command continues it.
        ended = last is not None and last.is_final and last is not RunState.INTERRUPTED
        return self.model_copy(update={"attempts": tuple(attempts), "outcome": last if ended else None})

    @property
    def next_attempt(self) -> int:
        return self.attempts[-1].number + 1 if self.attempts else 1

    def to_text(self) -> str:
        """The record as the text of run.json."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write atomically. Raises ``StorageError``."""
        try:
            write_atomically(path, self.to_text())
        except OSError as error:
            raise StorageError(f"{path}: cannot write the run record: {error}") from error

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read and validate. Raises ``StorageError`` with what is wrong with the file."""
        try:
            body = read_regular(path, SMALL_BYTES)
        except FileNotFoundError as error:
            raise StorageError(f"{path}: there is no run record here. Is this a run's folder?") from error
        except OSError as error:
            raise StorageError(f"{path}: cannot read the run record: {error}") from error
        return cls.parse(body, str(path))

    @classmethod
    def parse(cls, body: bytes, name: str) -> RunRecord:
        """Validate the bytes of run.json, which messages call ``name``. Raises ``StorageError``."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise StorageError(f"{name}: cannot read the run record: {error}") from error
        # The version comes first: of another release's record a reader wants to know that, and not its unknown fields.
        version = value.get("version") if isinstance(value, dict) else None
        if type(version) is not int or version != VERSION:
            raise StorageError(f"{name}: record version {version!r} is not known to this release (which has {VERSION})")
        try:
            # Strict: a record is another machine's data, in which a text does not pass for a number.
            return cls.model_validate_json(body, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise StorageError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    @classmethod
    def update(cls, path: Path, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Read, change and write under a lock, so that two writers never lose each other's change."""
        # A file of its own: the record is replaced by a rename, and a lock on it would stay with the old file.
        with exclusive(path.with_name(f".{path.name}.lock")):
            changed = change(cls.read(path))
            changed.write(path)
        return changed


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions of the named packages, read from their metadata without importing them, and Python's."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host_facts(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Name, system and processors of this machine."""
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "processors": str(os.cpu_count()),
        # The variable and not the user database: in a container its number often has no name there.
        "user": environ.get("USER", ""),
    }


def exists_already(uri: str) -> SubmitError:
    """A second run may not take the place of the first."""
    return SubmitError(f"{uri}: there is a run of this id already. Attach to it, or launch again for an id of its own")
