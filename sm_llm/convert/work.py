"""Runs the units of a conversion on several workers, continues an interrupted one, and checks the disk first."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import ConversionError, ConversionRefused, Issue
from sm_llm.models.safetensors_folder import SHARDS as SHARDS
from sm_llm.storage.checksum import Crc64
from sm_llm.storage.files import fsync_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sm_llm.convert.report import Progress

DESTINATION = "DST"
MANIFEST = "conversion.json"
"""Beside what was written; with it a conversion is complete."""
_JOURNAL = ".conversion.jsonl"
PARTIAL = ".partial"
"""Ends the name of a file that is being written."""
_SPARE_BYTES = 16 << 20

Result = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One piece of work: it makes ``file`` (below the destination; "" for none) of about ``size`` bytes.

    ``run`` gets a function that counts bytes, and returns what the manifest needs: ``tensors`` with their checksums,
    and ``bytes`` of a file. ``read`` gives the tensors of a file that is there already, with their bytes.
    """

    name: str
    file: str
    size: int
    run: Callable[[Callable[[int], None]], Result]
    read: Callable[[], Mapping[str, Iterable[memoryview]]] | None = None

    def is_readable(self) -> bool:
        """Whether the file is there and has its structure to the end; the bytes of its tensors are not read."""
        try:
            return self.read is not None and bool(self.read())
        except (ConversionError, OSError, ValueError):
            return False


class Journal:
    """What is done already at a destination, one line per unit; gone when the conversion is complete.

    Raises ``ConversionRefused`` where the destination holds anything else, or where another process writes it.
    """

    def __init__(self, destination: Path, identity: Mapping[str, Any]) -> None:
        self.destination = destination
        self._digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._path = destination / _JOURNAL
        self._done: dict[str, Result] = {}
        self._is_mine = self._is_new = False
        self._descriptor = -1

    @contextlib.contextmanager
    def open(self) -> Iterator[Journal]:
        """Claim the destination for the duration of the block."""
        self._check()
        self._is_new = not self.destination.exists()
        self.destination.mkdir(parents=True, exist_ok=True)
        # The lock is not held yet, and another process may be writing this file: nothing may be truncated here.
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            self._remove_folders()
            raise
        try:
            self._claim()
            yield self
        # Any end, an interrupt included, must leave the destination usable for the next call.
        except BaseException:
            self._withdraw()
            raise
        finally:
            os.close(self._descriptor)

    def may_have(self, unit: Unit) -> bool:
        """Whether an earlier process finished this unit and its file is there."""
        return unit.name in self._done and (not unit.file or (self.destination / unit.file).is_file())

    def done(self, unit: Unit) -> Result | None:
        """The result of a unit that an earlier process finished, if its file has the same content.

        The file is read: after a crash of the machine its name and size may be there without its bytes.
        """
        if not self.may_have(unit):
            return None
        found = self._done[unit.name]
        if unit.read is None:
            return found
        try:
            sums = {name: checksum(pieces) for name, pieces in unit.read().items()}
        except (ConversionError, OSError, ValueError):
            return None
        return found if sums == found["tensors"] else None

    def add(self, unit: Unit, result: Result) -> None:
        """Note a finished unit. Thread-safe: a line is one write."""
        line = json.dumps({"unit": unit.name, "result": result}) + "\n"
        self._done[unit.name] = result
        os.write(self._descriptor, line.encode())

    def complete(self) -> None:
        """Forget the journal: the manifest is written."""
        # The manifest's name must be on the device before the journal goes.
        fsync_path(self.destination)
        self._path.unlink()

    @property
    def is_there(self) -> bool:
        """Whether the destination holds a journal: what is there is not complete."""
        return self._path.exists()

    @property
    def digest(self) -> str:
        """Of source and settings: what an interrupted conversion must have in common with the one that continues it."""
        return self._digest

    def _withdraw(self) -> None:
        """Leave no trace of a conversion that finished no unit: another one may take the destination."""
        if self._is_mine and not self._done:
            self._path.unlink()
            self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in (self.destination / SHARDS, *([self.destination] if self._is_new else [])):
            with contextlib.suppress(OSError):  # it holds something, or was never made
                folder.rmdir()

    def _check(self) -> None:
        if not self.destination.exists() and not self.destination.is_symlink():
            return
        if not self.destination.is_dir():
            raise ConversionRefused(
                [Issue("destination-not-a-folder", DESTINATION, "must be a folder", str(self.destination))]
            )
        # A journal marks a conversion of ours; ``_claim`` compares whose.
        if self._path.exists() or not (found := sorted(it.name for it in self.destination.iterdir())):
            return
        problem = f"{self.destination} is not empty ({', '.join(found[:4])}{' …' if len(found) > 4 else ''})"
        raise ConversionRefused(
            [Issue("destination-not-empty", DESTINATION, problem, remedy="Name a new folder, or remove this one")]
        )

    def _claim(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = f"{self.destination} is being written by another process"
            raise ConversionRefused(
                [Issue("destination-in-use", DESTINATION, problem, remedy="Wait for it, or name another")]
            ) from None
        self._is_mine = True
        # Without the text behind the last newline: a crash may have cut off the line there.
        lines = [it for it in self._path.read_text(encoding="utf-8").split("\n")[:-1] if it]
        if not lines:
            os.write(self._descriptor, (json.dumps({"identity": self._digest}) + "\n").encode())
            return
        entries = [entry for it in lines if (entry := _entry(it)) is not None]
        if not entries or entries[0].get("identity") != self._digest:
            # The journal belongs to the other conversion: ``_withdraw`` must not remove it.
            self._is_mine = False
            problem = f"{self.destination} holds an unfinished conversion of other weights or with other settings"
            raise ConversionRefused(
                [
                    Issue(
                        "destination-of-another-conversion",
                        DESTINATION,
                        problem,
                        remedy="Name a new folder, or remove this one",
                    )
                ]
            )
        self._done = {str(it["unit"]): it["result"] for it in entries[1:] if "unit" in it}
        # A line that was cut off must not swallow the next one.
        os.write(self._descriptor, b"\n")


def _entry(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def run_units(
    units: Sequence[Unit], journal: Journal, *, workers: int, progress: Progress | None
) -> tuple[dict[str, Result], list[str]]:
    """Run what is not done; returns unit -> result, and the names of units that were done before.

    Raises ``ConversionRefused`` if the disk cannot hold the rest, or what a unit raises; no further one begins then.
    """
    # For the estimate of space only; ``done`` reads the files that are there, in the workers.
    left = [unit for unit in units if not journal.may_have(unit)]
    check_space(journal.destination, sum(unit.size for unit in left if unit.file))
    counter = _Counter(sum(it.size for it in units), progress)

    def run(unit: Unit) -> tuple[Unit, Result, bool]:
        if (found := journal.done(unit)) is not None:
            counter.add(unit.size)
            return unit, found, True
        result = unit.run(counter.add)
        journal.add(unit, result)
        return unit, result, False

    results: dict[str, Result] = {}
    before: list[str] = []
    pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
    try:
        # As they complete, so that the first error stops the others wherever its unit stands in the order.
        for future in as_completed([pool.submit(run, unit) for unit in units]):
            unit, results[unit.name], is_old = future.result()
            before += [unit.name] if is_old else []
        _flush(journal.destination, pool)
    finally:
        # Units that run raise at their next piece; units that wait are cancelled below.
        counter.stop()
        pool.shutdown(wait=True, cancel_futures=True)
    return results, before


def _flush(destination: Path, pool: ThreadPoolExecutor) -> None:
    """Everything below ``destination`` on the device, folders last. Raises ``OSError``.

    Once for all files: their bytes are on the way since each was closed, and a file system that is asked for every
    file by itself waits for its journal each time.
    """
    found = [Path(folder, name) for folder, _, names in os.walk(destination) for name in names]
    for _ in pool.map(fsync_path, found):
        pass
    for folder in {path.parent for path in found}:
        fsync_path(folder)


def checksum(pieces: Iterable[memoryview]) -> str:
    """CRC64NVME of bytes in pieces."""
    crc = Crc64()
    for piece in pieces:
        crc.update(piece)
    return crc.hexdigest()


class _Counter:
    """Bytes of all workers together; raises in the workers once the conversion has stopped."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()
        self._is_stopped = False

    def add(self, count: int) -> None:
        if self._is_stopped:
            raise ConversionError("stopped")
        with self._lock:
            self._done = min(self._done + count, self._total)
            if self._progress is not None:
                self._progress(self._done, self._total)

    def stop(self) -> None:
        self._is_stopped = True


def check_space(destination: Path, needed: int) -> None:
    """Raise ``ConversionRefused`` where the disk of ``destination`` has fewer than ``needed`` bytes free."""
    nearest = destination.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    free = shutil.disk_usage(nearest).free
    # Where nothing is left to write, a full disk is no reason to refuse.
    if needed and free < needed + _SPARE_BYTES:
        problem = f"no space: {nearest} has {free / 2**30:.2f} GiB free, {needed / 2**30:.2f} GiB are needed"
        raise ConversionRefused(
            [Issue("destination-without-space", DESTINATION, problem, remedy="Free some space, or name another disk")]
        )


def write_whole(path: Path, body: bytes) -> None:
    """Write a small file under its partial name, flush it and rename it. Raises ``OSError``."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
