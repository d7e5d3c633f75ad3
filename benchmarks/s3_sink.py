"""A contract double of S3 that takes at most so many bytes a second, for timing clients: ``s3_sink.py RATE``.

It knows the requests that publication makes, keeps sizes and checksums of large objects and the bytes of small ones,
and prints its address. No signature is checked.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

CHECKSUM = "x-amz-checksum-crc64nvme"
_SMALL = 1 << 20
_PIECE = 1 << 18


@dataclass
class Stored:
    """An object: its size, its checksum as the client told it, and its bytes if it is small."""

    size: int
    checksum: str = ""
    body: bytes = b""


@dataclass
class Bucket:
    """Everything that is stored; ``rate`` in bytes per second, shared by all connections."""

    rate: float
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, dict[int, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0

    def wait(self, count: int) -> None:
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + count / self.rate
            pause = self.free_at - time.monotonic()
        time.sleep(max(0.0, pause))


class Handler(BaseHTTPRequestHandler):
    bucket: ClassVar[Bucket]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def _take(self) -> tuple[int, bytes]:
        """Read the body, as slowly as agreed: its size without chunk headers, and its first bytes."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        left, head = int(self.headers.get("Content-Length", 0)), b""
        size = int(self.headers.get("x-amz-decoded-content-length", left))
        while left:
            piece = self.rfile.read(min(left, _PIECE))
            left -= len(piece)
            self.bucket.wait(len(piece))
            head = head + piece if len(head) < _SMALL else head
        return size, head

    def _answer(self, status: int, body: str | bytes = b"", headers: dict[str, str] | None = None) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def _where(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path).lstrip("/").partition("/")[2], query

    def do_PUT(self) -> None:
        key, query = self._where
        size, head = self._take()
        if "partNumber" in query:
            self.bucket.uploads[query["uploadId"]][int(query["partNumber"])] = size
            self._answer(200, headers={"ETag": '"part"'})
            return
        with self.bucket.lock:
            if self.headers.get("If-None-Match") == "*" and key in self.bucket.objects:
                self._answer(412, "<Error><Code>PreconditionFailed</Code></Error>")
                return
            reported = self.headers.get(CHECKSUM, "")
            self.bucket.objects[key] = Stored(size, reported, head if size < _SMALL else b"")
        self._answer(200, headers={"ETag": '"x"', **({CHECKSUM: reported} if reported else {})})

    def do_POST(self) -> None:
        key, query = self._where
        _, body = self._take()
        if "uploads" in query:
            upload = f"u{len(self.bucket.uploads)}"
            self.bucket.uploads[upload] = {}
            self._answer(200, f"<R><UploadId>{upload}</UploadId><Key>{escape(key)}</Key></R>")
        elif "uploadId" in query:
            parts = self.bucket.uploads.pop(query["uploadId"])
            self.bucket.objects[key] = Stored(sum(parts.values()), self.headers.get(CHECKSUM, ""))
            self._answer(200, f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key><ETag>x</ETag>"
                              "</CompleteMultipartUploadResult>")  # fmt: skip
        else:
            for element in ElementTree.fromstring(body).iter():
                if element.tag.endswith("Key"):
                    self.bucket.objects.pop(element.text or "", None)
            self._answer(200, "<DeleteResult/>")

    def do_GET(self) -> None:
        key, query = self._where
        if "uploads" in query:
            self._answer(200, "<ListMultipartUploadsResult/>")
        elif not key:
            self._list(query.get("prefix", ""))
        elif (found := self.bucket.objects.get(key)) is None:
            self._answer(404, "<Error><Code>NoSuchKey</Code></Error>")
        else:
            headers = {"ETag": '"x"', "Last-Modified": self.date_time_string(), CHECKSUM: found.checksum}
            if self.command == "HEAD":
                headers["Content-Length"] = str(found.size)
            self._answer(200, found.body, headers)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.bucket.uploads.pop(self._where[1].get("uploadId", ""), None)
        self._answer(204)

    def _list(self, prefix: str) -> None:
        found = sorted((key, it) for key, it in list(self.bucket.objects.items()) if key.startswith(prefix))
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{it.size}</Size><ETag>x</ETag>"
            f"<LastModified>{now}</LastModified></Contents>"
            for key, it in found
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>")


def main(rate: float) -> None:
    handler = type("Bound", (Handler,), {"bucket": Bucket(rate)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(float(sys.argv[1]))
