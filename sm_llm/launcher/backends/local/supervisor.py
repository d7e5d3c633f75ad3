"""The detached process that runs one local run, a job or a workflow.

``python -m sm_llm.launcher.backends.local.supervisor URI FD OPTIONS FOLDER``
holds the run's lock, starts the nodes, passes signals
on, and records how the attempt ended. It lives on when the terminal that launched it goes away. ``FD`` is a pipe on
which it reports that it has begun; ``OPTIONS`` are, as JSON, how the run's storage is reached; relative inputs are
relative to ``FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.launcher.backends.local.attempt import run_attempt
from sm_llm.launcher.backends.local.local_run import READY
from sm_llm.launcher.backends.local.processes import Interrupts, adopt_orphans
from sm_llm.owned import UMASK_ENVIRONMENT, close_to_others
from sm_llm.runs.run_states import EXIT_CODES
from sm_llm.runs.run_store import run_store_at

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Supervise the run at ``arguments[0]``; returns the exit code of its final state."""
    run_store, descriptor = run_store_at(arguments[0], json.loads(arguments[2])), int(arguments[1])
    folder = Path(arguments[3]) if len(arguments) > 3 else Path.cwd()
    # The program of a script job gets the user's own umask back for files elsewhere (docs/security.md).
    os.environ[UMASK_ENVIRONMENT] = f"{close_to_others(run_store.root):03o}"
    interrupts = Interrupts()
    interrupts.install()
    adopt_orphans()

    def ready() -> None:
        with suppress(BrokenPipeError):  # its launcher was interrupted; the attempt has begun, and ends in order
            os.write(descriptor, READY)
        os.close(descriptor)

    if "steps" in run_store.record().spec:
        from sm_llm.launcher.backends.local.workflow import run_workflow

        return EXIT_CODES[run_workflow(run_store, interrupts, on_started=ready, folder=folder).state]
    return EXIT_CODES[run_attempt(run_store, interrupts, on_started=ready, folder=folder).state]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
