"""The sbatch script of an attempt, from one template; every value in it passes one filter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template

Option = tuple[str, str | None]
"""A long option and its value; None for an option without one."""

# Words that need no quotes in bash and in a line of options.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r'[\\"$`]')
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class BatchScript:
    """The values of the template."""

    run_id: str
    attempt: int
    options: Sequence[Option]
    """Of sbatch."""
    step_options: Sequence[Option]
    """Of srun."""
    environment: Sequence[tuple[str, str]]
    code: str
    folder: str
    python: str
    processes: int
    """Per node."""
    entry: str
    """The task's entrypoint, relative to the code."""
    absent: str
    """What it means if the code is not there."""
    no_python: str
    """What to do if the interpreter is not there."""
    is_container: bool = False
    umask: str = "077"
    requeues: bool = False
    time_limit: bool = False
    stopped_code: int = 0
    """Exit code after a stop in order."""
    auto_resume: bool = False
    max_requeues: int | None = None
    """None where nobody requeues."""
    outputs: Sequence[str] = ()
    """Folders that must be there before the step starts: a container cannot mount what is not."""

    def text(self) -> str:
        """The script. Raises ``ValueError`` for a value that a line of options cannot hold."""
        return _template().render(vars(self) | {"option_lines": option_lines(self.options)})


def option_lines(options: Sequence[Option]) -> str:
    """Lines of sbatch's options. Raises ``ValueError`` for a value that such a line cannot hold."""
    # A line break would end the line of the option, and bash would run what follows.
    for option, value in options:
        if value is not None and _UNPRINTABLE.search(value):
            raise ValueError(f"--{option} cannot hold {value!r}")
    return "\n".join(f"#SBATCH --{option}{'' if value is None else f'={quoted(value)}'}" for option, value in options)


def quoted(value: object) -> str:
    """One word for bash, and the same word where Slurm itself reads a line ``#SBATCH``.

    Between double quotes both take a backslash before one of ``\\ " $ ` `` for that character, and everything else as
    it stands; their readings of single quotes differ. Raises ``ValueError`` for NUL, which no word can hold.
    """
    text = str(value)
    if "\0" in text:
        raise ValueError("a value of the script holds a NUL character")
    if _PLAIN.fullmatch(text):
        return text
    # sbatch refuses a script that holds a carriage return before a line break.
    return f'"{_SPECIAL.sub(_escaped, text)}"'.replace("\r", "\"$'\\r'\"")


def _escaped(match: re.Match[str]) -> str:
    return f"\\{match[0]}"


def _comment(value: object) -> str:
    return _UNPRINTABLE.sub("?", str(value))


def _variable(name: str) -> str:
    """A name of a variable, which bash takes in no quotes."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of a variable")
    return name


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    # A name that the template lacks is an error, and not an empty text.
    environment = Environment(
        undefined=StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"q": quoted, "comment": _comment, "variable": _variable}
    source = (files("sm_llm") / "launcher" / "backends" / "slurm" / "job.sh.j2").read_text(encoding="utf-8")
    return environment.from_string(source)
