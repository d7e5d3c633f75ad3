"""Answers of a store whose headers are missing or make no sense, and answers without an end, are errors in words."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.runs.heartbeat import silence
from sm_llm.storage.base import Copy
from sm_llm.storage.engines import crt
from sm_llm.storage.engines.classic import ClassicTransfer
from sm_llm.storage.engines.crt import CrtTransfer
from sm_llm.storage.s3 import bounded, listing, s3_client
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3.swap import read_tagged, swap
from sm_llm.storage.s3_store import S3Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OK = {
    "Content-Length": "7",
    "ETag": '"0123456789abcdef0123456789abcdef"',
    "Last-Modified": "Sun, 01 Nov 2026 00:00:00 GMT",
    "Date": "Sun, 01 Nov 2026 00:00:10 GMT",
}
BODY = b"content"


@dataclass
class Scripted:
    """A server that gives every request the same status, headers and body, written as they are."""

    headers: dict[str, str] = field(default_factory=lambda: dict(OK))
    body: bytes = BODY
    status: int = 200
    drips: bool = False
    """Go on sending one byte after the other, until the client has gone."""
    endpoint: str = ""
    count: int = 0
    over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each body waits 40 ms for an acknowledgement of the headers

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self) -> None:
            script.count += 1
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            # Said, so that no client sends its next request while this side is closing.
            headers = {**script.headers, "Connection": "close"}
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.wfile.write(f"HTTP/1.1 {script.status} OK\r\n{head}\r\n".encode("latin-1"))
            self.close_connection = True
            if self.command == "HEAD":
                return
            self.wfile.write(script.body)
            while script.drips and not script.over.wait(0.02):
                self.wfile.write(b" ")
                self.wfile.flush()

        do_GET = do_HEAD = do_PUT = do_POST = _answer

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Clients that hang up are what this is for."""

    server = Server(("127.0.0.1", 0), Handler)
    script.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield script
    script.over.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def store(scripted: Scripted, aws_environment: None, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setattr(listing, "_FIRST_PAUSE_SECONDS", 0.0)
    config = {"retries": {"mode": "standard", "total_max_attempts": 1}, "read_timeout": 5, "connect_timeout": 5}
    return S3Store("bkt", "runs", S3Options(endpoint_url=scripted.endpoint), config)


ODD_LENGTHS = [None, "abc", "-1", "", "1e3", "9" * 30, "8", "\u00b2", "0x7"]
ODD_TAGS = [None, ""]
ODD_DATES = [
    None,
    "",
    "yesterday",
    "Sun, 99 Nov 2026 00:00:00 GMT",
    "Sun, 01 Nov 99999 00:00:00 GMT",
    "0",
    "1e400",
    "-1",
]
ODD_SUMS = ["x", "AAAA", "\u00e9", "=" * 40]


def uses(tmp_path: Path) -> dict[str, Callable[[S3Store], object]]:
    """Operation -> a call of it."""
    copy = Copy("key", tmp_path / "file", 1 << 20, "")
    return {
        "get": lambda store: store.get("key"),
        "head": lambda store: store.head("key"),
        "tagged": lambda store: read_tagged(store, "key"),
        "silence": silence,
        "checksum": lambda store: store.checksum("key"),
        "get_file": lambda store: store.get_file("key", tmp_path / "file"),
        "swap": lambda store: swap(store, "key", b"body", None),
        "put": lambda store: store.put_if_absent("key", b"body"),
        "list": lambda store: store.list("key"),
        "holds": lambda store: store.holds("key"),
        "delete": lambda store: store.delete(["key"]),
        "abort": lambda store: store.abort_unfinished(1e9),
        "old": lambda store: store.checksum("key"),
        "boto3": lambda store: ClassicTransfer().download(store, [copy], print),
        "crt": lambda store: CrtTransfer().download(store, [copy], print),
    }


CASES = [
    *(("get", "Content-Length", it) for it in ODD_LENGTHS),
    *(("tagged", "Content-Length", it) for it in ODD_LENGTHS),
    *(("tagged", "ETag", it) for it in ODD_TAGS),
    *(("swap", "ETag", it) for it in ODD_TAGS),
    *(("head", "Content-Length", it) for it in ODD_LENGTHS if it not in ("8", "9" * 30)),
    *(("head", "ETag", it) for it in ODD_TAGS),
    *(("head", "Last-Modified", it) for it in ODD_DATES if it not in ("0", "-1")),
    *(("silence", "Last-Modified", it) for it in ODD_DATES if it not in ("0", "-1")),
    *(("silence", "Date", it) for it in ODD_DATES),
    *(("head", "x-amz-checksum-crc64nvme", it) for it in ODD_SUMS),
    *(("checksum", "Content-Length", it) for it in ODD_LENGTHS),
    *(("get_file", "Content-Length", it) for it in ODD_LENGTHS),
]


@pytest.mark.parametrize(("use", "name", "value"), CASES)
def test_a_header_that_is_missing_or_makes_no_sense_is_an_error_in_words(
    scripted: Scripted, store: S3Store, tmp_path: Path, use: str, name: str, value: str | None
) -> None:
    scripted.headers.pop(name, None)
    if value is not None:
        scripted.headers[name] = value
    with pytest.raises(StorageError, match="s3://bkt/runs"):
        uses(tmp_path)[use](store)


@pytest.mark.parametrize(
    ("element", "value"),
    [
        *(("Size", it) for it in ("abc", "-1", "", "1.5")),
        *(
            ("LastModified", it)
            for it in ("", "yesterday", "2026-99-01T00:00:00.000Z", "99999-01-01T00:00:00Z", "1e400")
        ),
        *(("KeyCount", it) for it in ("x", "7", "")),
        *(("IsTruncated", it) for it in ("maybe", "", "True", "1")),
    ],
)
def test_a_listing_with_nonsense_in_it_is_an_error_in_words(
    scripted: Scripted, store: S3Store, element: str, value: str
) -> None:
    whole = {"Size": "1", "LastModified": "2026-11-01T00:00:00.000Z", "KeyCount": "1", "IsTruncated": "false"}
    fields = whole | {element: value}
    scripted.body = (
        "<ListBucketResult><Name>bkt</Name><Prefix>runs/</Prefix>"
        f"<IsTruncated>{fields['IsTruncated']}</IsTruncated><KeyCount>{fields['KeyCount']}</KeyCount>"
        f"<Contents><Key>runs/a</Key><Size>{fields['Size']}</Size><ETag>x</ETag>"
        f"<LastModified>{fields['LastModified']}</LastModified></Contents></ListBucketResult>"
    ).encode()
    scripted.headers = {"Content-Type": "application/xml", "Content-Length": str(len(scripted.body))}
    with pytest.raises(StorageError, match="s3://bkt/runs: cannot list"):
        store.list("")


def test_an_answer_that_never_ends_is_an_error_after_its_time(
    scripted: Scripted, aws_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte after the other, each well within the SDK's own timeout."""
    monkeypatch.setattr(listing, "_FIRST_PAUSE_SECONDS", 0.0)
    # What reads an object finds 10 seconds gone with every part.
    monkeypatch.setattr(bounded, "time", SimpleNamespace(monotonic=partial(next, itertools.count(0, 10))))
    scripted.drips = True
    scripted.headers["Content-Length"] = "1000000"

    retries = {"mode": "standard", "total_max_attempts": 2}
    config = {"retries": retries, "read_timeout": 60, "connect_timeout": 10}
    slow = S3Store("bkt", "runs", S3Options(endpoint_url=scripted.endpoint), config)
    for use in (lambda: slow.get("key"), lambda: read_tagged(slow, "key")):
        with pytest.raises(StorageError, match=r"1,000,001 bytes of an object did not come within 130 s"):
            use()
    # What is read at once is waited for.
    monkeypatch.setattr(s3_client, "answer_seconds", lambda _: 0.5)
    with pytest.raises(StorageError, match=r"s3://bkt/runs: cannot .*no whole answer from .* within 0\.5 s"):
        S3Store("bkt", "runs", S3Options(endpoint_url=scripted.endpoint), config).list("")


def test_an_answer_larger_than_any_is_not_read_to_its_end(
    scripted: Scripted, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "MOST_BYTES", 1000)
    scripted.body = b"<" * 2000
    scripted.headers = {"Content-Length": str(1 << 40)}
    with pytest.raises(StorageError, match="an answer of more than 1,000 bytes"):
        store.list("")


def test_a_listing_ends_after_its_time(scripted: Scripted, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_SECONDS", -1.0)
    with pytest.raises(StorageError, match=r"has not ended after -1 s and 0 pages"):
        store.list("")


def test_A13_13_of_an_error_no_more_is_read_than_of_any_answer(
    scripted: Scripted, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "MOST_BYTES", 1000)
    scripted.status, scripted.body = 403, b"<" * 2000
    scripted.headers = {"Content-Length": str(1 << 40)}
    for use in (lambda: store.get("key"), lambda: store.list("")):
        with pytest.raises(StorageError, match="an answer of more than 1,000 bytes"):
            use()


@pytest.mark.parametrize("size", ["9" * 30, str((1 << 46) + 1)])
def test_a_size_that_no_object_has_is_not_a_size(scripted: Scripted, store: S3Store, tmp_path: Path, size: str) -> None:
    """The parts of such a file could not even be counted."""
    scripted.headers["Content-Length"] = size
    for name in ("head", "get_file"):
        with pytest.raises(StorageError, match="no usable ContentLength"):
            uses(tmp_path)[name](store)


@pytest.mark.parametrize("status", [201, 202, 203, 204, 206])
@pytest.mark.parametrize("use", ["get", "tagged", "put", "swap", "delete"])
def test_I2_a_status_that_s3_does_not_give_is_an_error(
    scripted: Scripted, store: S3Store, tmp_path: Path, use: str, status: int
) -> None:
    scripted.status = status
    scripted.body, scripted.headers["Content-Length"] = b"", "0"
    with pytest.raises(StorageError, match="s3://bkt/runs"):
        uses(tmp_path)[use](store)


@pytest.mark.parametrize("use", ["get", "put", "swap", "delete"])
@pytest.mark.parametrize("body", [b"<html><body>Please log in</body></html>", b""])
def test_I2_a_page_of_somebody_else_is_neither_an_object_nor_a_receipt(
    scripted: Scripted, store: S3Store, tmp_path: Path, use: str, body: bytes
) -> None:
    scripted.headers, scripted.body = {"Content-Type": "text/html", "Content-Length": str(len(body))}, body
    with pytest.raises(StorageError, match="s3://bkt/runs"):
        uses(tmp_path)[use](store)


def test_I2_an_answer_that_the_sdk_cannot_read_proves_no_deletion(
    scripted: Scripted, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refused keys stand in it, in an encoding that S3 does not use."""
    monkeypatch.setattr(listing, "_FIRST_PAUSE_SECONDS", 0.0)
    error = "<Error><Key>runs/a</Key><Code>AccessDenied</Code><Message>n\xf3n</Message></Error>"
    scripted.body = f'<?xml version="1.0" encoding="latin-1"?><DeleteResult>{error}</DeleteResult>'.encode("latin-1")
    scripted.headers = {"Content-Length": str(len(scripted.body))}
    with pytest.raises(StorageError, match="it is not UTF-8"):
        store.delete(["a"])


@pytest.mark.parametrize("use", ["put", "swap"])
def test_I2_a_receipt_for_other_bytes_is_an_error(scripted: Scripted, store: S3Store, tmp_path: Path, use: str) -> None:
    scripted.headers |= {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA=", "Content-Length": "0"}
    scripted.body = b""
    with pytest.raises(StorageError, match="names the checksum"):
        uses(tmp_path)[use](store)


@pytest.mark.parametrize("use", ["list", "delete", "abort", "holds"])
@pytest.mark.parametrize("body", [b"ff\r\n<ListBucket", b"zz\r\n"])
def test_I7_an_answer_that_breaks_off_is_asked_for_again_and_then_an_error(
    scripted: Scripted, store: S3Store, tmp_path: Path, use: str, body: bytes
) -> None:
    scripted.headers, scripted.body = {"Transfer-Encoding": "chunked"}, body
    twice = {"retries": {"mode": "standard", "total_max_attempts": 2}}
    with pytest.raises(StorageError, match="s3://bkt/runs: cannot"):
        uses(tmp_path)[use](S3Store("bkt", "runs", store.options, twice))
    assert scripted.count == 2, "the SDK tries again"


@pytest.mark.parametrize("use", ["list", "get", "head", "put", "delete"])
@pytest.mark.parametrize("status", [301, 302, 307])
def test_I7_a_redirect_is_followed_once_at_most(
    scripted: Scripted, store: S3Store, tmp_path: Path, use: str, status: int
) -> None:
    scripted.status, scripted.body = status, b""
    scripted.headers = {"Content-Length": "0", "Location": f"{scripted.endpoint}/elsewhere"}
    with pytest.raises(StorageError, match=f"s3://bkt/runs: cannot .*{status}"):
        uses(tmp_path)[use](store)
    assert scripted.count <= 3


@pytest.mark.parametrize("use", ["checksum", "get_file", "boto3", "crt", "old"])
def test_I8_an_object_that_comes_byte_by_byte_is_an_error(
    scripted: Scripted, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    monkeypatch.setattr(s3_client, "answer_seconds", lambda _: 0.3)
    monkeypatch.setattr(crt, "most_seconds", lambda *_: 0.3)
    if use == "old":  # urllib3 before version 2
        monkeypatch.delattr("urllib3.response.HTTPResponse.read1")
        monkeypatch.delattr("urllib3.response.BaseHTTPResponse.read1")
    scripted.headers["Content-Length"], scripted.drips = str(1 << 20), True
    with pytest.raises(StorageError, match=r"did not come within|no whole answer|cannot fetch 1 object within"):
        uses(tmp_path)[use](store)
