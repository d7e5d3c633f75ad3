"""The locks: packages that every image stack lacks, and that a node installs on a stock image."""

from __future__ import annotations

from importlib.resources import files


def lock_text(line: str) -> str:
    """The lock of an image stack, as pip reads it."""
    return (files("sm_llm") / "locks" / f"{line}.txt").read_text(encoding="utf-8")


def packages_of(line: str) -> list[str]:
    """The packages of a line's lock, as ``name==version``."""
    lines = (text.partition("#")[0].strip() for text in lock_text(line).splitlines())
    return [text for text in lines if text and not text.startswith("-")]
