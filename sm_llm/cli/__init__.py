"""The command line: one verb calls one Python function; there is no logic here beyond words and exit codes."""

from __future__ import annotations

from sm_llm.cli import (  # noqa: F401 - each registers its verbs
    begin,
    cache,
    convert,
    doctor,
    env,
    hub,
    image,
    look,
    pipeline,
    steer,
    storage,
)
from sm_llm.cli.app import VERBS, app, main

__all__ = ["VERBS", "app", "main"]
