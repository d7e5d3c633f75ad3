"""Opens a shell where a run is running."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, NoReturn, cast

from sm_llm.errors import SubmitError
from sm_llm.launcher.backend import OpensShells
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run


def shell_command(run: Run, node: int = 0) -> list[str]:
    """The command that opens a shell on a node of a run's newest attempt.

    Raises ``SubmitError`` if the run is not running or, on SageMaker, was started without
    ``backend.remote_debug=true``.
    """
    attempts = run.attempts
    if not attempts:
        raise SubmitError(f"{run.id} was never started")
    target = run.backend
    if not isinstance(target, OpensShells):
        raise SubmitError(f"{run.uri}: a run of the backend {target.name} is in no container that a shell could enter")
    return target.shell_command(run.run_store, attempts[-1].native_id, node)


def shell(run: Run, node: int = 0) -> NoReturn:
    """Become that shell. Raises ``SubmitError`` also where its program is not installed, naming the command."""
    argv = shell_command(run, node)
    if shutil.which(argv[0]) is None:
        needs = cast("OpensShells", run.backend).shell_needs
        raise SubmitError(f"{argv[0]} is not installed. It needs {needs}. The command: {quoted(*argv)}")
    # Replaced, not started: signals and the terminal then belong to the session alone.
    os.execvp(argv[0], argv)
