"""Specifications before they are checked: nested plain values that remember where each was written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.base import SpecModel
from sm_llm.spec.schema import block_for, child, constant, tag, tag_values, takes_texts

Path = tuple[str, ...]


# Bounds of what is read at all: YAML aliases and deep nesting can make a small file use all memory or the whole stack.
MOST_VALUES = 10_000
DEEPEST = 64
MOST_CHARACTERS = 1_000_000
# Of a whole number: about a thousand digits.
_LARGEST_BITS = 3300
SHOWN_KEY = 60
"""Characters of a key in a message: a path that is too deep may be as long as a file."""


@dataclass
class Size:
    """How much of a nested value has been seen, and how deep it goes: more than any specification needs is refused."""

    values: int = 0
    characters: int = 0
    depth: int = 0

    def enter(self, characters: int = 0) -> str:
        """Count a value, of so many characters, and go into it; what is wrong, if it is one too many or too deep."""
        self.values += 1
        self.characters += characters
        self.depth += 1
        if self.depth > DEEPEST:
            return f"is nested more than {DEEPEST} levels deep"
        if self.characters > MOST_CHARACTERS:
            return f"holds more than {MOST_CHARACTERS:,} characters"
        return f"holds more than {MOST_VALUES:,} values" if self.values > MOST_VALUES else ""

    def leave(self) -> None:
        """Come out of the value entered last."""
        self.depth -= 1


@dataclass
class Tree:
    """A nested value, where each of its parts was written, and how plain YAML scalars were spelt."""

    value: Any = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    """Path -> ``job.yaml:12``, ``override``, ...; of leaves and of blocks."""
    texts: dict[Path, str] = field(default_factory=dict)
    """Path -> the characters typed, where they were not quoted: an unquoted 010 is ``"010"`` where text is wanted."""

    def put(self, path: Path, other: Tree, annotation: Any) -> None:
        """Set ``other`` at ``path``: a mapping merges into a mapping, everything else replaces what is there.

        A mapping that is empty, or that names another class of a tagged union (``format: synthetic`` over
        ``format: rows``), replaces as well. null takes an entry out of a free mapping of texts (``environment``).
        ``annotation`` is the type of the whole tree.
        """
        parent, holder = self._reach(path[:-1], annotation, other.origin(()))
        old = parent.get(path[-1])
        if _merges(old, other.value, tag(child(holder, parent, path[-1]))):
            for name, part in other.parts().items():
                self.put((*path, name), part, annotation)
            return
        # Origins of what is replaced, and of all below it, would name the wrong place.
        self._forget(path)
        # Where there is no such entry the null stays, and is refused: nothing would be removed.
        if old is not None and other.value is None and takes_texts(holder):
            del parent[path[-1]]
            return
        parent[path[-1]] = other.value
        self.origins.update({(*path, *rest): origin for rest, origin in other.origins.items()})
        self.texts.update({(*path, *rest): text for rest, text in other.texts.items()})

    def retag(self, path: Path, value: Any, annotation: Any) -> list[str]:
        """Name another class of a tagged union (``data.format``): keys that only the class before has are left out.

        Returns their names. Keys that neither class has stay, so that they are refused; so does everything where
        ``path`` is not a tag or ``value`` names no class.
        """
        holder, kind = self.get(path[:-1]), annotation
        for index, key in enumerate(path[:-1]):
            kind = child(kind, self.get(path[:index]), key)
        new = tag_values(kind).get(value) if isinstance(value, str) and tag(kind) == path[-1] else None
        old = block_for(kind, holder)
        if new is None or old is None or new is old:
            return []
        lost = [name for name in holder if name in old.model_fields and name not in new.model_fields]
        for name in lost:
            self.remove((*path[:-1], name))
        return lost

    def parts(self) -> dict[str, Tree]:
        """The part of this tree under each of its keys."""
        found = {name: Tree(value, {}, {}) for name, value in self.value.items()}
        for path, origin in self.origins.items():
            if path:
                found[path[0]].origins[path[1:]] = origin
        for path, text in self.texts.items():
            if path:
                found[path[0]].texts[path[1:]] = text
        return found

    def get(self, path: Path) -> Any:
        """The value at ``path``, or None."""
        node = self.value
        for key in path:
            if isinstance(node, dict):
                node = node.get(key)
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node

    def replace(self, path: Path, value: Any) -> None:
        """Put another value where one is, keeping its origin."""
        holder = self.get(path[:-1])
        holder[int(path[-1]) if isinstance(holder, list) else path[-1]] = value

    def remove(self, path: Path) -> None:
        """Take away a mapping's key, if it is there."""
        holder = self.get(path[:-1])
        if isinstance(holder, dict):
            # First, because it searches for the value.
            self._forget(path)
            holder.pop(path[-1], None)

    def origin(self, path: Path) -> str:
        """Where the value at ``path``, or else the nearest block around it, was written; empty if nowhere."""
        ends = range(len(path), -1, -1)
        return next((self.origins[path[:end]] for end in ends if path[:end] in self.origins), "")

    def _reach(self, path: Path, annotation: Any, origin: str) -> tuple[dict[str, Any], Any]:
        node, kind = self.value, annotation
        for index, key in enumerate(path):
            kind = child(kind, node, key)
            # A value that is not a mapping gives way to one: the later source wins.
            if not isinstance(node.get(key), dict):
                self._forget(path[: index + 1])
                node[key] = {}
                self.origins[path[: index + 1]] = origin
            node = node[key]
        return node, kind

    def _forget(self, path: Path) -> None:
        # A default's block has a value and no origin of its own; only where there is neither is nothing known below.
        if path not in self.origins and self.get(path) is None:
            return
        for table in (self.origins, self.texts):
            for known in [known for known in table if known[: len(path)] == path]:
                del table[known]


def from_python(value: Any, origin: str) -> Tree:
    """A Python value: mappings, sequences, scalars, paths and specification objects.

    Of an object only the fields that were set are taken, so that user defaults still apply to the others. Raises
    ``SpecError`` for more values, levels or digits than a specification has.
    """
    tree = Tree(None)
    tree.value = _plain(value, (), tree.origins, origin, Size())
    return tree


def _merges(old: Any, new: Any, key: str | None) -> bool:
    if not (isinstance(old, dict) and isinstance(new, dict) and new):
        return False
    return key is None or key not in new or new[key] == old.get(key)


def _characters(value: Any) -> int:
    """Of a text, or of the keys of a mapping."""
    if isinstance(value, Mapping):
        return sum(len(key) for key in value if isinstance(key, str))
    return len(value) if isinstance(value, str | bytes) else 0


def _assert_text_keys(value: Mapping[Any, Any], path: Path, origin: str) -> None:
    """Raises ``SpecError`` for other keys: of {1: a, "1": b} one entry would be lost without a word."""
    if wrong := [shown_key(key) for key in value if not isinstance(key, str)]:
        problem = f"has the key {wrong[0]}, and keys are text"
        remedy = 'Write the name of a field, in quotes: {"max_steps": 100}'
        raise SpecError([Issue("override-key-not-text", ".".join(path[:3]), problem, remedy=remedy, origin=origin)])


def shown_key(key: object) -> str:
    """A key of a mapping in Python as messages show it."""
    try:
        return repr(key)[:SHOWN_KEY]
    except ValueError:  # Python refuses to write integers of more than 4,300 digits
        return f"of type {type(key).__name__}"


def _plain(value: Any, path: Path, origins: dict[Path, str], origin: str, size: Size) -> Any:
    origins[path] = origin
    if problem := size.enter(_characters(value)):
        raise SpecError([Issue("value-too-large", ".".join(path[:3]), problem, origin=origin)])
    if isinstance(value, SpecModel):
        kind = type(value)
        # A tag is kept even where it was not set: it chooses the class.
        kept = [name for name in kind.model_fields if name in value.model_fields_set or constant(kind, name)]
        value = {name: getattr(value, name) for name in kept}
    if isinstance(value, Mapping):
        _assert_text_keys(value, path, origin)
        value = {str(key): _plain(item, (*path, str(key)), origins, origin, size) for key, item in value.items()}
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        value = [_plain(item, (*path, str(at)), origins, origin, size) for at, item in enumerate(value)]
    # Python refuses to write integers of more than 4,300 digits as text, and messages show values.
    elif isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        problem = f"is a number of {value.bit_length():,} bits"
        raise SpecError(
            [
                Issue(
                    "number-too-long",
                    ".".join(path),
                    problem,
                    remedy="Give one that means something here",
                    origin=origin,
                )
            ]
        )
    size.leave()
    return value
