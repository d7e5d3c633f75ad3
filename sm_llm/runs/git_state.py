"""The git checkout that a run is launched from: its commit, and what was changed since, without secrets."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from sm_llm.code_redaction import redact_assignments
from sm_llm.spec.environment.secret_files import secret_by_content, secret_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DIFF_BYTES = 1 << 20
# Of the changes that are searched for secrets, of which the record holds fewer.
_READ_BYTES = 4 << 20
# A checkout on a slow network disk must not hold up a launch: the record is then without its state.
_SECONDS = 10.0
# A checkout's own configuration could start programs: hooks, a file system monitor, diff drivers, transports for
# objects that a partial clone lacks.
_INERT = (
    "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "diff.external=",
    "-c", "protocol.allow=never", "--no-optional-locks", "--no-pager",
)  # fmt: skip
_FIXED = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
# Not required and empty: git takes the file as it is.
_NO_FILTER = {"clean": "", "process": "", "required": "false"}
# Scope, NUL, name: the user's own configuration (global, system) is trusted and does not match.
_FILTER = re.compile(rb"(?:local|worktree)\0(filter\.[^\n]+)\.(?:clean|process|smudge|required)(?:\n|$)", re.IGNORECASE)
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all")


class GitState(BaseModel):
    """The commit of the folder a run was launched from, and what was changed since (cut at 1 MiB)."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    commit: str
    diff: str = ""
    """Changes to tracked files, with tokens, private keys and the values of names like ``db_password`` hidden."""
    diff_is_cut: bool = False
    left_out: tuple[str, ...] = ()
    """Changed files that hold secrets; the diff is without them."""


def git_state(
    folder: Path, *, with_diff: bool = True, run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run
) -> GitState | None:
    """Commit and uncommitted diff of the checkout around ``folder``; None outside one or without git."""
    # None as well in a repository without a commit, which has nothing to compare with.
    commit = _git(folder, ["rev-parse", "HEAD"], run)
    top = _git(folder, ["rev-parse", "--show-toplevel"], run)
    if commit is None or top is None:
        return None
    name = commit.decode().strip()
    if not with_diff:
        return GitState(commit=name)
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    inert = _without_own_filters(root, run)
    changed = _git(root, [*_DIFF, "--name-only", "-z", "HEAD"], run, inert) or b""
    secret = tuple(it for it in map(os.fsdecode, filter(None, changed.split(b"\0"))) if _is_secret(root, it))
    # ``literal``: otherwise a name that holds ``*`` or ``[`` would be a pattern.
    excluded = [f":(exclude,literal){it}" for it in secret]
    diff = _git(root, [*_DIFF, "HEAD", "--", ".", *excluded], run, inert) or b""
    if len(diff) > _READ_BYTES:
        # At the end of a line, because secrets are searched for line by line.
        diff = diff[: diff.rfind(b"\n", 0, _READ_BYTES) + 1]
    return GitState(
        commit=name,
        # Hidden before it is cut inside a line: half a token has no format any more.
        diff=redact_assignments(diff.decode("utf-8", "replace"))[:_DIFF_BYTES],
        diff_is_cut=len(diff) > _DIFF_BYTES,
        left_out=secret,
    )


def _is_secret(root: Path, name: str) -> bool:
    if secret_by_name(name):
        return True
    path = root / name
    try:
        return path.is_file() and bool(secret_by_content(path))
    except OSError:
        # A file that cannot be read may hold anything.
        return True


def _without_own_filters(root: Path, run: Callable[..., Any]) -> dict[str, str]:
    """Variables that switch off the filters which the checkout's own configuration defines; the user's stay."""
    # NUL separates, because a value may hold line ends.
    listing = _git(root, ["config", "--show-scope", "--null", "--get-regexp", r"^filter\..*"], run) or b""
    parts = listing.split(b"\0")
    entries = [b"\0".join(pair) for pair in zip(parts[::2], parts[1::2], strict=False)]  # scope, then name and value
    found = dict.fromkeys(os.fsdecode(match[1]) for it in entries if (match := _FILTER.match(it)))
    settings = [(f"{name}.{key}", value) for name in found for key, value in _NO_FILTER.items()]
    pairs = {
        f"GIT_CONFIG_{kind}_{n}": it[kind == "VALUE"] for n, it in enumerate(settings) for kind in ("KEY", "VALUE")
    }
    return {"GIT_CONFIG_COUNT": str(len(settings)), **pairs}


def _git(
    folder: Path, arguments: list[str], run: Callable[..., Any], variables: Mapping[str, str] | None = None
) -> bytes | None:
    """What git prints. Variables of git's own that name another repository or program are not meant for this."""
    command = ["git", "-C", str(folder), *_INERT, *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ = {**own, **_FIXED, **(variables or {})}
    try:
        done = run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
