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
from typing import NoReturn, SupportsFloat

from sm_llm.contract.program import ATTEMPT, EVENTS, HANDOVER
from sm_llm.errors import StorageError
from sm_llm.runs.events.events import EventWriter, Logged
from sm_llm.storage.files import link_tree, walk_files
from sm_llm.worker.script.plain_files import sentences


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
    """Hand a finished folder over as the checkpoint of ``step``; it is published while the program continues.

    Every process calls it after the save is complete; each node's files become part of one checkpoint, which exists
    once all are stored. The folder may be deleted afterwards, but no file in it changed. After a restart it is back in
    the checkpoint folder, under its own name. Raises ``StorageError`` for a folder that holds no file, and when this
    node's files came too late to be part of the checkpoint of this step.
    """
    handover = os.environ.get(HANDOVER)
    # One process hands over for its node: all of them see the same folder.
    if handover is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    step = int(step)
    source, target = Path(folder).resolve(), Path(handover) / str(step)
    if not holds_file(source):
        raise StorageError(f"{source}: holds no file to publish")
    late = closed(Path(handover), step)
    if not late.exists():
        # Handed over already, and not yet taken: a second call changes nothing.
        if target.exists():
            return
        # The publisher takes only folders named by a number. The rename makes all files appear at once, and hard links
        # keep them should the program delete its own folder.
        copying = target.with_name(f".{step}-{secrets.token_hex(4)}")
        for text in sentences(source, link_tree(source, copying / source.name)):
            print(f"warning: {text}", flush=True)
        copying.rename(target)
        # The publisher closes a step and then looks once more, this call hands over and then checks the mark: so files
        # that came between the two are either published or released here, with an error.
        if not late.exists() or not _withdrawn(target, copying):
            return
    raise StorageError(
        f"step {step}: {source} came too late to be part of its checkpoint; "
        f"hand it over within {LATE_SECONDS:.0f} s after the first node"
    )


def _withdrawn(target: Path, temporary: Path) -> bool:
    """Undo a handing over; False if the publisher has taken the files, for it takes them by a rename, too."""
    try:
        target.rename(temporary)
    except FileNotFoundError:
        return False
    shutil.rmtree(temporary, ignore_errors=True)
    return True


LATE_SECONDS = 120.0
"""How long after the first node the others may hand over a step."""


def closed(handover: Path, step: int) -> Path:
    """Marks a step of which this node had nothing in time: nothing can be added any more."""
    return handover / f".closed-{step}"


def holds_file(folder: Path) -> bool:
    """Whether there is a file anywhere below ``folder``; a link to nothing is none. Raises ``OSError``."""
    return any(it.path is not None for it in walk_files(folder))


def quiet_since(folder: Path) -> float:
    """Seconds since anything below ``folder`` changed; 0 if something vanishes while it is read.

    Raises ``OSError`` for what is there and cannot be read.
    """
    try:
        newest = folder.stat().st_mtime
        for current, _, names in os.walk(folder, onerror=_raise):
            # Folders count as well: a file that was removed changes nothing else.
            for name in [*names, "."]:
                newest = max(newest, _changed(Path(current, name)))
    except (FileNotFoundError, NotADirectoryError):
        return 0.0
    return time.time() - newest


def _changed(path: Path) -> float:
    """When a file changed, or, of a link that leads nowhere, the link."""
    try:
        # Through links, since their content is what is published.
        return path.stat().st_mtime
    except OSError:
        return path.lstat().st_mtime


def _raise(error: OSError) -> NoReturn:
    raise error
