"""The hosts of a job as the container contract's resourceconfig.json names them, the same on every node."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import RunFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IN_ORDER = "sm_llm_in_order"
"""Field of resourceconfig.json, of our own: ``hosts`` are in the order of their nodes' ranks."""
RESOLVE_SECONDS = 120.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Hosts:
    """``names`` in numeric order (algo-2 before algo-10), whatever order the file has them in, unless it states
    that its order is that of the ranks."""

    current: str
    names: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Hosts | None:
        """None where the platform gives no such file. Raises ``RunFailed`` for one that names no hosts."""
        if not path.is_file():
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            # Sorted, so that all nodes number the hosts alike whatever order each was given. On Slurm ``node.py``
            # gives all nodes one order, in which those that stay keep their places over a restart.
            in_order = value.get(IN_ORDER) is True
            return cls(
                value["current_host"], tuple(value["hosts"] if in_order else sorted(value["hosts"], key=numeric))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RunFailed(f"{path}: does not name current_host and hosts ({error})") from error

    @property
    def leader(self) -> str:
        """The first host: global rank 0 runs there. It need not be algo-1."""
        return self.names[0]


def numeric(name: str) -> list[tuple[int, str]]:
    """Key that sorts names of hosts by the numbers in them."""
    # Pairs, because numbers and texts cannot be compared with each other: the first element decides between them.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def await_host(
    name: str,
    seconds: float = RESOLVE_SECONDS,
    *,
    resolve: Callable[[str], object] = socket.gethostbyname,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until ``name`` resolves: a fresh cluster's names come late. Raises ``RunFailed`` that names it."""
    deadline = clock() + seconds
    while True:
        try:
            resolve(name)
            return
        except OSError as error:
            if clock() >= deadline:
                raise RunFailed(f"the host {name!r} has no address after {seconds:.0f} s ({error})") from error
        sleep(_POLL_SECONDS)
