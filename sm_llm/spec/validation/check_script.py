"""Faults of a script task: what is to run, and with which arguments."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.tasks import ScriptTask

_FILE = re.compile(r"(?![/-])[\w.-]+(?:/[\w.-]+)*\.(?:py|sh)")
_MODULE = re.compile(r"-m [A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_LONGEST_WORD = 131_071
"""Linux's MAX_ARG_STRLEN, without the closing NUL."""
_KEY = re.compile(r"[^\s=]+")


def script_faults(task: ScriptTask) -> Iterator[Fault]:
    """Every fault of the entry, the arguments and the folders."""
    if not (_FILE.fullmatch(task.entry) or _MODULE.fullmatch(task.entry)) or ".." in task.entry.split("/"):
        remedy = "Write a .py or .sh file below source, or -m package.module"
        yield Fault("task.entry", "is not a program", task.entry, remedy)
    if task.source is not None and task.source.lower().endswith(_ARCHIVES):
        remedy = "Unpack it, and give the folder"
        yield Fault("task.source", "is an archive; a program is read from its folder", task.source, remedy)
    if isinstance(task.args, dict):
        for key, value in task.args.items():
            yield from _argument_faults(task, key, value)
    else:
        for index, word in enumerate(task.args):
            yield from _word_faults(f"task.args.{index}", word)
    for name in ("output_folder", "checkpoint_folder"):
        folder = getattr(task, name)
        if folder.startswith("/") or ".." in folder.split("/") or folder.strip("/.") == "":
            problem = "is not a folder below the program's working directory"
            yield Fault(f"task.{name}", problem, folder, "For example output")
    if task.output_folder.strip("/") == task.checkpoint_folder.strip("/"):
        problem = "is the output folder too: checkpoints would end up in the result"
        yield Fault("task.checkpoint_folder", problem, task.checkpoint_folder)


def _word_faults(path: str, word: Any) -> Iterator[Fault]:
    """What no program can be given as one argument (execve(2))."""
    if not isinstance(word, str):
        return
    if "\0" in word:
        yield Fault(path, "holds a NUL character, which ends an argument", word, "Leave it out")
    elif (length := len(word.encode("utf-8", "surrogateescape"))) > _LONGEST_WORD:
        problem = f"has {length:,} bytes; a program is given at most {_LONGEST_WORD:,} in one argument"
        yield Fault(path, problem, word, "Write args as a mapping with args_style: file")


def _argument_faults(task: ScriptTask, key: str, value: Any) -> Iterator[Fault]:
    path = f"task.args.{key}"
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        yield Fault(path, f"cannot be written down: {error}", value)
        return
    if task.args_style == "file":
        return
    for word in value if isinstance(value, list) else [value]:
        yield from _word_faults(path, word)
    if key.isdigit():
        problem, remedy = "a number is the place of a word in a list, not an argument's name", "Write args as a list"
        yield Fault(path, problem, key, remedy)
    if not _KEY.fullmatch(key):
        yield Fault(path, "an argument's name has no spaces and no equals sign", key)
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list | dict) for item in items):
        remedy = "Use args_style: file, or write args as a list"
        yield Fault(path, f"{task.args_style!r} cannot write nested values", value, remedy)
