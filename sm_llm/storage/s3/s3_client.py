"""The S3 client, and what its errors mean to a user."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from sm_llm.aws import fresh_session
from sm_llm.errors import StorageError
from sm_llm.storage.base import LARGEST_BYTES, SMALL_BYTES, TooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.storage.s3.s3_options import S3Options

_Kind = TypeVar("_Kind")

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_UNKNOWN_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidClientTokenId", "InvalidToken"})
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "403", "Forbidden"})
_CREDENTIALS = ". Set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
_CONFIG: dict[str, Any] = {
    "connect_timeout": 10,
    "read_timeout": 60,
    "max_pool_connections": 32,
    "tcp_keepalive": True,
    # ``adaptive``: beside repeating, the SDK lowers its own rate when S3 answers "503 Slow Down".
    "retries": {"mode": "adaptive", "total_max_attempts": 8},
    # Whole files are checked against our own manifests, on disk; some stores answer ranges with the checksum of the
    # whole object, which the SDK would take for damage.
    "response_checksum_validation": "when_required",
    "request_checksum_calculation": "when_required",
}


NONSENSE = (ValueError, OverflowError, RuntimeError)
"""What the SDK raises for numbers and dates in an answer that are none."""


class AnswerError(StorageError):
    """An answer of the store that S3 would not give. ``result`` adds where and of what."""


_GIVEN: ContextVar[Any] = ContextVar("given_session", default=None)
_SHARED: ContextVar[dict[str, tuple[Any, Any]] | None] = ContextVar("shared_clients", default=None)


@contextmanager
def as_session(session: Any) -> Iterator[None]:
    """Inside, stores that are opened reach S3 with the credentials of a botocore session, not with AWS's own chain."""
    token = _GIVEN.set(session)
    try:
        yield
    finally:
        _GIVEN.reset(token)


@contextmanager
def one_client() -> Iterator[None]:
    """Inside, stores that are reached in one way share a client: a launch opens several, and is over in seconds."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def connect(options: S3Options, config: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """A new botocore session and an S3 client of it. ``config`` overrides what ``botocore.config.Config`` is given.

    A fresh session reads credentials anew; one that was given (``as_session``) refreshes its own, and inside
    ``one_client`` nothing that is there is made again. Raises ``StorageError`` for settings that cannot be.
    """
    shared = _SHARED.get()
    if shared is None:
        return _connected(options, config)
    # Text, because ``config`` is a mapping and cannot be hashed. Only its identity distinguishes a session.
    way = repr((options, config, id(_GIVEN.get())))
    if way not in shared:
        shared[way] = _connected(options, config)
    return shared[way]


def _connected(options: S3Options, config: Mapping[str, Any] | None) -> tuple[Any, Any]:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    from sm_llm.storage.s3.bounded import BoundedSession
    from sm_llm.storage.s3.listing_text import note_problems
    from sm_llm.storage.s3.metadata_services import refuse_metadata

    try:
        # Not by boto3, whose import costs a short copy more than all its requests.
        session = _GIVEN.get() or fresh_session()
        client = session.create_client(
            "s3",
            endpoint_url=options.endpoint_url,
            region_name=options.region or session.get_config_variable("region") or "us-east-1",
            config=Config(**{**_CONFIG, **(config or {})}),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"S3 cannot be reached with these settings: {error}") from error
    # The client's endpoint and not the option: AWS's own configuration and variables may name one, too.
    refuse_metadata(client.meta.endpoint_url)
    # botocore has no public hook around one whole answer, and its timeouts begin anew with every byte.
    client._endpoint.http_session = BoundedSession(client._endpoint.http_session, answer_seconds(client))
    note_problems(client)
    client.meta.events.register("before-call.s3.HeadBucket", _follow_once)
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-sign.s3.{operation}", _leave_files_unsigned)
    return session, client


def answer_seconds(client: Any) -> float:
    """Seconds in which one whole answer has to be there."""
    config = client.meta.config
    return float(config.connect_timeout + 2 * config.read_timeout)


def _follow_once(context: dict[str, Any], **_: Any) -> None:
    """The SDK asks for a bucket's region when an answer leads elsewhere; that question is not redirected in turn."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _leave_files_unsigned(request: Any, **_: Any) -> None:
    """Bodies that are files are not read to be signed: S3 compares the checksum of the whole.

    The runtime would read them, and print a traceback if an upload is broken off meanwhile.
    """
    from botocore.config import Config

    if not isinstance(request.data, bytes | bytearray):
        unsigned = Config(s3={"payload_signing_enabled": False})
        request.context["client_config"] = request.context["client_config"].merge(unsigned)


@contextmanager
def s3_errors(uri: str, action: str, key: str, permission: str = "") -> Iterator[None]:
    """Raise an error of the SDK as a storage error that names the place, the key and what to do."""
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    # It is a ``StorageError`` already, but one that names neither the place nor the key.
    except AnswerError as error:
        raise StorageError(f"{uri}: cannot {action} {key!r}: {error}") from error
    except (ResponseParserError, *NONSENSE) as error:
        raise StorageError(f"{uri}: cannot {action} {key!r}: the answer is not one of S3's ({error})") from error
    except ClientError as error:
        raise StorageError(f"{uri}: cannot {action} {key!r}: {_meaning(error, permission)}") from error
    except (BotoCoreError, HTTPClientError) as error:
        raise StorageError(f"{uri}: cannot {action} {key!r}: {error}{credentials_hint(error)}") from error


def header(answer: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    """A field of an answer. Raises ``AnswerError`` if it is missing or of another kind."""
    value = answer.get(name)
    # An empty text is as good as none; a size of 0 is a size.
    if not value and not isinstance(value, int):
        value = None
    if not isinstance(value, kind) or (isinstance(value, int) and not 0 <= value <= LARGEST_BYTES):
        raise AnswerError(f"the answer has no usable {name} (got {value!r}). Is the endpoint an S3 store?")
    return value


def require_stored(answer: Mapping[str, Any], checksum: str) -> str:
    """The entity tag in the answer to a PUT of one object.

    Raises ``AnswerError`` for an answer that S3 does not give: another program may have given it, and nothing is
    stored. ``checksum`` is the object's CRC64NVME in base64; an answer that names one must name that.
    """
    require_status(answer)
    tag = header(answer, "ETag", str).strip('"')
    if (named := answer.get("ChecksumCRC64NVME") or checksum) != checksum:
        raise AnswerError(f"the answer names the checksum {named!r} of what was stored, not {checksum!r}")
    return tag


def require_status(answer: Mapping[str, Any]) -> None:
    """Raise ``AnswerError`` unless the status is 200: a part of an object, or nothing, is no whole answer."""
    if (status := answer["ResponseMetadata"]["HTTPStatusCode"]) != 200:
        raise AnswerError(f"the answer has the status {status}, expected 200")


def small_body(answer: Mapping[str, Any], uri: str, key: str) -> bytes:
    """The body of an object. Raises ``TooLargeError`` above ``SMALL_BYTES``, ``AnswerError`` if not all of it comes."""
    require_status(answer)
    header(answer, "ETag", str)
    size = header(answer, "ContentLength", int)
    if size > SMALL_BYTES:
        raise TooLargeError(f"{uri}: {key!r} has {size:,} bytes; of such an object at most {SMALL_BYTES:,} are read")
    # One byte more than stated, so that a longer body is noticed and yet not read as a whole.
    body: bytes = answer["Body"].read(size + 1)
    if len(body) != size:
        raise AnswerError(f"{len(body):,} of {size:,} bytes arrived")
    return body


def code_of(error: BaseException | None) -> str:
    """The error code of a ``ClientError``; empty for any other error."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def status_of(error: BaseException | None) -> int:
    """The HTTP status of a ``ClientError``; 0 for any other error."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _response(error: BaseException | None) -> Mapping[str, Any]:
    # Errors of the connection have this attribute too, with other things in it.
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def is_expired(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, reports that the credentials have expired."""
    while error is not None:
        # Engines that are not the SDK report it in the text of their errors alone.
        if code_of(error) in EXPIRED or "ExpiredToken" in str(error):
            return True
        error = error.__cause__
    return False


def _meaning(error: Any, permission: str) -> str:
    code = code_of(error)
    message = error.response.get("Error", {}).get("Message", "") or str(error)
    if code in EXPIRED:
        return f"the credentials have expired ({code}). Refresh them; what was done so far is kept"
    if code in DENIED:
        wanted = f" Needed: {permission}." if permission else ""
        return f"access denied ({message}).{wanted} Check with: sm-llm doctor --storage URI"
    if code in _UNKNOWN_KEYS:
        return f"{code} {message.rstrip('.')}{_CREDENTIALS}"
    if code == "NoSuchBucket":
        return "the bucket does not exist. Create it first; buckets are never made in passing"
    if code == "RequestTimeTooSkewed":
        return f"this machine's clock is wrong ({message})"
    if code == "ENOSPC":
        return f"disk full ({message})"
    return f"{code} {message}".strip()


def credentials_hint(error: BaseException) -> str:
    """What to do where the SDK found no usable credentials, to follow its own words; empty for other errors."""
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"):
        return _CREDENTIALS
    if name in ("UnauthorizedSSOTokenError", "SSOTokenLoadError"):
        return ". Log in again: aws sso login"
    return ""
