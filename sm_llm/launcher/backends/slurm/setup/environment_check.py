"""Checks the Python environment that runs it: pins, imports and a digest of all that is installed.

It runs on the nodes of a cluster, from one file and with the standard library alone: ``check.py PINS... -- MODULE...``,
where PINS are files of ``name==version`` lines. Prints one line, ``environment NODE DIGEST`` and then what is wrong.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import socket
import sys
from importlib.metadata import distributions
from pathlib import Path

_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;#]+)")


def canonical(name: str) -> str:
    """A distribution's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Distribution -> version, of this environment."""
    return {canonical(it.metadata["Name"]): it.version for it in distributions() if it.metadata["Name"]}


def digest(found: dict[str, str]) -> str:
    """SHA-256 (64 hex digits) of names and versions: nodes that have the same packages have the same."""
    return hashlib.sha256("\n".join(f"{name}=={found[name]}" for name in sorted(found)).encode()).hexdigest()


def pin_problems(texts: list[str], found: dict[str, str]) -> list[str]:
    """Pins that the environment does not have; a build behind a ``+`` is not compared."""
    problems = []
    for line in (line.strip() for text in texts for line in text.splitlines()):
        match = _PIN.match(line)
        if match is not None and (has := found.get(canonical(match[1]), "missing")).partition("+")[0] != match[2]:
            problems.append(f"{match[1]} is {has}, not {match[2]}")
    return problems


def import_problems(modules: list[str]) -> list[str]:
    """Modules that cannot be imported, with the first line of why."""
    problems = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # any error of a foreign module
            problems.append(f"import {name}: {type(error).__name__}: {str(error).partition(os.linesep)[0]}")
    return problems


def main(arguments: list[str]) -> int:
    """Returns 1 where something is wrong."""
    split = arguments.index("--")
    # Read before the imports, which may change what the interpreter finds.
    found = installed()
    texts = [Path(it).read_text(encoding="utf-8") for it in arguments[:split]]
    problems = [*pin_problems(texts, found), *import_problems(arguments[split + 1 :])]
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    print("environment", node, digest(found), "; ".join(problems) or "ok", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
