"""What a user's own program may call inside a script job; anywhere else these functions do nothing.

::

    import sm_llm

    sm_llm.log(step, loss=loss, learning_rate=rate)      # rank 0 writes it; metrics(), plots and status show it
    sm_llm.publish("checkpoints/step-100", step=100)     # on every process, once the folder is complete
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path
from typing import SupportsFloat

from sm_llm.contract.events import EventWriter, Logged
from sm_llm.contract.program import ATTEMPT, EVENTS, HANDOVER
from sm_llm.errors import StorageError


def log(step: int, **values: SupportsFloat) -> None:
    """Record named numbers of ``step`` and print them; rank 0's are taken, other processes' calls do nothing.

    ``loss`` and ``learning_rate`` are shown like those of our own trainer.
    """
    path, attempt = os.environ.get(EVENTS), os.environ.get(ATTEMPT)
    if path is None or attempt is None:
        return
    numbers = {name: float(value) for name, value in values.items()}
    writer = EventWriter(Path(path), int(attempt))
    try:
        writer.write(Logged(step, numbers))
    finally:
        writer.close()
    words = [f"Loss: {value:.4f}" if name == "loss" else f"{name} {value:.6g}" for name, value in numbers.items()]
    print(" | ".join([f"step {step}", *words]), flush=True)


def publish(folder: str | os.PathLike[str], step: int) -> None:
    """Hand a finished folder over as the checkpoint of ``step``; it is published while the program goes on.

    Every process calls it after the save is complete; each node's files become part of one checkpoint, which exists
    once all are stored. The folder may be deleted afterwards, but no file in it changed. After a restart it is back in
    the checkpoint folder, under its own name. Raises ``StorageError`` for a folder that holds no file, and when the
    checkpoint of this step was published without this node's files, which came too late.
    """
    place = os.environ.get(HANDOVER)
    if place is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    source, target = Path(folder).resolve(), Path(place) / str(step)
    if not any(path.is_file() for path in source.rglob("*")):
        raise StorageError(f"{source}: holds no file to publish")
    if closed(Path(place), step).exists():
        raise StorageError(f"step {step} was published without {source}: hand it over within {LATE_SECONDS:.0f} s")
    if target.exists():
        return
    copying = target.with_name(f".{step}-{secrets.token_hex(4)}")
    link_tree(source, copying / source.name)
    copying.rename(target)


LATE_SECONDS = 120.0
"""How long after the first node the others may hand over a step."""


def closed(place: Path, step: int) -> Path:
    """Marks a step to which nothing can be added any more."""
    return place / f".closed-{step}"


def link_tree(source: Path, target: Path) -> None:
    """The files of ``source`` below ``target``, as hard links where that works; a link in it becomes its content."""
    for current, _, names in os.walk(source, followlinks=True):
        there = target / Path(current).relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        for name in names:
            origin = Path(current, name)
            try:
                os.link(origin.resolve(), there / name)
            except OSError:
                shutil.copy2(origin, there / name)


def quiet_since(folder: Path) -> float:
    """Seconds since anything below ``folder`` changed."""
    newest = folder.stat().st_mtime
    for current, _, names in os.walk(folder):
        for name in [*names, "."]:
            newest = max(newest, Path(current, name).stat().st_mtime)
    return time.time() - newest
