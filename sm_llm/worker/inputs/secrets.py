"""Resolves a job's secrets, in the worker alone: into its environment, and out of everything it writes."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from sm_llm.errors import RunFailed
from sm_llm.redaction import SHORTEST, Hidden
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

K8S_MOUNT = Path("/var/run/secrets/sm-llm")
"""A Kubernetes manifest of ours mounts the secret SECRET as the folder SECRET here, with a file for each KEY."""


@contextmanager
def secrets_at_hand(
    references: Mapping[str, str],
    environ: MutableMapping[str, str] = os.environ,
    k8s_mount: Path = K8S_MOUNT,
    warn: Callable[[str], None] = lambda message: None,
) -> Iterator[Hidden]:
    """Set every secret as a variable of this location while the block runs, and keep the values out of its output.

    Credentials inside addresses and tokens in published formats are kept out of it in any case. Yields what hides them
    in a text. ``warn`` is called for each value that is too short to be hidden.

    Raises ``RunFailed``, naming secrets and references but no value, for all that cannot be read.
    """
    # All of them before one is set: a job with a part of its secrets does not start.
    values = resolve(references, environ, k8s_mount)
    for name, value in values.items():
        if len(value) < SHORTEST:
            held = counted(len(value), "character")
            warn(f"secrets.{name}: a value of {held} is not hidden in output. Use at least {SHORTEST}")
    hidden = Hidden(tuple(values.values()))
    before = {name: environ.get(name) for name in values}
    streams = sys.stdout, sys.stderr
    environ.update(values)
    sys.stdout, sys.stderr = (cast("TextIO", _Discreet(stream, hidden)) for stream in streams)
    try:
        yield hidden
    finally:
        # The streams of before, not Python's own: a test or a caller may have replaced them.
        sys.stdout, sys.stderr = streams
        for name, old in before.items():
            environ.pop(name, None)
            if old is not None:
                environ[name] = old


def resolve(references: Mapping[str, str], environ: Mapping[str, str], k8s_mount: Path = K8S_MOUNT) -> dict[str, str]:
    """Name -> value of every secret. Raises ``RunFailed`` for all that cannot be had, at once."""
    ways: dict[str, Callable[[str], str]] = {
        "env": lambda name: _from_environment(name, environ),
        "file": lambda path: _from_file(Path(path).expanduser()),
        "secretsmanager": _from_secrets_manager,
        "ssm": _from_parameter_store,
        "k8s": lambda location: _from_file(k8s_mount / location),
    }
    values, problems = {}, []
    for name, reference in references.items():
        kind, _, location = reference.partition(":")
        try:
            value = ways[kind](location)
            if not value:
                raise _UnavailableError("is empty")
            values[name] = value
        except _UnavailableError as error:
            problems.append(f"secrets.{name}: {reference} {error}")
    if problems:
        raise RunFailed("; ".join(problems))
    return values


class _UnavailableError(Exception):
    """Why a secret cannot be had, as the end of a sentence that begins with its reference."""


def _from_environment(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise _UnavailableError(f"is not set where the worker runs. Set the variable {name} before you launch")
    return environ[name]


def _from_file(path: Path) -> str:
    """The text without the line end that editors and ``echo`` leave behind it."""
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise _UnavailableError(f"cannot be read where the worker runs: {path}: {error.strerror}") from None
    # Without its cause, in a traceback as well: this error holds the bytes, which are the secret.
    except UnicodeDecodeError:
        raise _UnavailableError("is not text") from None


def _from_secrets_manager(arn: str) -> str:
    # A secret may be in another region than the job.
    region = arn.split(":")[3]
    answer = _ask_aws("secretsmanager", lambda client: client.get_secret_value(SecretId=arn), region)
    if "SecretString" not in answer:
        raise _UnavailableError("holds bytes, not text")
    return str(answer["SecretString"])


def _from_parameter_store(name: str) -> str:
    region = name.split(":")[3] if name.startswith("arn:") else None
    answer = _ask_aws("ssm", lambda client: client.get_parameter(Name=name, WithDecryption=True), region)
    return str(answer["Parameter"]["Value"])


def _ask_aws(service: str, ask: Callable[[Any], Mapping[str, Any]], region: str | None) -> Mapping[str, Any]:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise _UnavailableError("needs boto3 where the worker runs. pip install 'sm_llm[s3]'") from None
    try:
        return ask(boto3.client(service, region_name=region))
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "unknown error")
        action = {"secretsmanager": "secretsmanager:GetSecretValue", "ssm": "ssm:GetParameter"}[service]
        raise _UnavailableError(f"was not given ({code}). The worker's role needs {action} for it") from None
    except BotoCoreError as error:
        raise _UnavailableError(f"cannot be asked for ({error})") from None


class _Discreet:
    """A text stream that writes what it is given without the secrets in it."""

    def __init__(self, stream: TextIO, hidden: Hidden) -> None:
        self._stream = stream
        self._hidden = hidden

    def write(self, text: str) -> int:
        self._stream.write(self._hidden(text))
        # What the caller gave: the number that was written after replacing would look like a short write.
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        # Libraries ask a stream for its encoding, its descriptor and whether it is a terminal.
        return getattr(self._stream, name)
