"""The code bundle of a managed job: one deterministic archive of this package, the entrypoints and the user's program.

The archive's root never holds a setup.py or a requirements.txt: the training toolkit would take the whole for a Python
package, which it refuses to start under torchrun, or install packages over those of the image.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import LOCK_FILE
from sm_llm.contract.job_file import entrypoint_source
from sm_llm.spec.tasks import TASK_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.launcher.planning.source_tree import SourceTree

SOURCE_FOLDER = "source"
"""Folder of the bundle with the user's program."""
ARCHIVE = "sourcedir.tar.gz"
_PACKAGE_SUFFIXES = (".py", ".yaml", ".txt", ".typed")
_EXECUTABLE = 0o111
# Half of the time of the highest level, for 1% more bytes.
_COMPRESSION = 6
_KEPT_BYTES = 1 << 24


@dataclass(frozen=True)
class Bundle:
    """The archive and its name. ``digest`` is the SHA-256 of what it holds, whatever compressed it."""

    archive: bytes
    digest: str
    unpacked_bytes: int
    file_count: int

    @property
    def key(self) -> str:
        """Where it lies below the folder of bundles."""
        return f"{self.digest}/{ARCHIVE}"


def make_bundle(source: SourceTree | None = None, lock: str | None = None) -> Bundle:
    """Pack this package, every entrypoint, the files of ``source`` and the lock of packages."""
    members: dict[str, bytes | Path] = {
        row.entrypoint: entrypoint_source(kind).encode() for kind, row in TASK_KINDS.items()
    }
    members |= package_files()
    if lock is not None:
        members[LOCK_FILE] = lock.encode()
    if source is not None:
        members |= {f"{SOURCE_FOLDER}/{name}": path for name, path in source.files.items()}
    plain = _tar(members)
    return Bundle(
        # A large program of the user's is not kept in memory.
        _compressed(plain) if len(plain) < _KEPT_BYTES else _compressed.__wrapped__(plain),
        # Of the plain archive, because another zlib compresses the same bytes differently.
        hashlib.sha256(plain).hexdigest(),
        len(plain),
        len(members),
    )


# The steps of a workflow have the same few bundles, and compression is most of what one costs.
@lru_cache(maxsize=8)
def _compressed(plain: bytes) -> bytes:
    return gzip.compress(plain, compresslevel=_COMPRESSION, mtime=0)


def local_source(source: str | None) -> SourceTree | None:
    """The files of a script's source folder; None for one that is not on this machine."""
    from sm_llm.launcher.planning.local_paths import local_folder
    from sm_llm.launcher.planning.source_tree import source_tree

    folder = local_folder(source)
    return source_tree(folder) if folder is not None and folder.is_dir() else None


def package_files() -> dict[str, bytes | Path]:
    """The files of this package by their name in the bundle."""
    package = Path(str(files("sm_llm")))
    found = (path for path in sorted(package.rglob("*")) if path.suffix in _PACKAGE_SUFFIXES and path.is_file())
    return {f"sm_llm/{path.relative_to(package).as_posix()}": path for path in found}


def _tar(members: Mapping[str, bytes | Path]) -> bytes:
    """An archive whose bytes follow from names and contents alone."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(members):
            member = members[name]
            body = member if isinstance(member, bytes) else member.read_bytes()
            executable = isinstance(member, Path) and member.stat().st_mode & _EXECUTABLE
            # No owner, no time and only two modes: equal files give an equal digest for every user and checkout.
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(body), 0o755 if executable else 0o644, 0
            archive.addfile(entry, io.BytesIO(body))
    return stream.getvalue()
