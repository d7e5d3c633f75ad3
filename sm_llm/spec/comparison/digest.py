"""One short name for what a specification asks for, whatever it is called and wherever it is stored."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec, WorkflowSpec


def spec_digest(spec: JobSpec | WorkflowSpec) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of ``spec`` without ``name``, where it is stored, and ``secrets``.

    Defaults are part of it: two specifications are equal if they mean the same, however they were written.
    """
    body = spec.model_dump(mode="json", exclude={"name", "storage", "storage_options", "secrets"})
    for step in body.get("steps", {}).values():
        del step["secrets"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
