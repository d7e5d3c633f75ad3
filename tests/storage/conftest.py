"""Stores that fail on command, and small publications to try them on."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.engines.s5cmd import S5cmdTransfer
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication.publish import CommitResult, Save, new_save, publish, seal, upload_part
from sm_llm.storage.s3.s3_objects import to_base64
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.transfer import CopyTransfer
from tests.fixtures.children import in_small_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sm_llm.storage.base import Copy, Progress, StoredObject

RUN = "tiny-20260101-abcdef"


class Killed(BaseException):
    """The process is gone: no handler may see it."""


@dataclass
class FaultyStore:
    """A store whose operation number ``at`` (from 0) goes wrong in one ``mode``.

    ``before``/``after``: killed just before or after it took effect; ``torn``: killed in the middle of it;
    ``refused``: a StorageError, nothing done; ``lost``: done, but a StorageError instead of the answer.
    ``forever`` makes every later operation fail the same way.
    """

    inner: Any
    at: int = -1
    mode: str = "before"
    forever: bool = False
    calls: list[str] = field(default_factory=list)

    @property
    def uri(self) -> str:
        return self.inner.uri

    def _do(self, name: str, action: Callable[[], Any], torn: Callable[[], Any] | None = None) -> Any:
        number = len(self.calls)
        self.calls.append(name)
        if self.at < 0 or (number != self.at and not (self.forever and number > self.at)):
            return action()
        if self.mode == "before":
            raise Killed
        if self.mode == "refused":
            raise StorageError("the store does not answer")
        (torn or action)() if self.mode == "torn" else action()
        raise StorageError("the answer was lost") if self.mode == "lost" else Killed

    def put_if_absent(self, key: str, body: bytes) -> bool:
        return bool(self._do(f"put {key}", lambda: self.inner.put_if_absent(key, body)))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._do(f"get {key}", lambda: self.inner.get(key))
        return found

    def put_file(self, source: Path, key: str) -> StoredObject:
        def half() -> None:
            if not hasattr(self.inner, "root"):
                return  # of a PUT that breaks off S3 keeps nothing
            target = self.inner.root / key
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes()[: source.stat().st_size // 2])

        stored: StoredObject = self._do(f"put_file {key}", lambda: self.inner.put_file(source, key), half)
        return stored

    def get_file(self, key: str, target: Path) -> None:
        self._do(f"get_file {key}", lambda: self.inner.get_file(key, target))

    def head(self, key: str) -> StoredObject | None:
        found: StoredObject | None = self._do(f"head {key}", lambda: self.inner.head(key))
        return found

    def checksum(self, key: str) -> str:
        return str(self._do(f"checksum {key}", lambda: self.inner.checksum(key)))

    def list(self, prefix: str) -> list[StoredObject]:
        found: list[StoredObject] = self._do(f"list {prefix}", lambda: self.inner.list(prefix))
        return found

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        self._do(
            f"delete {len(listed)}",
            lambda: self.inner.delete(listed),
            lambda: self.inner.delete(listed[: len(listed) // 2]),
        )

    def abort_unfinished(self, before: float, prefix: str = "") -> int:
        return int(self._do(f"abort_unfinished {prefix}", lambda: self.inner.abort_unfinished(before, prefix)))


@dataclass
class Bench:
    """One run's folder and the means to publish into it from one process."""

    root: Path
    scratch: Path
    run_id: str = RUN

    @property
    def store(self) -> FolderStore:
        return FolderStore(self.root)

    def sealed(self, files: Mapping[str, bytes]) -> Path:
        """A sealed folder with ``files``."""
        name = uuid.uuid4().hex
        working = self.scratch / f"working-{name}"
        for path, body in files.items():
            (working / path).parent.mkdir(parents=True, exist_ok=True)
            (working / path).write_bytes(body)
        return seal(working, self.scratch / f"sealed-{name}")

    def save(self, step: int | None, run_id: str | None = None) -> Save:
        return new_save(run_id or self.run_id, step, world_size=1, node_count=1)

    def publish(
        self,
        step: int | None,
        files: Mapping[str, bytes] | None = None,
        *,
        store: Any = None,
        run_id: str | None = None,
        save: Save | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> CommitResult:
        """Publish ``files`` (by default two whose content follows from the step)."""
        return publish(
            store or self.store,
            save or self.save(step, run_id),
            self.sealed(files or contents(step)),
            node=0,
            leader=True,
            gather=alone,
            meta=meta,
            upload=partial(upload_part, transfer=PlainTransfer(workers=1)),
        )

    def data(self, published: CommitResult, name: str) -> Path:
        """The stored file ``name`` of a publication."""
        assert published.commit is not None
        return self.root / published.commit.save.data_prefix / name


@dataclass
class S3Bench(Bench):
    """The same in S3: ``root`` only names the prefix."""

    bucket: str = ""
    endpoint: str = ""
    attempts: int = 4
    """How often the SDK tries a request; 1 shows every fault as it is."""

    def __post_init__(self) -> None:
        self._stores: dict[tuple[Any, ...], S3Store] = {}

    @property
    def store(self) -> Any:
        """One store per endpoint: a client costs a tenth of a second."""
        key = (self.endpoint, self.attempts)
        if key not in self._stores:
            self._stores[key] = self.fresh_store()
        return self._stores[key]

    def fresh_store(self) -> S3Store:
        config = {"retries": {"total_max_attempts": self.attempts}, "read_timeout": 120}
        return S3Store(self.bucket, self.root.as_posix(), S3Options(endpoint_url=self.endpoint), config)


class PlainTransfer(CopyTransfer):
    """Uploads one file after the other by one request each, in the calling thread: where it is killed is exact."""

    def upload(self, store: Any, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        return [self._put(store, copy) for copy in copies]

    def _put(self, store: Any, copy: Copy) -> StoredObject:
        inner = getattr(store, "inner", store)
        if not isinstance(inner, S3Store):
            return store.put_file(copy.path, copy.key)  # type: ignore[no-any-return]
        inner.client.put_object(
            **inner.at(copy.key), Body=copy.path.read_bytes(), ChecksumCRC64NVME=to_base64(copy.crc64nvme)
        )
        return inner.require(copy.key)


def contents(step: int | None) -> dict[str, bytes]:
    return {"model/a.bin": f"weights of {step} ".encode() * 40, "b.bin": f"optimiser of {step} ".encode() * 30}


def alone(value: Any) -> list[Any]:
    """The gather of a world of one."""
    return [value]


def together(count: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Run ``work(rank, gather)`` in ``count`` threads that share one gather; results, or exceptions, by rank."""
    barrier = threading.Barrier(count, timeout=240)
    slots: list[Any] = [None] * count
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            reported = list(slots)
            barrier.wait()
            return reported

        try:
            results[rank] = work(rank, gather)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not any(thread.is_alive() for thread in threads), "a process waits in vain"
    return results


@pytest.fixture(autouse=True)
def _pauses_are_over_at_once(request: pytest.FixtureRequest) -> None:
    """Of retries in this process, where a test uses S3."""
    if "bucket" in request.fixturenames:
        request.getfixturevalue("retry_clock")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """s5cmd moves parts of 5 MiB, not of 50: as many requests with a tenth of the bytes."""
    monkeypatch.setattr(S5cmdTransfer, "_run", in_small_parts(S5cmdTransfer._run))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An empty run's folder."""
    for folder in ("run", "scratch"):
        (tmp_path / folder).mkdir()
    return Bench(tmp_path / "run", tmp_path / "scratch")


@pytest.fixture
def s3_bench(s3_server: Any, bucket: str, tmp_path: Path) -> S3Bench:
    """The same in a fresh bucket."""
    (tmp_path / "scratch").mkdir(exist_ok=True)
    return S3Bench(Path("runs/tiny"), tmp_path / "scratch", bucket=bucket, endpoint=s3_server.endpoint)


@pytest.fixture
def faulty() -> type[FaultyStore]:
    return FaultyStore


@pytest.fixture
def killed() -> type[Killed]:
    return Killed


@pytest.fixture(name="together")
def together_fixture() -> Callable[..., list[Any]]:
    return together


@pytest.fixture(name="contents")
def contents_fixture() -> Callable[[int | None], dict[str, bytes]]:
    return contents
