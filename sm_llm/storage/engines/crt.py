"""The engine with the cheapest uploads: AWS's common runtime under s3transfer, checksums included."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.base import StoredObject
from sm_llm.storage.engines.common import (
    Counter,
    cancel_and_wait,
    copy_errors,
    each,
    most_seconds,
    part_size,
    s3,
    stored,
    upload_arguments,
)
from sm_llm.storage.s3.s3_client import s3_errors
from sm_llm.storage.s3.s3_objects import from_base64
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sm_llm.storage.base import Copy, Progress, Store
    from sm_llm.storage.s3.s3_objects import S3Objects

TARGET_BYTES_PER_SECOND = 625_000_000
"""Asked of the runtime on machines it does not know: enough for 5 Gbit/s, and its buffers stay below 300 MB."""

_CHECKSUM_HEADER = "x-amz-checksum-crc64nvme"


class CrtTransfer:
    """``crt``: threads of the runtime in this process; they do not survive a fork.

    The manager is built here and not through boto3, which would ignore the endpoint. It compares a download with the
    object's CRC64NVME by itself, and S3 compares an upload with ours.
    """

    name = "crt"

    def download(self, store: Store, copies: Sequence[Copy], progress: Progress) -> dict[str, str]:
        where = s3(store)

        def submit(manager: Any, copy: Copy) -> Any:
            copy.path.parent.mkdir(parents=True, exist_ok=True)
            key = where.full_key(copy.key)
            return manager.download(where.bucket, key, str(copy.path), where.options.owner, [Counter(progress)])

        return self._each(where, copies, submit, "fetch")

    def upload(self, store: Store, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        where = s3(store)

        def submit(manager: Any, copy: Copy) -> Any:
            arguments, key = upload_arguments(where, copy), where.full_key(copy.key)
            return manager.upload(str(copy.path), where.bucket, key, arguments, [Counter(progress)])

        answered = self._each(where, copies, submit, "store")

        def head(copy: Copy) -> StoredObject:
            # One request, whose answer names the checksum S3 computed of what it stored, needs no second look.
            if (checksum := answered.get(copy.key)) is not None:
                return StoredObject(copy.key, copy.size, checksum)
            return stored(where, copy)

        return each(8, head, copies)

    def _each(
        self, store: S3Objects, copies: Sequence[Copy], submit: Callable[[Any, Copy], Any], action: str
    ) -> dict[str, str]:
        with s3_errors(store.uri, action, copies[0].key if copies else ""):
            credentials = _Credentials(store)
        listener = _Listener(_client(store, credentials, max((it.size for it in copies), default=0)))
        manager = _manager(store, listener)
        running: list[Any] = []
        try:
            for copy in copies:
                listener.key = copy.key
                running.append(submit(manager, copy))
            # Not by the manager's own waiting, which turns an interruption into an error of the transfer.
            seconds = most_seconds(store, copies)
            unfinished = wait(listener.futures, timeout=seconds, return_when=FIRST_EXCEPTION).not_done
            if unfinished and not any(it.done() and it.exception() for it in listener.futures):
                raise StorageError(
                    f"{store.uri}: cannot {action} {counted(len(unfinished), 'object')} within {seconds:,.0f} s"
                )
            if all(future.done() and not future.exception() for future in listener.futures):
                manager.shutdown()  # files get their names in callbacks that come after the result
            for copy, future in zip(copies, running, strict=True):
                _await(store, copy, future, action)
        except StorageError:
            cancel_and_wait(listener.futures, lambda: [future.cancel() for future in running])
            if all(future.done() for future in listener.futures):
                manager.shutdown()  # what has arrived gets its name before anybody looks which files did
            raise
        except BaseException:
            # Without ``shutdown``, which waits for every transfer without a limit.
            cancel_and_wait(listener.futures, lambda: [future.cancel() for future in running])
            raise
        return listener.checksums


class _Listener:
    """The runtime's client as the manager sees it, with an ear for the checksums in answers."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        # Of the request that is made next; requests are made by one thread.
        self.key = ""
        self.checksums: dict[str, str] = {}
        self.futures: list[Future[Any]] = []

    def make_request(self, **arguments: Any) -> Any:
        key = self.key

        def on_headers(status_code: int, headers: list[tuple[str, str]], **_: Any) -> None:
            found = [value for name, value in headers if name.lower() == _CHECKSUM_HEADER]
            if 200 <= status_code < 300 and found:
                with self._lock:
                    self.checksums[key] = from_base64(found[0])

        request = self._client.make_request(on_headers=on_headers, **arguments)
        self.futures.append(request.finished_future)
        return request


class _Credentials:
    """What the runtime asks for credentials; raises an error of the SDK if there are none to begin with.

    Later nothing is raised, for the runtime's threads would print it: old ones continue, and the store refuses them.
    """

    def __init__(self, store: S3Objects) -> None:
        from botocore.exceptions import NoCredentialsError

        self._source = store.session.get_credentials()
        if self._source is None:
            raise NoCredentialsError
        self._newest = self._source.get_frozen_credentials()

    def __call__(self) -> Any:
        from awscrt.auth import AwsCredentials

        with suppress(Exception):
            self._newest = self._source.get_frozen_credentials()
        return AwsCredentials(self._newest.access_key, self._newest.secret_key, self._newest.token)


def _client(store: S3Objects, credentials: _Credentials, largest: int) -> Any:
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.s3 import get_recommended_throughput_target_gbps
    from botocore.exceptions import BotoCoreError
    from s3transfer.crt import create_s3_crt_client

    known = get_recommended_throughput_target_gbps()
    try:
        return create_s3_crt_client(
            store.client.meta.region_name,
            AwsCredentialsProvider.new_delegate(credentials),
            target_throughput=None if known else TARGET_BYTES_PER_SECOND,
            part_size=part_size(largest),
            use_ssl=store.client.meta.endpoint_url.startswith("https"),
        )
    except (BotoCoreError, RuntimeError) as error:
        raise StorageError(f"{store.uri}: the crt engine cannot start: {error}") from error


def _manager(store: S3Objects, listener: _Listener) -> Any:
    from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager

    location = {"endpoint_url": store.client.meta.endpoint_url, "region_name": store.client.meta.region_name}
    return CRTTransferManager(listener, BotocoreCRTRequestSerializer(store.session, location))


def _await(store: S3Objects, copy: Copy, future: Any, action: str) -> None:
    from awscrt.exceptions import AwsCrtError

    with copy_errors(store, action, copy):
        try:
            future.result()
        except (AwsCrtError, OSError, RuntimeError) as error:  # the last of a request that cannot be made
            raise StorageError(f"{store.uri}: cannot {action} {copy.key!r}: {error}") from error
