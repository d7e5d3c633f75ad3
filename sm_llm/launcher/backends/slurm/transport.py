"""Runs commands on a login node: on this machine, or over one SSH connection that all calls share."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sm_llm.errors import QueryError
from sm_llm.owned import private_folder, temporary_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND_SECONDS = 120.0
_CONNECT_SECONDS = 30
_PERSIST_SECONDS = 120
_SSH_FAILED = 255
# Slurm's commands are often on the PATH of login shells alone: /etc/profile.d of HyperPod and ParallelCluster.
_LOGIN_SHELL = ("bash", "-lc")
_MARK = "--- output of sm_llm ---"
# What a profile prints comes before the mark, and the command's own output behind it.
_RUN = 'printf "%s\\n" "$0"; exec "$@"'
_CHANGED = "HOST IDENTIFICATION HAS CHANGED"
# A Unix socket's path has 107 characters at most, and ssh adds some while it makes one.
_LONGEST_SOCKET = 100
_SOCKET = "ssh-%C"
_DIGITS = 40 - len("%C")
"""What ssh's digest of the connection adds to the name of the socket."""


class NoAnswer(QueryError):
    """The login node did not answer: nothing is known of the jobs, and nothing has happened to them."""


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, and its exit code."""

    code: int
    output: bytes
    error: str

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")

    @property
    def words(self) -> str:
        """What went wrong, in the program's own words."""
        return self.error.strip() or self.text.strip() or f"exit code {self.code}"


class Transport(Protocol):
    """Where Slurm's commands are."""

    @property
    def where(self) -> str:
        """In words, for messages."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        """Run one program. Raises ``NoAnswer`` where it cannot be started or does not end in time."""

    def interactive(self, argv: Sequence[str]) -> list[str]:
        """The command that runs a program in the user's own terminal."""


@dataclass(frozen=True)
class LocalTransport:
    """This machine is the login node."""

    where: str = "this machine"

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        """Run one program."""
        try:
            return _run(argv, stdin)
        except FileNotFoundError:
            raise NoAnswer(
                f"{argv[0]} is not on this machine. Work on a login node of the cluster, or name one: "
                "backend.ssh_host=HOST"
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoAnswer(f"{argv[0]} on this machine: {error}") from error

    def interactive(self, argv: Sequence[str]) -> list[str]:
        """The program itself."""
        return list(argv)


@dataclass(frozen=True)
class SshTransport:
    """A login node that ``ssh`` reaches with the user's own configuration and keys; its host key must be known."""

    host: str
    program: str = "ssh"

    @property
    def where(self) -> str:
        return self.host

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> CommandResult:
        """Run one program. The first call opens the connection, the others share it."""
        command = [self.program, *self._options(), "--", self.host, shlex.join([*_LOGIN_SHELL, _RUN, _MARK, *argv])]
        try:
            answer = _run(command, stdin)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoAnswer(f"{self.host}: {error}") from error
        _, mark, output = answer.output.partition(f"{_MARK}\n".encode())
        # Without the mark the command was not run; with ssh's own code its connection was lost, and it may have been.
        if not mark or answer.code == _SSH_FAILED:
            raise NoAnswer(f"{self.host} does not answer over ssh: {_reason(answer)}. {self._remedy(answer.error)}")
        return CommandResult(answer.code, output, answer.error)

    def interactive(self, argv: Sequence[str]) -> list[str]:
        """Through ssh, which allocates a terminal."""
        # -t: without a terminal of its own a shell would neither prompt nor pass on Ctrl-C.
        shell = shlex.join([*_LOGIN_SHELL, 'exec "$@"', "shell", *argv])
        return [self.program, "-t", *self._options(), "--", self.host, shell]

    def _options(self) -> list[str]:
        options = {
            "BatchMode": "yes",  # a question for a password would wait for ever
            "StrictHostKeyChecking": "yes",
            "ConnectTimeout": str(_CONNECT_SECONDS),
            "ServerAliveInterval": "15",
            "ControlMaster": "auto",
            "ControlPersist": str(_PERSIST_SECONDS),
            "ControlPath": control_path(),
        }
        return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]

    def _remedy(self, error: str) -> str:
        if _CHANGED in error:
            return (
                "Ask whoever runs the cluster whether it was rebuilt. Only then remove the old key from known_hosts "
                f"(ssh-keygen -R HOST), and connect once by hand: ssh {self.host}"
            )
        if "host key" in error.lower():
            return f"Connect once by hand, compare the fingerprint and accept it: ssh {self.host}"
        return f"Check that this works without a question: ssh {self.host} true"


def control_path() -> str:
    """Where ssh keeps the socket of the connection that calls share."""
    folder = temporary_folder()
    if len(str(folder / _SOCKET)) > _LONGEST_SOCKET - _DIGITS:
        # macOS gives every user a TMPDIR that leaves no room.
        folder = private_folder(Path("/tmp") / folder.name)
    return str(folder / _SOCKET)


def _reason(answer: CommandResult) -> str:
    """In one line: ssh frames the warning of another host key with many."""
    if _CHANGED in answer.error:
        return "its host key is not the one that is known"
    return " ".join(answer.words.split())


def _run(argv: Sequence[str], stdin: bytes) -> CommandResult:
    found = subprocess.run(list(argv), input=stdin, capture_output=True, timeout=COMMAND_SECONDS, check=False)
    return CommandResult(found.returncode, found.stdout, found.stderr.decode("utf-8", "replace"))


def transport(ssh_host: str | None) -> Transport:
    """The transport to a login node; None is this machine."""
    return LocalTransport() if ssh_host is None else SshTransport(ssh_host)
