"""The user's sync, and what is printed of it and of a fetch; both end cleanly on a signal."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from sm_llm.storage.syncing.sync import sync
from sm_llm.storage.syncing.sync_settings import SyncReport
from sm_llm.terminal import counted, duration, echo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from sm_llm.storage.hub.hub_fetch import FetchReport

__all__ = [
    "SyncReport",
    "fetch_lines",
    "report_lines",
    "shown",
    "stopping_on_signals",
    "sync",
]

# Without a terminal, how often a long copy logs its progress.
_PLAIN_SECONDS = 10.0


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does: engines cancel, open uploads are aborted, half-fetched files stay."""

    def stop(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)  # as a shell codes an end by a signal

    # Python sets signal handlers in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        echo("interrupted; the same command continues", err=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Any]:
    """A progress callback: a live line with bytes, bytes/s and ETA in a terminal, else a line now and then."""
    if not console.is_terminal:
        yield _Plain(console)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Plain:
    """Logs the progress of a copy every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._printed_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._printed_at < _PLAIN_SECONDS or not done:
            return
        self._printed_at = now
        speed = done / (now - self._began)
        left = duration((total - done) / speed)
        self._console.print(f"{size(done)} of {size(total)}, {size(int(speed))}/s, {left} left")


def report_lines(report: SyncReport, *, dry_run: bool = False) -> Iterator[str]:
    """What a sync did, in words."""
    yield from report.engines
    for it in report.left_out:
        yield f"left out ({it.reason}): {counted(it.files, 'file')}, {size(it.size)}"
    for path in report.unverified:
        yield f"not verified (S3 keeps no checksum of it): {path}"
    if report.unchanged:
        yield f"unchanged: {counted(report.unchanged, 'file')}, {size(report.unchanged_size)}"
    speed = f", {size(int(report.copied_size / report.seconds))}/s" if report.seconds > 0 and not dry_run else ""
    did = "would copy" if dry_run else "copied and verified"
    yield f"{did}: {counted(len(report.copied), 'file')}, {size(report.copied_size)}{speed} -> {report.destination}"


def fetch_lines(report: FetchReport) -> Iterator[str]:
    """What a fetch did, in words."""
    yield f"{report.source} is commit {report.commit}"
    for it in report.left_out:
        yield f"left out ({it.reason}): {counted(it.files, 'file')}, {size(it.size)}"
    if report.unchanged:
        yield f"there already: {counted(report.unchanged, 'file')}, {size(report.unchanged_size)}"
    speed = f", {size(int(report.copied_size / report.seconds))}/s" if report.seconds > 0 else ""
    copied = f"{counted(len(report.copied), 'file')}, {size(report.copied_size)}{speed}"
    yield f"fetched and verified: {copied} -> {report.destination}"


def size(count: int) -> str:
    """Bytes for the eye, in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
