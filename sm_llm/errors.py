"""Every error a user can meet, as one small tree.

::

    SmLlmError
    ├── SpecError        the specification is wrong (all issues at once)
    ├── PlanError        the specification is well-formed, but cannot be planned
    ├── SubmitError      a backend refused or could not start the job
    │   ├── LaunchRefused    what was asked for does not fit the run as it is: nothing was started
    │   └── RunNotFound      no run has the name, id or address that was given
    ├── RunFailed        a run ended without doing its job
    ├── UsageError       an argument or option cannot be used as it is: nothing was started
    ├── StorageError     storage could not be read or written
    │   └── StorageRefused   an address or option of storage cannot be used: nothing was read or written
    ├── CheckpointError  no usable checkpoint, or one that does not fit
    ├── ConversionError  a checkpoint could not be converted
    │   └── ConversionRefused    source, degrees or destination do not fit: nothing was written
    └── DataError        text, rows or a tokenizer are unusable

A message states what is wrong, where, the value seen and what to do. The command line prints
these without a traceback; any other exception is our own mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.redaction import redact
from sm_llm.terminal import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNSET: Any = object()
# Issues that a message lists; an error holds all of them.
_MOST_SHOWN = 30


@dataclass(frozen=True, repr=False)
class Issue:
    """One thing that is wrong with what the user gave, or (a warning) probably not meant."""

    code: str
    """Its stable name, e.g. ``batch-not-divisible``; what has to recognise an issue reads this, never its text."""
    path: str
    """Where it is: a dotted path of the specification, an option or a file."""
    message: str
    value: Any = _UNSET
    """What was given there."""
    remedy: str = ""
    origin: str = ""
    """Where the value was written: a file and its line, the command line."""
    severity: Literal["error", "warning"] = "error"
    blocked_by: tuple[str, ...] = ()
    """Codes and dotted paths: an earlier error of one of these leaves nothing to report here."""

    @property
    def has_value(self) -> bool:
        """Whether it shows what was given."""
        return self.value is not _UNSET

    def __str__(self) -> str:
        origin = f" ({self.origin})" if self.origin else ""
        value = f" (got {_shorten(repr(self.value))})" if self.has_value else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return redact(f"{self.path}{origin}: {self.message}{value}{remedy}")

    def __repr__(self) -> str:
        return f"Issue({self.code}: {self})"

    def to_json(self) -> dict[str, Any]:
        """JSON values without anything that has the format of a credential; ``value`` only where one was given."""
        texts = {"code": self.code, "severity": self.severity, "path": self.path, "message": self.message}
        value = {"value": _plain(self.value)} if self.has_value else {}
        origin = {"origin": clean(redact(self.origin))} if self.origin else {}
        shown = {name: clean(redact(text)) for name, text in texts.items()}
        return shown | value | {"remedy": clean(redact(self.remedy))} | origin


def warning(code: str, path: str, message: str, value: Any = _UNSET, remedy: str = "") -> Issue:
    """An issue that stops nothing: what was given works, but is probably not meant."""
    return Issue(code, path, message, value, remedy, severity="warning")


def _plain(value: Any) -> Any:
    """JSON values for whatever a user may have given."""
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        # JSON has no NaN and no infinity.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {clean(redact(str(key))): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return clean(redact(value if isinstance(value, str) else repr(value)))


def _shorten(text: str, longest: int = 120) -> str:
    text = redact(text)  # before it is cut: half a token has no shape any more
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


class SmLlmError(Exception):
    """Base of every error that is the user's, the data's or the platform's, not ours.

    Its text never holds what has the format of a credential, nor control sequences, whatever a message quotes.
    """

    issues: tuple[Issue, ...] = ()
    """What is wrong, one by one, where the error is of something that the user gave."""

    def __str__(self) -> str:
        return clean(redact(super().__str__()))

    def to_json(self) -> dict[str, Any]:
        """The error as JSON values: its type, its text and its issues."""
        return {
            "type": type(self).__name__,
            "message": str(self),
            "issues": [issue.to_json() for issue in self.issues],
        }


class _ErrorWithIssues(SmLlmError):
    """An error that carries all issues found, not only the first."""

    def __init__(self, issues: Sequence[Issue] | str) -> None:
        self.issues = () if isinstance(issues, str) else tuple(issues)
        super().__init__(issues if isinstance(issues, str) else _list_issues(self.issues))


def _list_issues(issues: Sequence[Issue]) -> str:
    if len(issues) == 1:
        return str(issues[0])
    lines = [f"  - {issue}" for issue in issues[:_MOST_SHOWN]]
    if len(issues) > _MOST_SHOWN:
        lines.append(f"  … and {len(issues) - _MOST_SHOWN} more")
    return "\n".join([f"{len(issues)} issues:", *lines])


class SpecError(_ErrorWithIssues):
    """The specification itself is wrong."""


class PlanError(_ErrorWithIssues):
    """The specification is well-formed but cannot be carried out as it stands."""


class SubmitError(SmLlmError):
    """A backend refused the job or could not start it."""


class LaunchRefused(SubmitError):
    """What was asked for does not fit the run as it is; nothing was started or written."""


class QueryError(SubmitError):
    """A platform did not answer: nothing is known of its jobs, and nothing was changed."""


class RunNotFound(SubmitError):
    """No run has the name, id or address that was given; the message lists the places that were searched."""


class RunFailed(SmLlmError):
    """A run ended without completing; the message names the cause and where to look."""


class UsageError(SmLlmError):
    """An argument or option cannot be used as it is; nothing was started or written."""


class StorageError(SmLlmError):
    """Storage could not be read or written. Never means "nothing is there"."""


class StorageRefused(StorageError):
    """An address or option of storage cannot be used as it is; nothing was read or written."""


class CheckpointError(SmLlmError):
    """No usable checkpoint where one was required, or one that does not fit the job."""


class ConversionError(_ErrorWithIssues):
    """A checkpoint could not be converted without loss."""


class ConversionRefused(ConversionError):
    """Source, degrees or destination of a conversion do not fit; nothing was written."""


class DataError(SmLlmError):
    """Text, rows or a tokenizer are unusable; the message names file and line."""
