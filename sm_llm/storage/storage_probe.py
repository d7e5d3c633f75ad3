"""Tries what publication needs of a storage, one after the other, and reports which permissions are missing."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.s3.s3_client import DENIED, code_of
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.s3_trials import S3Trials
from sm_llm.storage.trials import Trials
from sm_llm.storage.uri import open_store, parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sm_llm.storage.trials import Trial


@dataclass(frozen=True)
class Check:
    """One thing tried: what, whether it worked, why not, and the IAM actions it lacks in S3."""

    name: str
    ok: bool
    problem: str = ""
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class StorageReport:
    """All that was tried; ``policy`` is the IAM policy that would allow what failed, or None."""

    uri: str
    checks: tuple[Check, ...]
    policy: dict[str, Any] | None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def text(self) -> str:
        """A line per check, then the policy."""
        lines = [
            f"{'ok    ' if it.ok else 'FAILED'}  {it.name}{': ' if it.problem else ''}{it.problem}"
            for it in self.checks
        ]
        if self.policy is not None:
            lines += ["", "This policy would allow what failed:", json.dumps(self.policy, indent=2)]
        return "\n".join(lines)


def probe_storage(uri: str | Path, options: S3Options | Mapping[str, Any] | None = None) -> StorageReport:
    """Try a storage: list, create once and only once, read, checksum, overwrite, multipart upload, delete.

    What it writes lies below ``.probe-<random>/`` and is deleted again. Never raises ``StorageError`` for what it
    tries: the report holds them. Raises it for an address that means nothing.
    """
    trials = _trials(uri, options, f".probe-{secrets.token_hex(8)}/object")
    checks: tuple[Check, ...] = ()
    for trial in trials.all():
        checks += (_try(trial),)
        if not (checks[0].ok or checks[0].actions):
            break  # no bucket, no credentials, no answer: every further trial would only repeat it
    denied = sorted({action for it in checks if not it.ok for action in it.actions})
    return StorageReport(parse(uri).uri, checks, trials.policy(denied))


def _trials(uri: str | Path, options: S3Options | Mapping[str, Any] | None, key: str) -> Trials:
    location = parse(uri)
    if location.bucket is None:
        return Trials(open_store(uri), key)
    return S3Trials(S3Store(location.bucket, location.prefix, S3Options.of(options)), key)


def _try(trial: Trial) -> Check:
    try:
        trial.run()
    except StorageError as error:
        return Check(trial.name, False, str(error), trial.actions if _is_denied(error) else ())
    return Check(trial.name, True)


def _is_denied(error: StorageError) -> bool:
    # What delete_objects refuses is in its answer, without an error of the SDK.
    return code_of(error.__cause__) in DENIED or "AccessDenied" in str(error)
