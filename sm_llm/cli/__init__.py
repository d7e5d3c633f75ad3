"""The command line: one verb calls one Python function; there is no logic here beyond words and exit codes."""

from __future__ import annotations

# The help shows the verbs in the order in which these modules register them.
# isort: off
from sm_llm.cli import (  # noqa: F401
    submit,
    cache,
    convert,
    doctor,
    env,
    hub,
    image,
    inspect,
    pipeline,
    control,
    storage,
)

# isort: on
from sm_llm.cli.app import VERBS, app, main

__all__ = ["VERBS", "app", "main"]
