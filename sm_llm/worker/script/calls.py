"""What a user's own program may call inside a script job; anywhere else these functions do nothing.

::

    import sm_llm

    sm_llm.log(step, loss=loss, learning_rate=rate)      # rank 0 writes it; metrics(), plots and status show it
    sm_llm.publish("checkpoints/step-100", step=100)     # on every process, once the folder is complete
"""

from __future__ import annotations

import operator
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, SupportsFloat, SupportsIndex

from sm_llm.contract.program import ATTEMPT, EVENTS, HANDOVER
from sm_llm.errors import StorageError
from sm_llm.runs.events.events import EventWriter, Logged, Notice
from sm_llm.storage.files import link_tree, walk_files
from sm_llm.worker.script.plain_files import sentences

_MOST_STEPS = 2**63
# Names of a row of metrics that are not the program's.
_RESERVED = ("attempt",)
# A folder that was handed over, and one that the publisher has taken.
_HANDED = re.compile(r"(?:\.taken-|\.sealed-)?([0-9]+)")


def log(step: SupportsIndex, **values: SupportsFloat) -> None:
    """Record named numbers of ``step`` and print them; rank 0's are taken, other processes' calls do nothing.

    ``loss`` and ``learning_rate`` are shown like those of our own trainer; ``sm-llm metrics`` has all of them. A call
    without values records nothing and prints that. Raises ``TypeError`` for a step or value that is not a number, and
    ``ValueError`` for a negative step and for a value named ``attempt``, which a row has already.
    """
    step = _whole(step)
    if taken := [name for name in values if name in _RESERVED]:
        raise ValueError(f"{taken[0]} is a column that every row of metrics has already. Give the value another name")
    path = os.environ.get(EVENTS)
    if path is None or ATTEMPT not in os.environ:
        return
    numbers = {name: _number(name, value) for name, value in values.items()}
    if not numbers:
        _warn(f"sm_llm.log({step}) has no values: nothing is recorded. Write sm_llm.log({step}, loss=loss)")
        return
    _write(path, Logged(step, numbers))
    words = [f"Loss: {value:.4f}" if name == "loss" else f"{name} {value:.6g}" for name, value in numbers.items()]
    print(" | ".join([f"step {step}", *words]), flush=True)


def _write(path: str, event: Logged | Notice) -> None:
    writer = EventWriter(Path(path), int(os.environ[ATTEMPT]))
    try:
        writer.write(event)
    finally:
        writer.close()


def _warn(text: str) -> None:
    """Print a warning, and log it, so that whoever follows the run sees it, too."""
    print(f"warning: {text}", flush=True)
    if (path := os.environ.get(EVENTS)) is not None and ATTEMPT in os.environ:
        _write(path, Notice(text, "warning"))


def _whole(step: SupportsIndex | str) -> int:
    """A step as an integer; of a program's arguments it is text."""
    if isinstance(step, str) and step.isascii() and step.isdigit():
        step = int(step)
    if isinstance(step, bool | str) or not hasattr(step, "__index__"):
        raise TypeError(f"step must be a whole number, got {step!r}")
    found = operator.index(step)
    if not 0 <= found < _MOST_STEPS:
        raise ValueError(f"step must be at least 0 and less than 2**63, got {found}")
    return found


def _number(name: str, value: SupportsFloat) -> float:
    if isinstance(value, str) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def publish(folder: str | os.PathLike[str], step: SupportsIndex) -> None:
    """Hand a finished folder over as the checkpoint of ``step``; it is published while the program continues.

    Every process calls it after the save is complete; each node's files become part of one checkpoint, which exists
    once all are stored. The folder may be deleted afterwards, but no file in it changed. After a restart it is back in
    the checkpoint folder, under its own name. A step that was handed over before, and one below it or below the step
    that the run continues from, is not published: a warning names it.

    Raises ``TypeError`` for a step that is not a whole number, ``ValueError`` for a negative one, and ``StorageError``
    for a folder that is not there, is a file or holds no file, and when this node's files came too late to be part of
    the checkpoint of this step.
    """
    step = _whole(step)
    handover = os.environ.get(HANDOVER)
    # One process hands over for its node: all of them see the same folder.
    if handover is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    source, target = Path(folder).resolve(), Path(handover) / str(step)
    if not source.is_dir():
        problem = "is a file, not a folder" if source.exists() else "is not there"
        raise StorageError(f"{source}: {problem}: nothing is published for step {step}")
    try:
        if not holds_file(source):
            raise StorageError(f"{source}: holds no file to publish")
    except OSError as error:
        raise StorageError(f"{source}: cannot be read: {error.strerror}") from error
    late = closed(Path(handover), step)
    if not late.exists():
        if step <= (newest := newest_handed(Path(handover))):
            why = f"step {newest} is newer" if step < newest else "a folder was handed over for this step before"
            _warn(f"{source} is not published as step {step}: {why}")
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


def newest_handed(handover: Path) -> int:
    """The newest step that this node has handed over, or that the run continues from; -1 if there is none."""
    names = [it.name for it in handover.iterdir()] if handover.is_dir() else []
    found = [int(match[1]) for name in names if (match := _HANDED.fullmatch(name))]
    with suppress(FileNotFoundError, ValueError):
        found.append(int((handover / TAKEN).read_text(encoding="ascii")))
    return max(found, default=-1)


TAKEN = ".newest-taken"
"""File in which the publisher names the newest step that needs no more files of this node."""
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
