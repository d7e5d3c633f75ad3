"""Checks before training whether checkpoints will have space, so that a full disk is found now and not after hours."""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from sm_llm.errors import CheckpointError
from sm_llm.storage.uri import is_s3

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.runtime.collectives import ControlGroup

_GIB = 2**30
# Saves that scratch holds at most: being written, waiting, being published.
_HELD = 3


@dataclass(frozen=True)
class Disk:
    """The file system below ``path``: ``name`` is the same for two paths that share one, ``free`` is in bytes."""

    name: str
    path: str
    free: int


def disk_of(path: Path) -> Disk:
    """The disk of ``path``, or of the nearest folder above it that exists. Raises ``OSError``."""
    # Folders of the run may not be made yet; the disk is that of what is there.
    while not path.exists() and path != path.parent:
        path = path.parent
    return Disk(f"{socket.gethostname()}:{path.stat().st_dev}", str(path), shutil.disk_usage(path).free)


def own_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of this process's part of a sharded state."""
    tensors = (value.to_local() if isinstance(value, DTensor) else value for value in state.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_space(context: WorkerContext, control: ControlGroup, own: int, keep_last: int) -> None:
    """Raise ``CheckpointError``, on all processes alike, where a disk has no space for one save. A collective.

    ``own`` are the bytes that this process writes of a save. It is written to each node's scratch and stored with the
    run, which takes space on a disk unless that is S3. Disks that cannot hold ``keep_last`` saves in storage and the
    one being written, or the three in scratch (one being written, one that waits, one being published) that a slow
    store makes, are warned of.
    """
    root = None if is_s3(context.job.run_uri) else disk_of(context.run.root)
    reported = control.gather((disk_of(context.scratch), root, own))
    scratches, storage = [(disk, size) for disk, _, size in reported], reported[0][1]
    whole = sum(size for _, size in scratches)
    if problem := lacking(scratches, storage, whole):
        raise CheckpointError(f"{problem}. Free some space, or put the run elsewhere")
    if storage is not None and storage.free < whole * (keep_last + 1):
        context.notice(
            f"{storage.path} has {storage.free / _GIB:.2f} GiB free: fewer than the checkpoints that "
            f"checkpoint.keep_last={keep_last} keeps ({whole / _GIB:.2f} GiB each), with the one being written",
            "warning",
        )
    if problem := lacking([(disk, _HELD * size) for disk, size in scratches], None, 0):
        context.notice(f"{problem}, should the store be so slow that {_HELD} saves are held there", "warning")


def lacking(scratches: Sequence[tuple[Disk, int]], storage: Disk | None, whole: int) -> str | None:
    """What has no space for one save: each process's bytes in its scratch, ``whole`` in storage, maybe on one disk."""
    # By disk: processes of one node share a scratch, and storage may be on the same disk.
    needed: Counter[str] = Counter() if storage is None else Counter({storage.name: whole})
    for disk, size in scratches:
        needed[disk.name] += size
    for disk in (*([storage] if storage is not None else []), *(disk for disk, _ in scratches)):
        if disk.free < needed[disk.name]:
            return (
                f"no space for a checkpoint: {disk.path} has {disk.free / _GIB:.2f} GiB free, "
                f"{needed[disk.name] / _GIB:.2f} GiB are needed there"
            )
    return None
