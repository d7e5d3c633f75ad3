"""The SageMaker toolkit above this process: what it sets that NCCL must not see, and what its end means."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.hyperparameters import TOOLKIT_ENVIRONMENT
from sm_llm.errors import RunFailed
from sm_llm.owned import make_folders, opener

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, MutableMapping

    from sm_llm.worker.context import WorkerContext

_POLL_SECONDS = 0.25
# The toolkit forces the first to ``simple``, which costs small messages their fast protocols, and the second where
# kernels since 5.15 are slowed by it. Its NCCL_IB_DISABLE=1 stays: NCCL takes EFA's devices for InfiniBand.
_FORCED = ("NCCL_PROTO", "RDMAV_FORK_SAFE")
_FILTERS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def is_started_by_toolkit(environ: Mapping[str, str]) -> bool:
    """Whether the toolkit started this program, directly or below torchrun."""
    return TOOLKIT_ENVIRONMENT in environ


def is_child_of_toolkit(environ: Mapping[str, str]) -> bool:
    """Whether this process's parent is the toolkit itself."""
    return is_started_by_toolkit(environ) and "TORCHELASTIC_RUN_ID" not in environ


def settle_environment(
    environ: MutableMapping[str, str], wanted: Mapping[str, str], interfaces: Collection[str] | None = None
) -> None:
    """Remove what the toolkit forced and let the job's own ``environment`` win, before NCCL reads any of it.

    Raises ``RunFailed`` for an interface filter that leaves NCCL or gloo no interface, which would only hang.
    ``interfaces`` are the names of this node's, by default those of the kernel.
    """
    if is_started_by_toolkit(environ):
        for name in _FORCED:
            environ.pop(name, None)
        # The toolkit may have replaced variables that the job sets itself.
        environ.update(wanted)
    present = _interfaces() if interfaces is None else interfaces
    for name in _FILTERS:
        text = environ.get(name, "")
        if text and present and not passing(text, present):
            listed = ", ".join(sorted(present))
            raise RunFailed(f"{name}={text} leaves no network interface; this node has {listed}. Change or unset it")


def passing(text: str, interfaces: Collection[str]) -> list[str]:
    """The interfaces that pass a filter in NCCL's spelling: prefixes, ``=`` for whole names, ``^`` for all others."""
    excludes, text = text.startswith("^"), text.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    names = [part for part in text.split(",") if part]
    hits = [it for it in interfaces if any(it == name if exact else it.startswith(name) for name in names)]
    return [it for it in interfaces if it not in hits] if excludes else hits


def _interfaces() -> list[str]:
    folder = Path("/sys/class/net")
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def start_watch(context: WorkerContext, environ: Mapping[str, str]) -> None:
    """Take the toolkit's end for a request to stop: it passes no signal on.

    That helps where the container outlives it; where it is the container's first process, the kernel ends all.
    """
    if not is_started_by_toolkit(environ):
        return
    parent = os.getppid()
    # A process that loses its parent gets another one. Below torchrun it is torchrun's parent that counts.
    watched = "self" if is_child_of_toolkit(environ) else str(parent)
    toolkit = _parent(watched)

    def watch() -> None:
        pause = threading.Event()
        while _parent(watched) == toolkit:
            pause.wait(_POLL_SECONDS)
        # First: every print from here on would fail, the report of the stop included.
        redirect_output(context.container.failure.with_name("orphaned.log"))
        context.requests.warn("the end of the training toolkit")

    threading.Thread(target=watch, name="toolkit", daemon=True).start()


def _parent(process: str) -> int | None:
    """The parent of a process; None once the process itself is gone."""
    try:
        # Behind the last parenthesis: see proc(5); a program's name may hold parentheses.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def redirect_output(log: Path) -> None:
    """Print into ``log`` from now on: whoever read our output is gone, and a broken pipe is an error at every line."""
    make_folders(log.parent)
    descriptor = opener(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            # Below Python's streams, so that C libraries and child processes print there, too.
            os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
