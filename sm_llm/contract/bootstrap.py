"""On a plain AWS image: installs what it lacks, once per node, before anything of it is imported.

Only the standard library is used here, by the modules that this one imports as well, and boto3 where wheels come from
S3: AWS's images have it. Packages go into a folder of their own that comes first on the path of this job alone; nothing
of the image is changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import LOCK_FILE, WHEELHOUSE, WHOLE_ENVIRONMENT
from sm_llm.errors import StorageError
from sm_llm.owned import PRIVATE, opener, temporary_folder
from sm_llm.storage.s3.listing import object_pages
from sm_llm.storage.s3.listing_text import note_problems
from sm_llm.storage.stored_names import usable

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

# What the worker imports first; the lock brings them and what they need.
_NEEDED = ("pydantic", "yaml")


def install_missing(
    script: str, environ: MutableMapping[str, str] = os.environ, run: Callable[..., object] = subprocess.run
) -> None:
    """Make the packages of the lock beside ``script`` importable, here and in all programs that this one starts.

    Ends the process with one line that names the remedy, where they cannot be installed or are still missing.
    """
    lock = Path(script).resolve().with_name(LOCK_FILE)
    if lock.is_file() and WHOLE_ENVIRONMENT not in environ:
        try:
            own = temporary_folder()
        except PermissionError as error:
            raise SystemExit(f"sm_llm: {error}. Set TMPDIR to a folder of your own") from None
        # By the content of the lock: another release, or another stack of images, has a folder of its own.
        folder = own / f"packages-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
        _install_once(lock, folder, environ, run)
        sys.path.insert(0, str(folder))
        # torchrun's workers are processes of their own and inherit only the environment.
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH")]))
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"sm_llm: this image has no {', '.join(missing)}. Launch with backend.image=stock, which installs what is "
            "missing, or build an image that has it: sm-llm image build"
        )


def _install_once(lock: Path, folder: Path, environ: MutableMapping[str, str], run: Callable[..., object]) -> None:
    """The node's first process installs, the others wait for it. What is not as it was installed is installed anew."""
    installed = folder.with_suffix(".digest")
    with open(folder.with_suffix(".lock"), "w", opener=opener) as held:
        # The digest is read under the lock: before that, another process may be in the middle of an installation.
        fcntl.flock(held, fcntl.LOCK_EX)
        if not installed.is_file() or not folder.is_dir() or installed.read_text(encoding="utf-8") != _digest(folder):
            # The digest goes first and comes last: a process that is killed in between leaves none, and the next
            # installs.
            installed.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(PRIVATE)
            _install(lock, folder, environ.get(WHEELHOUSE), run)
            with open(installed, "w", encoding="utf-8", opener=opener) as stream:
                stream.write(_digest(folder))


def _digest(folder: Path) -> str:
    """SHA-256 over owners, names and contents of all files, but those that Python compiles as it runs."""
    whole = hashlib.sha256()
    # Sorted, because the order of a folder's entries differs between file systems.
    for path in sorted(it for it in folder.rglob("*") if it.parent.name != "__pycache__"):
        whole.update(f"{path.relative_to(folder)}\0{path.lstat().st_uid}\0".encode("utf-8", "surrogateescape"))
        # A link counts by where it leads, so one that was bent is noticed without following it.
        if path.is_symlink():
            whole.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            with path.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def _install(lock: Path, folder: Path, wheelhouse: str | None, run: Callable[..., object]) -> None:
    # ``-P``: no file of the working folder is taken for a module of pip's. ``--no-deps``: the lock lists everything,
    # and a dependency on torch would bring another build than the image's.
    command = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command += ["--upgrade", "--target", str(folder), "-r", str(lock)]
    with tempfile.TemporaryDirectory() as wheels:
        if wheelhouse:
            download_wheels(wheelhouse, Path(wheels))
            command += ["--no-index", "--find-links", wheels]
        try:
            run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            # pip states the cause in its last line.
            last = (error.stderr or "").strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
            raise SystemExit(
                f"sm_llm: cannot install the packages of {LOCK_FILE}: {last[0]}. A job without internet access needs "
                "backend.wheelhouse (sm-llm image wheelhouse fills one), or a built image"
            ) from None


def download_wheels(uri: str, folder: Path) -> None:
    """Bring the wheels below a prefix in S3 to a folder.

    Names that no file can have are reported and left where they are. Ends the process with one line if S3 does not
    answer, or answers with something else than whole listings, and for two wheels of one name.
    """
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = f"{prefix.rstrip('/')}/"
    try:
        client = boto3.client("s3")
        note_problems(client)
        pages = object_pages(client, bucket, prefix)
        keys = [it["Key"].removeprefix(prefix) for page in pages for it in page.get("Contents") or ()]
        for name in usable((it for it in keys if it.endswith(".whl")), uri):
            target = folder / name.rpartition("/")[2]
            if target.exists():
                raise StorageError(f"two wheels are called {target.name!r}; keep one")
            client.download_file(bucket, prefix + name, str(target))
    except (StorageError, Boto3Error, BotoCoreError, ClientError) as error:
        raise SystemExit(f"sm_llm: cannot bring the wheels of backend.wheelhouse={uri}: {error}") from None
