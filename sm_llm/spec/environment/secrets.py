"""Secrets in a specification: references to where they are kept, never the values themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.redaction import HIDDEN, is_token_shaped
from sm_llm.secret_names import is_secret_name, words
from sm_llm.spec.backends.table import options_class
from sm_llm.spec.environment.variables import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.spec.loading.tree import Path, Tree

FORMS = "env:NAME, file:/PATH, secretsmanager:ARN, ssm:NAME or k8s:SECRET/KEY"
_REFERENCE = re.compile(
    r"env:[A-Za-z_][A-Za-z0-9_]*|file:[/~].*|secretsmanager:arn:[\w-]+:secretsmanager:[\w-]+:\d{12}:secret:\S+"
    r"|ssm:[\w./:-]+|k8s:[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[\w.-]+"
)
_TYPED = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[^\s<>{}$/][^\s<>{}$]{7,}")
"""A value of an argument that may be a password: no path, piece of text, placeholder or number."""


def conceal(tree: Tree) -> list[Issue]:
    """Take every secret that was typed into a specification out of it; one issue for each, without its value.

    A secret is anything in the shape of a token wherever it stands, whatever ``secrets`` holds that is not a reference,
    and the value of an environment variable whose name marks it as one (``WANDB_API_KEY``); of an argument of a program
    only if it is made of letters and digits, since ``--audio_token`` may mean a piece of text.
    """
    issues = []
    leaves = list(_leaves(tree.value, ()))
    values = dict(leaves)
    options = options_class(tree.get(("backend",)))
    keeper = options.secret_keeper if options is not None else "env"
    for path, value in leaves:
        if problem := _problem(path, value) or _argument_problem(path, values):
            tree.replace(path, HIDDEN)
            tree.texts.pop(path, None)
            issues.append(
                Issue(
                    "secret-written-out",
                    ".".join(path),
                    problem,
                    remedy=_remedy(path, keeper),
                    origin=tree.origin(path),
                )
            )
    return issues


def _problem(path: Path, value: Any) -> str:
    if entry := _entry(path, "secrets"):
        if not VARIABLE.fullmatch(entry[0]):
            return "not a name of an environment variable"
        is_reference = len(entry) == 1 and isinstance(value, str) and _REFERENCE.fullmatch(value)
        return "" if is_reference else f"is not a reference: expected {FORMS}"
    if any(isinstance(it, str) and is_token_shaped(it) for it in (value, *path)):
        return "holds what looks like a token or password, and a specification is stored and shown"
    entry = _entry(path, "environment")
    if len(entry) == 1 and _is_secret(entry[0]) and value not in (None, ""):
        return "looks like a secret, and environment variables are stored and shown"
    return ""


def _argument_problem(path: Path, values: Mapping[Path, Any]) -> str:
    """What is wrong with an argument: ``name: value``, ``--name=value``, or ``--name`` and ``value``."""
    entry, value = _entry(path, "task"), values[path]
    if len(entry) != 2 or entry[0] != "args" or not isinstance(value, str):
        return ""
    name = entry[1]
    if name.isdigit():
        flag, equals, rest = value.partition("=")
        before = str(values.get((*path[:-1], str(int(name) - 1)), ""))
        name, value = (flag, rest) if equals else (before, value)
        if not name.startswith("-") or "=" in name:
            return ""
    if is_secret_name(name) and _TYPED.fullmatch(value):
        return "looks like a secret, and arguments are stored and shown"
    return ""


def _is_secret(variable: str) -> bool:
    """Whether a variable of this name holds a secret; of keys, which variables seldom name otherwise, all do."""
    spelt = [it for it in words(variable) if not it.isdigit()]
    return is_secret_name(variable) or spelt[-1:] in (["key"], ["keys"])


def _entry(path: Path, block: str) -> Path:
    """The part of ``path`` inside such a block of a job, a workflow or a step; empty if it is elsewhere."""
    if path[:1] == (block,):
        return path[1:]
    return path[3:] if path[:1] == ("steps",) and path[2:3] == (block,) else ()


def _remedy(path: Path, keeper: str) -> str:
    """``keeper``: where a job of this backend can read a secret."""
    if entry := _entry(path, "secrets"):
        return f"Keep the value elsewhere and refer to it: secrets.{entry[0]}={keeper}:{entry[0]}"
    name = path[-1].upper() if re.fullmatch(r"[A-Za-z_]+", path[-1]) else "NAME"
    return f"Refer to it instead, for example secrets.{name}={keeper}:{name}; the worker gets it as a variable"


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    elif path:
        yield path, value
