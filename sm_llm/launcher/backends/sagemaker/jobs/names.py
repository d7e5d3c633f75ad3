"""Names of training jobs: what the service accepts, unique, and derived from the run they belong to."""

from __future__ import annotations

import re

LONGEST = 63
_STAMP = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}(?:-.*)?$")


def normalised(text: str) -> str:
    """``text`` with everything that a job's name cannot hold as a hyphen: ``my_base run`` -> ``my-base-run``."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "job"


def base_in_names(base: str) -> str:
    """How a base begins the names of jobs: normalised, and cut where the run's time and digits follow."""
    tail = "-20260101-000000-0000"
    return job_name(f"x{tail}", 1, base).removesuffix(f"{tail}-1")


def job_name(run_id: str, attempt: int, base: str | None = None) -> str:
    """The name of an attempt's training job: ``<base>-<the run's time and random digits>-<attempt>``.

    The base is cut before the rest is added, so that the name stays unique; a run id that is not one of ours keeps its
    end.
    """
    match = _STAMP.search(run_id)
    stamp = match[0] if match else f"-{run_id}"
    head = base if base is not None else run_id[: match.start()] if match else ""
    tail = f"-{normalised(stamp)}-{attempt}"[-LONGEST + 1 :]
    return f"{normalised(head)[: LONGEST - len(tail)].rstrip('-')}{tail}".strip("-")
