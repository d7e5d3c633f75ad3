"""The detached process that runs one local run, a job or a workflow.

``python -m sm_llm.launcher.supervisor FOLDER FD`` holds the run's lock, starts the nodes, passes signals on, and
records how the attempt ended. It lives on when the terminal that launched it goes away. ``FD`` is a pipe on which it
says that it has begun.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.run_paths import RunPaths
from sm_llm.contract.run_record import RunRecord
from sm_llm.contract.states import EXIT_CODES
from sm_llm.launcher.attempt import run_attempt
from sm_llm.launcher.local_run import READY
from sm_llm.launcher.processes import Interrupts, adopt_orphans

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Supervise the run in folder ``arguments[0]``; returns the exit code of its final state."""
    root, descriptor = Path(arguments[0]), int(arguments[1])
    interrupts = Interrupts()
    interrupts.install()
    adopt_orphans()

    def ready() -> None:
        os.write(descriptor, READY)
        os.close(descriptor)

    if "steps" in RunRecord.read(RunPaths(root).record).spec:
        from sm_llm.launcher.workflow import run_workflow

        return EXIT_CODES[run_workflow(root, interrupts, on_started=ready).state]
    return EXIT_CODES[run_attempt(root, interrupts, on_started=ready).state]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
