"""Remembers, beside what is fetched, which commit a hub address stands for and which of its files are stored."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from sm_llm.errors import StorageError
from sm_llm.storage.hub.hub_addresses import HubSnapshot, checked_file, look_up, parse_hub, snapshot_of
from sm_llm.storage.publication.manifest import FileEntry

if TYPE_CHECKING:
    from sm_llm.storage.base import Store
    from sm_llm.storage.hub.hub_addresses import HubAddress, HubFile

_VERSION = 1
_PIN = "source.json"


@dataclass(frozen=True)
class Ledger:
    """Objects below ``prefix`` of ``store``, each written once: the pin ``source.json``, and a note per stored file."""

    store: Store
    prefix: str

    def pin(self, address: HubAddress) -> HubSnapshot:
        """The commit that ``address`` stood for when it was first asked about here, by whoever was first.

        A branch that moves later changes nothing. Raises ``StorageError`` if the place belongs to another address.
        """
        key = f"{self.prefix}{_PIN}"
        # The pin is of the whole repository: another path of it later is of the same commit.
        whole = replace(address, path="")
        # Read back even after it was created: of several processes that ask at once, the first answer counts for all.
        if (body := self.store.get(key)) is None:
            self.store.put_if_absent(key, _encode(look_up(whole)))
            body = self.store.get(key)
        snapshot = _decode(body, f"{self.store.uri}/{key}")
        if snapshot.address != whole:
            raise StorageError(
                f"{self.store.uri}: holds {snapshot.address.uri} at commit {snapshot.commit}. "
                f"Name another place for {whole.uri}"
            )
        return replace(snapshot, address=address)

    def note(self, file: HubFile, entry: FileEntry) -> None:
        """Remember that ``file`` is stored, as ``entry``."""
        self.store.put_if_absent(self._key(file), entry.model_dump_json().encode())

    def noted(self, file: HubFile) -> FileEntry | None:
        """What was noted of ``file``, or None."""
        body = self.store.get(self._key(file))
        if body is None:
            return None
        try:
            found = FileEntry.model_validate_json(body)
            problem = "" if (found.path, found.size) == (file.path, file.size) else f"it is of {found.path!r}"
        except ValidationError as error:
            problem = str(error.errors()[0]["msg"])
        if problem:
            raise StorageError(f"{self.store.uri}/{self._key(file)}: cannot be used ({problem})")
        return found

    def once(self, key: str, value: str) -> str:
        """``value``, or what an earlier call for ``key`` gave."""
        location = f"{self.prefix}{key}"
        # The first write wins, also between processes on several machines; all then read the same value.
        self.store.put_if_absent(location, value.encode())
        try:
            return (self.store.get(location) or value.encode()).decode()
        except UnicodeDecodeError as error:
            raise StorageError(f"{self.store.uri}/{location}: cannot be used ({error})") from error

    def _key(self, file: HubFile) -> str:
        return f"{self.prefix}stored/{hashlib.sha256(file.path.encode()).hexdigest()[:32]}.json"


LEDGERS = "sources/"
"""Below it a run's storage keeps the ledgers of all it has read from the hub."""


def ledger_prefix(uri: str) -> str:
    """Where a run's storage keeps the ledger of ``uri``: ``sources/<16 hex digits>/``."""
    whole = replace(parse_hub(uri), path="").uri
    return f"{LEDGERS}{hashlib.sha256(whole.encode()).hexdigest()[:16]}/"


def _encode(snapshot: HubSnapshot) -> bytes:
    files = [asdict(file) for file in snapshot.files]
    record = {"version": _VERSION, "uri": snapshot.address.uri, "commit": snapshot.commit, "files": files}
    return (json.dumps(record, indent=1) + "\n").encode()


def _decode(body: bytes | None, location: str) -> HubSnapshot:
    try:
        record = json.loads(body or b"")
        if type(record["version"]) is not int or record["version"] != _VERSION:
            raise ValueError(f"its version {record['version']!r} is not known")
        files = [checked_file(it["path"], it["size"], it["checksum"]) for it in record["files"]]
        return snapshot_of(parse_hub(record["uri"]), record["commit"], files)
    except (KeyError, TypeError, ValueError, RecursionError, StorageError) as error:
        raise StorageError(f"{location}: cannot be used ({error}). Remove it to pin the source anew") from error
