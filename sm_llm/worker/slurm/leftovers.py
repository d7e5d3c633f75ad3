"""Bounds what runs leave on a node's disk: checkpoints and staged inputs that a restart may still need.

Only the standard library is used here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEPT_SECONDS = 7 * 86_400.0
"""How long the folder of a run stays on a node that no longer works on it."""
_MARK = "in-use"


def use(base: Path) -> int:
    """Mark a run's folder on this node as in use until the descriptor that this returns is closed.

    Raises ``OSError``.
    """
    base.mkdir(0o700, parents=True, exist_ok=True)
    descriptor = os.open(base / _MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Shared: a step that is started again may meet the last seconds of the one before.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.utime(descriptor)
    return descriptor


def leave(descriptor: int) -> None:
    """The run no longer works on this node: from now on its folder ages."""
    with suppress(OSError):
        os.utime(descriptor)
    os.close(descriptor)


def sweep(of_user: Path, run_id: str, node: str, clock: Callable[[], float] = time.time) -> list[str]:
    """Remove this node's folders of other runs that nobody has used for ``KEPT_SECONDS``; returns those runs."""
    swept = []
    for run in sorted(of_user.iterdir()):
        folder = run / f"node-{node}"
        if run.name != run_id and folder.is_dir() and _is_abandoned(folder, clock()):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other nodes may share the disk
                run.rmdir()
            swept.append(run.name)
    return swept


def _is_abandoned(folder: Path, now: float) -> bool:
    try:
        descriptor = os.open(folder / _MARK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Of a release that set no mark.
        return now - folder.stat().st_mtime > KEPT_SECONDS
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return now - os.fstat(descriptor).st_mtime > KEPT_SECONDS
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
