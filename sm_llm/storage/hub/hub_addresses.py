"""The Hugging Face hub as a source: its addresses, what a revision holds, and its refusals in plain words."""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

from sm_llm.errors import StorageError, StorageRefused
from sm_llm.file_names import brought_problem, paths_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SCHEME = "hf://"
CONTROL_FOLDER = ".fetch"
"""Of what is fetched: the pin, and files in the making. No repository may bring a file of its own into it."""
# Only a full id pins: a short one, or a name, may mean another commit tomorrow.
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Large files (LFS) have a SHA-256, all others only the id that git gives their content.
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40}")
_ADDRESS = re.compile(
    r"hf://(?:(?P<kind>models|datasets)/)?(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/@]+))?(?:/(?P<path>.*))?"
)
# With pauses of 0.5, 1 and 2 seconds: longer outages are for the user to wait out.
_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.5
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HubAddress:
    """``hf://[datasets/]org/name[@revision][/path]``: ``kind`` is ``model`` or ``dataset``, ``path`` a part of it."""

    kind: str
    repository: str
    revision: str | None = None
    path: str = ""

    @property
    def uri(self) -> str:
        """The canonical text."""
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='/' if self._is_ref else '')}"
        path = f"/{self.path}" if self.path else ""
        return f"{SCHEME}{'datasets/' if self.kind == 'dataset' else ''}{self.repository}{revision}{path}"

    @property
    def _is_ref(self) -> bool:
        return (self.revision or "").startswith("refs/")

    @property
    def page(self) -> str:
        """The page of the repository, where its licence is accepted."""
        return f"{endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.repository}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: size in bytes, and ``sha256:…`` (large files) or ``git-sha1:…`` (of the git blob)."""

    path: str
    size: int
    checksum: str


@dataclass(frozen=True)
class HubSnapshot:
    """What ``address`` means, once and for all: a commit (40 hex digits) and every file of it."""

    address: HubAddress
    commit: str
    files: tuple[HubFile, ...]


def endpoint() -> str:
    """The hub that is asked: ``HF_ENDPOINT``, or the public one."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_hub(uri: str) -> bool:
    """Whether ``uri`` is an address on the hub."""
    return uri.startswith(SCHEME)


def parse_hub(uri: str) -> HubAddress:
    """The parts of an address. Raises ``StorageError`` for anything that is none."""
    match = _ADDRESS.fullmatch(uri)
    path = (match["path"] or "").strip("/") if match else ""
    if match is None or ".." in path.split("/"):
        raise StorageRefused(f"{uri!r} is not a hub address. Write {SCHEME}org/name@revision, or {SCHEME}datasets/…")
    kind = "dataset" if match["kind"] == "datasets" else "model"
    return HubAddress(kind, match["repository"], unquote(match["revision"]) if match["revision"] else None, path)


def look_up(address: HubAddress) -> HubSnapshot:
    """Ask the hub what the revision is now. Raises ``StorageError`` with the remedy if it does not answer."""
    hub = library(address)

    def ask() -> HubSnapshot:
        api = hub.HfApi(endpoint=endpoint())
        info = api.repo_info(address.repository, revision=address.revision, repo_type=address.kind)
        # Of the commit just found, and not of the revision: a branch may move between the two requests.
        tree = api.list_repo_tree(
            address.repository, recursive=True, revision=info.sha, repo_type=address.kind
        )  # fmt: skip
        return snapshot_of(address, info.sha, (_file(it) for it in tree if hasattr(it, "blob_id")))

    with hub_errors(address):
        return patiently(ask)


def _file(found: Any) -> HubFile:
    # For a file in LFS the blob is only a pointer to it.
    checksum = f"git-sha1:{found.blob_id}" if found.lfs is None else f"sha256:{found.lfs.sha256}"
    return checked_file(found.path, found.size, checksum)


def checked_file(path: Any, size: Any, checksum: Any) -> HubFile:
    """A file as a hub, or a pin that was written before, describes it. Raises ``StorageError`` for nonsense."""
    problem = brought_problem(path, [CONTROL_FOLDER]) if isinstance(path, str) else "it is not text"
    if problem:
        raise StorageError(f"it lists a file {path!r}, which cannot be fetched: {problem}")
    if type(size) is not int or size < 0 or not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
        raise StorageError(f"it lists {path!r} with the size {size!r} and the checksum {checksum!r}")
    return HubFile(path, size, checksum)


def snapshot_of(address: HubAddress, commit: Any, files: Iterable[HubFile]) -> HubSnapshot:
    """Raises ``StorageError`` for a commit that is none, and for files that cannot lie in one folder."""
    found = tuple(files)
    if problem := paths_problem(it.path for it in found):
        raise StorageError(f"it lists files that cannot lie in one folder: {problem}")
    return HubSnapshot(address, _checked_commit(commit), found)


def _checked_commit(commit: Any) -> str:
    """The id of a commit: 40 hex digits. Raises ``StorageError`` for anything else."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise StorageError(f"it names the commit {commit!r}, expected 40 hex digits")
    return commit


def config_file(address: HubAddress) -> Path:
    """The ``config.json`` of a model, in the hub's cache; from there alone where the hub cannot be reached.

    Raises ``StorageError`` like ``look_up``.
    """
    from sm_llm.reachable import connects

    hub = library(address)
    name = f"{address.path}/config.json" if address.path else "config.json"
    with hub_errors(address):
        if not hub.constants.HF_HUB_OFFLINE and not connects(endpoint()):
            kept = hub.try_to_load_from_cache(address.repository, name, revision=address.revision)
            if isinstance(kept, str):
                return Path(kept)
            raise StorageError(_not_reached("it accepts no connection"))
        found = hub.hf_hub_download(address.repository, name, revision=address.revision, endpoint=endpoint())
        return Path(found)


def library(address: HubAddress) -> Any:
    """``huggingface_hub``, without its progress bars. Raises ``StorageError`` where it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError as error:
        raise StorageError(f"{address.uri}: needs huggingface_hub ({error}). pip install huggingface_hub") from None
    hub: Any = huggingface_hub
    hub.utils.disable_progress_bars()
    return hub


def patiently(ask: Callable[[], _Result]) -> _Result:
    """``ask``, again after a pause while the hub is busy or not reached; the last error is raised."""
    for attempt in range(1, _TRIES + 1):
        try:
            return ask()
        except Exception as error:  # the library passes on whatever its network layer raises
            if attempt == _TRIES or not (_is_busy(error) or _is_network(error)):
                raise
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def _is_busy(error: Exception) -> bool:
    # Too many requests, or a fault of the hub: both pass.
    return _status(error) == 429 or _status(error) >= 500


def _is_network(error: Exception) -> bool:
    names = _names(error)
    return "OfflineModeIsEnabled" not in names and any(
        word in name for name in names for word in ("Connect", "Timeout", "Protocol", "NetworkError", "ChunkedEncoding")
    )


@contextmanager
def hub_errors(address: HubAddress) -> Iterator[None]:
    """Turn whatever the hub's library raises into one ``StorageError`` with the remedy."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{address.uri}: {error}") from error
    except Exception as error:
        raise StorageError(f"{address.uri}: {_reason(address, error)}") from error


def _reason(address: HubAddress, error: Exception) -> str:
    # By names of classes: the library renames and moves its exceptions between releases, and need not be installed.
    names, status = _names(error), _status(error)
    if "LocalEntryNotFoundError" in names and isinstance(error.__cause__, Exception):
        return _reason(address, error.__cause__)  # it reports that its cache does not have it, either
    if "OfflineModeIsEnabled" in names:
        return "the hub is not asked because HF_HUB_OFFLINE is set. Unset it, or name a folder or s3:// that holds it"
    # The order matters: a gated repository's error is a kind of ``RepositoryNotFoundError``, and a missing revision or
    # file has the status 404 of a missing repository.
    if "RevisionNotFoundError" in names:
        return f"there is no revision {address.revision or 'main'!r}. Its branches and tags: {address.page}/tree/main"
    if "GatedRepoError" in names or status == 403:
        return f"the hub refuses access ({status}). Accept the licence at {address.page}. {_about_token()}"
    if "EntryNotFoundError" in names:
        return f"it has no such file ({_words(error)})"
    if "RepositoryNotFoundError" in names or status in (401, 404):
        return (
            f"the hub shows no such {address.kind} ({status}): the name is wrong, or it is private or gated. "
            f"If its licence has to be accepted, do so at {address.page}. {_about_token()}"
        )
    if status:
        return f"the hub answered {status} ({_words(error)}). Try again later; what is fetched stays"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full: {error.strerror}. What is fetched stays; the same call continues"
    if _is_network(error) or isinstance(error, ConnectionError):
        return _not_reached(_words(error))
    return _words(error)


def _not_reached(why: str) -> str:
    return (
        f"the hub at {endpoint()} cannot be reached ({why}). Without a connection, name a folder or "
        "s3:// address that holds the files"
    )


def _about_token() -> str:
    from huggingface_hub import get_token

    if get_token() is None:
        return "No token was sent. Create one with read permission and refer to it: secrets.HF_TOKEN=env:HF_TOKEN"
    return (
        "The token that was sent is not enough: it must be valid, of an account that has access, and, if fine-grained, "
        "have the permission 'Read access to contents of all public gated repos you can access'"
    )


def _names(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
