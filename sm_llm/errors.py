"""Every error a user can meet, as one small tree.

::

    SmLlmError
    ├── SpecError        the specification is wrong (all faults at once)
    ├── PlanError        the specification is well-formed, but cannot be planned
    ├── SubmitError      a backend refused or could not start the job
    │   ├── LaunchRefused    what was asked for does not fit the run as it is: nothing was started
    │   └── RunNotFound      no run has the name, id or address that was given
    ├── RunFailed        a run ended without doing its job
    ├── StorageError     storage could not be read or written
    ├── CheckpointError  no usable checkpoint, or one that does not fit
    ├── ConversionError  a checkpoint could not be converted
    │   └── ConversionRefused    source, degrees or destination do not fit: nothing was written
    └── DataError        text, rows or a tokenizer are unusable

A message states what is wrong, where, the value seen and what to do. The command line prints
these without a traceback; any other exception is our own mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.redaction import redact
from sm_llm.terminal import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNSET: Any = object()
_MOST_SHOWN = 30
"""Faults that a message lists; an error holds all of them."""


@dataclass(frozen=True, repr=False)
class Fault:
    """One thing that is wrong: ``path`` (dotted), what is wrong, the value seen, what to do, where it was written."""

    path: str
    problem: str
    seen: Any = _UNSET
    remedy: str = ""
    origin: str = ""

    def __str__(self) -> str:
        origin = f" ({self.origin})" if self.origin else ""
        seen = "" if self.seen is _UNSET else f" (got {_shorten(repr(self.seen))})"
        remedy = f". {self.remedy}" if self.remedy else ""
        return redact(f"{self.path}{origin}: {self.problem}{seen}{remedy}")

    def __repr__(self) -> str:
        return f"Fault({self})"


def _shorten(text: str, longest: int = 120) -> str:
    text = redact(text)  # before it is cut: half a token has no shape any more
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


class SmLlmError(Exception):
    """Base of every error that is the user's, the data's or the platform's, not ours.

    Its text never holds what has the format of a credential, nor control sequences, whatever a message quotes.
    """

    def __str__(self) -> str:
        return clean(redact(super().__str__()))


class _FaultyError(SmLlmError):
    """An error that carries all faults found, not only the first."""

    def __init__(self, faults: Sequence[Fault] | str) -> None:
        self.faults: tuple[Fault, ...] = () if isinstance(faults, str) else tuple(faults)
        super().__init__(faults if isinstance(faults, str) else _list_faults(self.faults))


def _list_faults(faults: Sequence[Fault]) -> str:
    if len(faults) == 1:
        return str(faults[0])
    lines = [f"  - {fault}" for fault in faults[:_MOST_SHOWN]]
    if len(faults) > _MOST_SHOWN:
        lines.append(f"  … and {len(faults) - _MOST_SHOWN} more")
    return "\n".join([f"{len(faults)} faults:", *lines])


class SpecError(_FaultyError):
    """The specification itself is wrong."""


class PlanError(_FaultyError):
    """The specification is well-formed but cannot be carried out as it stands."""


class SubmitError(SmLlmError):
    """A backend refused the job or could not start it."""


class LaunchRefused(SubmitError):
    """What was asked for does not fit the run as it is; nothing was started or written."""


class RunNotFound(SubmitError):
    """No run has the name, id or address that was given; the message lists the places that were searched."""


class RunFailed(SmLlmError):
    """A run ended without completing; the message names the cause and where to look."""


class StorageError(SmLlmError):
    """Storage could not be read or written. Never means "nothing is there"."""


class CheckpointError(SmLlmError):
    """No usable checkpoint where one was required, or one that does not fit the job."""


class ConversionError(_FaultyError):
    """A checkpoint could not be converted without loss."""


class ConversionRefused(ConversionError):
    """Source, degrees or destination of a conversion do not fit; nothing was written."""


class DataError(SmLlmError):
    """Text, rows or a tokenizer are unusable; the message names file and line."""
