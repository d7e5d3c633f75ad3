"""Storage addresses: what a URI means, how to go below it, and the store behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sm_llm.bucket_names import bucket_problem
from sm_llm.errors import StorageRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.storage.base import Store
    from sm_llm.storage.s3.s3_options import S3Options

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}?|\}")
_STEP = re.compile(r"[0-9]{1,18}")
_SLASHES = re.compile("/{2,}")


@dataclass(frozen=True)
class Location:
    """A parsed URI: scheme ``file`` with ``path`` (absolute), or ``s3`` with ``bucket`` and ``prefix``."""

    scheme: str
    path: Path | None = None
    bucket: str | None = None
    prefix: str = ""

    @property
    def uri(self) -> str:
        """The canonical text: a plain absolute path for folders, without a closing "/"."""
        if self.path is not None:
            return str(self.path)
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def fill(uri: str, *, run_name: str) -> str:
    """``uri`` with ``{run_name}``, the one known placeholder, replaced."""
    return uri.replace("{run_name}", run_name)


def parse(uri: str | Path) -> Location:
    """What ``uri`` points at: a folder path (``~`` is expanded), ``file://…`` or ``s3://bucket/prefix``.

    Raises ``StorageError`` for an empty address, an unknown scheme, a placeholder that nobody filled, or a
    malformed bucket or file URI. A remote address never turns into a local folder of that name.
    """
    text = str(uri)
    if not text.strip():
        raise StorageRefused("storage address: is empty. Give a folder, for example ./runs")
    if left := _PLACEHOLDER.search(text):
        raise StorageRefused(
            f"storage address: {left[0]!r} in {text!r} is not filled in. Only {{run_name}} is known, "
            "and only where a run's storage is named"
        )
    match = _SCHEME.match(text)
    if match is None:
        return _parse_path(text)
    scheme = match[1].lower()
    if scheme == "file":
        return _parse_file(text)
    if scheme == "s3":
        return _parse_s3(text)
    raise StorageRefused(
        f"storage address: unknown scheme {match[1]!r} in {text!r}. Known: a folder path, file://, s3://"
    )


def _parse_path(text: str) -> Location:
    # "s3:/bucket" is what pathlib makes of "s3://bucket": a folder of that name would hide a lost upload.
    if re.match(r"[A-Za-z0-9+.-]+:/", text):
        raise StorageRefused(f"storage address: {text!r} has one slash after the scheme. Write two")
    return Location("file", path=Path(text).expanduser().absolute())


def is_s3(uri: str) -> bool:
    """Whether an address that was parsed before is one of S3."""
    return uri.startswith("s3://")


def _parse_file(text: str) -> Location:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise StorageRefused(f"storage address: {text!r} names a host. Write file:///absolute/folder")
    return Location("file", path=Path(unquote(parts.path)))


def _parse_s3(text: str) -> Location:
    bucket, _, prefix = text[len("s3://") :].partition("/")
    if problem := bucket_problem(bucket):
        # The name alone is not shown: only in a whole address are credentials known.
        raise StorageRefused(f"storage address: {text!r} names no valid bucket: a name {problem}")
    folders = prefix.rstrip("/").split("/")
    if folders != [""] and any(folder in ("", ".", "..") for folder in folders):
        raise StorageRefused(
            f"storage address: {text!r} holds an empty folder, '.' or '..', which S3 takes for names. Write it without"
        )
    return Location("s3", bucket=bucket, prefix="/".join(folders))


def flattened(uri: str) -> str:
    """An ``s3://`` address in which a pipeline has joined values, with empty folders left out.

    A value may be an address itself: ``s3://bucket/run/s3://other/data`` means ``s3://bucket/run/s3:/other/data``.
    """
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{_SLASHES.sub('/', rest)}".rstrip("/") if scheme == "s3" else uri


def run_and_step(address: str) -> tuple[str, int | None]:
    """``RUN@40`` -> ``RUN``, 40; without a step None."""
    run, at, step = address.rpartition("@")
    return (run, int(step)) if run and at and _STEP.fullmatch(step) else (address, None)


def join(uri: str | Path, *parts: str) -> str:
    """The address below ``uri``; parts are relative, with "/". Raises ``StorageError`` for a part that climbs out."""
    location = parse(uri)
    below = PurePosixPath(*parts)
    # An absolute part would replace everything before it, the run's address included.
    if below.is_absolute() or ".." in below.parts:
        raise StorageRefused(f"storage address: {str(below)!r} does not stay below {location.uri!r}")
    if location.path is not None:
        return str(location.path / below)
    return f"{location.uri}/{below}" if below.parts else location.uri


def open_store(
    uri: str | Path,
    options: S3Options | Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Store:
    """The store at ``uri``; touches nothing. Raises ``StorageError`` for what ``parse`` refuses.

    ``options`` hold how S3 is reached: an ``S3Options``, or the ``storage_options`` of a specification as a mapping.
    A folder needs none. ``config`` overrides settings of ``botocore.config.Config`` (timeouts, retries).
    """
    location = parse(uri)
    if location.path is not None:
        from sm_llm.storage.folder import FolderStore

        return FolderStore(location.path)
    from sm_llm.storage.s3.s3_options import S3Options
    from sm_llm.storage.s3_store import S3Store

    assert location.bucket is not None
    return S3Store(location.bucket, location.prefix, S3Options.of(options), config)
