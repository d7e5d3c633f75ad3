"""I7: a store's answer is believed only when it is a whole listing of what was asked for."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

import boto3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.contract import bootstrap
from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.publication.find import find_newest
from sm_llm.storage.s3 import listing
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3.swap import folders
from sm_llm.storage.s3_store import S3Store
from tests.fixtures.sampling import number, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def page(
    *keys: str, name: str = "bkt", prefix: str = "runs/", truncated: str = "false", token: str = "", extra: str = ""
) -> str:
    """A ListBucketResult."""
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>1</Size><ETag>x</ETag>"
        "<LastModified>2026-11-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    following = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return (
        f'<?xml version="1.0"?><ListBucketResult xmlns="{NAMESPACE}"><Name>{name}</Name><Prefix>{prefix}</Prefix>'
        f"<IsTruncated>{truncated}</IsTruncated>{following}{contents}{extra}</ListBucketResult>"
    )


GOOD = page("runs/a")
HIDDEN_KEYS = GOOD[GOOD.index("<Contents>") : GOOD.index("</ListBucketResult>")]
MALFORMED = {
    "a page of HTML": "<!DOCTYPE html><html><body>Please log in<br></body></html>",
    "HTML that is XML": "<html><body>Please log in</body></html>",
    "nothing": "",
    "white space": "\n",
    "half of it": GOOD[: len(GOOD) // 2],
    "JSON": '{"Contents": []}',
    "truncated without a token": page("runs/a", truncated="true"),
    "another root": GOOD.replace("ListBucketResult", "ListAllMyBucketsResult").replace("Name>", "Owner>"),
    "another bucket": page("runs/a", name="other"),
    "another prefix": page("runs/a", prefix="ru"),
    "no prefix": page("runs/a", prefix=""),
    "a key of another prefix": page("runs/a", "other/b"),
    "a folder of another prefix": page(extra="<CommonPrefixes><Prefix>other/</Prefix></CommonPrefixes>"),
    "no word of being complete": GOOD.replace("<IsTruncated>false</IsTruncated>", ""),
    "fewer keys than it counts": page("runs/a", extra="<KeyCount>2</KeyCount>"),
    "no size": GOOD.replace("<Size>1</Size>", ""),
    "a negative size": GOOD.replace("<Size>1</Size>", "<Size>-1</Size>"),
    "True": page("runs/a", truncated="True"),
    "TRUE": page("runs/a", truncated="TRUE"),
    "1": page("runs/a", truncated="1"),
    "white space before true": page("runs/a", truncated=" true", token="t"),
    "perhaps": page("runs/a", truncated="perhaps"),
    "an empty word of being complete": page("runs/a", truncated=""),
    "true and false": page("runs/a", truncated="true", extra="<IsTruncated>false</IsTruncated>"),
    "complete with a token": page("runs/a", token="t1"),
    "keys rolled up": page(extra="<CommonPrefixes><Prefix>runs/a/</Prefix></CommonPrefixes>"),
    "another delimiter": page("runs/a", extra="<Delimiter>-</Delimiter>"),
    "another root element": GOOD.replace("ListBucketResult", "Foo"),
    "an error in place of it": GOOD.replace("ListBucketResult", "Error"),
    "versions": GOOD.replace("ListBucketResult", "ListVersionsResult"),
    "another namespace": GOOD.replace(NAMESPACE, "http://example.org/"),
    "another page": page("runs/a", extra="<ContinuationToken>page2</ContinuationToken>"),
    "the keys after one": page("runs/a", extra="<StartAfter>zzz</StartAfter>"),
    "no keys asked for": page(extra="<MaxKeys>0</MaxKeys>"),
    "a size that is a word": GOOD.replace("<Size>1</Size>", "<Size>x</Size>"),
    "a size of 5,000 digits": GOOD.replace("<Size>1</Size>", f"<Size>{'9' * 5000}</Size>"),
    "a size with a line below": GOOD.replace("<Size>1</Size>", "<Size>1_0</Size>"),
    "a size in other digits": GOOD.replace("<Size>1</Size>", "<Size>\u0663</Size>"),
    "two sizes": GOOD.replace("<Size>1</Size>", "<Size>1</Size><Size>2</Size>"),
    "a count that is a word": page("runs/a", extra="<KeyCount>x</KeyCount>"),
    "the year 1": GOOD.replace("2026-11-01T00:00:00.000Z", "0001-01-01T00:00:00Z"),
    "no date": GOOD.replace("2026-11-01T00:00:00.000Z", "nan"),
    "a date of digits": GOOD.replace("2026-11-01T00:00:00.000Z", "9" * 30),
    "a key twice": page("runs/a", "runs/a"),
    "an end that is too early": f"{GOOD}<x/>",
    **{
        f"keys hidden in {name}": page(extra=HIDDEN_KEYS.replace("Contents", name))
        for name in ("contents", "Object", "Version", "DeleteMarker")
    },
    "keys one level lower": page(extra=f"<Page>{HIDDEN_KEYS}</Page>"),
    "keys inside a key": GOOD.replace("<ETag>x</ETag>", f"<ETag>x</ETag>{HIDDEN_KEYS}"),
    "keys in a comment": page(extra=f"<!--{HIDDEN_KEYS}-->"),
    "keys in an instruction": page(extra=f"<?x {HIDDEN_KEYS}?>"),
    "a word of two parts": page("runs/a", truncated="fal<!-- -->se"),
    "two folders in one": page(extra=f"<CommonPrefixes>{2 * '<Prefix>runs/a/</Prefix>'}</CommonPrefixes>"),
    "an error inside": page(extra="<Error><Code>InternalError</Code></Error>"),
    "the code of an error inside": page(extra="<Code>SlowDown</Code>"),
    "a page inside": page(extra="<html><body>Please log in</body></html>"),
    "text inside": page(extra="Please log in"),
    "the first version, from a key on": page(extra="<Marker>zzz</Marker>"),
    "the first version, to be continued": page(extra="<NextMarker>runs/b</NextMarker>"),
    "keys in another encoding": page(extra="<EncodingType>base64</EncodingType>"),
    "no time": GOOD.replace("<LastModified>2026-11-01T00:00:00.000Z</LastModified>", ""),
}


@dataclass
class Scripted:
    """A server that gives prepared answers: the next of ``answers``, the last one again and again."""

    answers: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each body waits 40 ms for an acknowledgement of the headers

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self) -> None:
            script.requests.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = (script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield script
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def store(scripted: Scripted, aws_environment: None, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setattr(listing, "_FIRST_PAUSE_SECONDS", 0.0)
    return S3Store("bkt", "runs", S3Options(endpoint_url=scripted.endpoint))


@pytest.mark.parametrize("name", MALFORMED)
def test_I7_s01_an_answer_that_is_not_a_whole_listing_is_an_error(
    scripted: Scripted, store: S3Store, name: str
) -> None:
    scripted.answers = [MALFORMED[name]]
    asks: list[Callable[[], object]] = [lambda: store.list(""), store.holds]
    if name != "keys rolled up":
        asks.append(lambda: folders(store))
    for ask in asks:
        scripted.requests.clear()
        with pytest.raises(StorageError, match="s3://bkt/runs: cannot list ''"):
            ask()
        assert len(scripted.requests) == listing.TRIES


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (MALFORMED["a page of HTML"], "and begins with '<!DOCTYPE html><html><body>Please log in"),
        ('{"message": "Please log in"}', 'and begins with \'{"message": "Please log in"}\''),
        (MALFORMED["half of it"], "it is not XML"),
        (MALFORMED["nothing"], "it is empty"),
        ("http://u:planted-pw@host/", "[hidden]@host"),
        ("<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>", "SlowDown Reduce your rate"),
    ],
)
@pytest.mark.parametrize("use", ["list", "delete", "abort"])
def test_I7_an_error_names_what_came_instead_of_an_answer(
    scripted: Scripted, store: S3Store, use: str, body: str, seen: str
) -> None:
    """The SDK reports an answer that is not XML as "500 Internal Server Error"."""
    twice = {"retries": {"mode": "standard", "total_max_attempts": 2}}
    store, scripted.answers = S3Store("bkt", "runs", store.options, twice), [body]
    uses: dict[str, Callable[[], object]] = {
        "list": lambda: store.list(""), "delete": lambda: store.delete(["a"]),
        "abort": lambda: store.abort_unfinished(0),
    }  # fmt: skip
    with pytest.raises(StorageError, match=re.escape(seen)) as caught:
        uses[use]()
    assert not re.search("Internal Server Error|planted", str(caught.value))
    assert len(scripted.requests) == (2 if "Reduce" in body else listing.TRIES)


@pytest.mark.parametrize("name", sample(list(MALFORMED), 8))
def test_I7_s01_one_such_answer_is_asked_for_again(scripted: Scripted, store: S3Store, name: str) -> None:
    scripted.answers = [MALFORMED[name], GOOD]
    assert [it.key for it in store.list("")] == ["a"]


@pytest.mark.parametrize("name", sample(list(MALFORMED), 8))
def test_I7_s01_a_later_page_is_checked_like_the_first(scripted: Scripted, store: S3Store, name: str) -> None:
    scripted.answers = [page("runs/a", truncated="true", token="t1"), MALFORMED[name]]
    with pytest.raises(StorageError):
        store.list("")


def test_A13_18_folders_that_no_path_can_be_called_are_reported_once(
    scripted: Scripted, store: S3Store, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["good", "CON", "x" * 300, ".", "a\\b"]
    rolled = "".join(f"<CommonPrefixes><Prefix>runs/{it}/</Prefix></CommonPrefixes>" for it in names)
    scripted.answers = [page(extra=rolled)]
    with caplog.at_level(logging.WARNING):
        assert folders(store) == folders(store) == ["good"]
    assert [it.getMessage() for it in caplog.records] == ["s3://bkt/runs: ignored '.' and 3 more: not a file of a run"]


def test_I7_pages_follow_one_another(scripted: Scripted, store: S3Store) -> None:
    scripted.answers = [page("runs/a", truncated="true", token="t1"), page("runs/b")]
    assert [it.key for it in store.list("")] == ["a", "b"]
    assert "continuation-token=t1" in scripted.requests[1]


def test_I7_a_listing_that_never_ends_is_an_error(
    scripted: Scripted, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.answers = [page("runs/a", truncated="true", token="again")]
    with pytest.raises(StorageError, match="does not name where it continues"):
        store.list("")
    monkeypatch.setattr(listing, "MOST_PAGES", 3)
    scripted.answers = [page(f"runs/{number}", truncated="true", token=f"t{number}") for number in range(9)]
    with pytest.raises(StorageError, match="more than 3 pages"):
        store.list("")


def test_A13_13_a_listing_that_goes_round_under_new_tokens_is_an_error(scripted: Scripted, store: S3Store) -> None:
    scripted.answers = [page("runs/a", truncated="true", token=f"t{number}") for number in range(99)]
    with pytest.raises(StorageError, match="it holds 'runs/a', as an earlier page does"):
        store.list("")
    assert len(scripted.requests) < 10


def test_I7_uploads_are_listed_with_the_same_care(scripted: Scripted, store: S3Store) -> None:
    whole = GOOD.replace("ListBucketResult", "ListMultipartUploadsResult").replace("Name>", "Bucket>")
    whole = whole.replace(HIDDEN_KEYS, "")
    scripted.answers = [whole]
    assert store.abort_unfinished(0.0) == 0
    for body in (MALFORMED["nothing"], MALFORMED["HTML that is XML"], whole.replace("false", "true")):
        scripted.answers = [body]
        with pytest.raises(StorageError, match="cannot abort uploads"):
            store.abort_unfinished(0.0)


@settings(max_examples=number(40, whole=400))
@given(st.data())
def test_I7_a_damaged_listing_never_hides_a_key(scripted: Scripted, store: S3Store, data: st.DataObject) -> None:
    """Whatever is cut out of the frame of a page, the key is listed or the answer is refused."""
    body = GOOD
    first = data.draw(st.integers(0, len(body)))
    last = data.draw(st.integers(first, min(len(body), first + 80)))
    scripted.answers = [body[:first] + body[last:]]
    try:
        keys = [it.key for it in store.list("")]
    except StorageError:
        return
    held = "<Contents>" in scripted.answers[0] and "</Contents>" in scripted.answers[0]
    assert keys or not held


@pytest.fixture
def downloaded(
    scripted: Scripted, aws_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], list[str]]:
    """Brings the wheels below s3://bkt/runs, as a stock image does; returns their names."""
    monkeypatch.setattr(listing, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", scripted.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    client = boto3.client("s3")
    monkeypatch.setattr(client, "download_file", lambda bucket, key, path: Path(path).write_text(f"{bucket}/{key}"))
    monkeypatch.setattr(boto3, "client", lambda _: client)

    def download() -> list[str]:
        bootstrap.download_wheels("s3://bkt/runs", tmp_path)
        return sorted(it.relative_to(tmp_path).as_posix() for it in tmp_path.rglob("*"))

    return download


@pytest.mark.parametrize("name", sample(list(MALFORMED), 8))
def test_I7_wheels_are_listed_with_the_same_care(
    scripted: Scripted, downloaded: Callable[[], list[str]], name: str
) -> None:
    scripted.answers = [MALFORMED[name]]
    with pytest.raises(SystemExit, match=r"cannot bring the wheels of backend[.]wheelhouse=s3://bkt/runs: "):
        downloaded()
    scripted.answers = [MALFORMED[name], page("runs/a.whl", "runs/readme")]
    assert downloaded() == ["a.whl"]


def test_names_of_wheels_are_checked_and_none_replaces_another(
    scripted: Scripted, downloaded: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    scripted.answers = [page("runs/../b.whl", "runs/x\\..\\c.whl", "runs/con.whl", "runs/a.whl")]
    assert downloaded() == ["a.whl"]
    assert "ignored '../b.whl' and 2 more" in caplog.text
    scripted.answers = [page("runs/a/b.whl", "runs/b.whl")]
    with pytest.raises(SystemExit, match=r"two wheels are called .b[.]whl.; keep one"):
        downloaded()


def test_what_a_stock_image_imports_is_the_standard_library_alone() -> None:
    program = (
        "import sys; before = set(sys.modules); import sm_llm.contract.bootstrap; "
        "print({it.partition('.')[0] for it in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{'sm_llm'}\n"


_ITEM = re.compile("<Contents>.*?</Contents>")
IN_KEYS = ("size", "time", "date", "key", "year")
"""Words of the names of what is wrong with keys; the others have none here, as an empty listing has."""


def fitted(name: str, bucket: str, prefix: str) -> bytes:
    """A malformed answer that repeats bucket and prefix of a request, and is wrong for its own reason alone."""
    body = MALFORMED[name]
    if not any(word in name for word in IN_KEYS) or name == "no keys asked for":
        body = _ITEM.sub("", body)
    return body.replace("<Name>bkt<", f"<Name>{bucket}<").replace("runs/", escape(prefix)).encode()


@pytest.mark.parametrize("name", sample(list(MALFORMED), 8))
def test_I7_s01_no_malformed_listing_of_a_start_makes_it_begin_from_scratch(
    s3_bench: Any, fault_proxy: Any, rule: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once or always, at every request of a start: the newest checkpoint, or an error."""
    monkeypatch.setattr(listing, "_FIRST_PAUSE_SECONDS", 0.0)
    s3_bench.publish(1)
    s3_bench.publish(2)
    s3_bench.endpoint, s3_bench.attempts = fault_proxy.endpoint, 2
    fault_proxy.set()
    assert find_newest(s3_bench.store, run_id=s3_bench.run_id).commit is not None
    listings = [parse_qs(urlsplit(it.split()[1]).query)["prefix"][0] for it in fault_proxy.log if "list-type=2" in it]
    assert len(listings) >= 2
    for at, prefix in enumerate(listings):
        body = fitted(name, s3_bench.bucket, prefix)
        fault_proxy.set(rule("list-type=2", "replace", first=at, body=body))
        found = find_newest(s3_bench.store, run_id=s3_bench.run_id)
        assert found.commit is not None
        assert found.commit.step == 2
        fault_proxy.set(rule("list-type=2", "replace", first=at, count=10**9, body=body))
        with pytest.raises((StorageError, CheckpointError)):
            find_newest(s3_bench.store, run_id=s3_bench.run_id)
