"""Walks a specification value by value, each with its declared class, and compares two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.spec.base import SpecModel
from sm_llm.spec.field_classes import Declared, FieldClass
from sm_llm.spec.loading.yaml_text import to_typed
from sm_llm.spec.schema import child_blocks

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

# Classes of fields that change nothing in the result.
_NO_RESULT = (FieldClass.FREE, FieldClass.RUN)
# Characters of a value in a message.
_LONGEST = 60


@dataclass(frozen=True)
class Leaf:
    """One value of a specification, by its dotted path."""

    path: str
    value: Any
    declared: Declared | None


def leaves(block: SpecModel, path: str = "", inherited: Declared | None = None) -> Iterator[Leaf]:
    """Every value of a specification with its class. A list, and a mapping of plain values, is one value."""
    for name, field in type(block).model_fields.items():
        here = f"{path}.{name}" if path else name
        yield from _leaves(getattr(block, name), here, declared(field) or type(block).fields_are or inherited)


def _leaves(value: Any, path: str, found: Declared | None) -> Iterator[Leaf]:
    if isinstance(value, SpecModel):
        yield from leaves(value, path, found)
    elif isinstance(value, Mapping) and any(isinstance(it, SpecModel) for it in value.values()):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}", found)
    elif isinstance(value, list | tuple):
        yield Leaf(path, [it.model_dump(mode="json") if isinstance(it, SpecModel) else it for it in value], found)
    else:
        yield Leaf(path, value, found)


def unclassified(
    kind: type[SpecModel], path: str = "", inherited: Declared | None = None, above: tuple[type[SpecModel], ...] = ()
) -> Iterator[str]:
    """Dotted path of every field below a class of blocks that has no class of its own or of a block around it."""
    for name, field in kind.model_fields.items():
        here, own = f"{path}.{name}" if path else name, declared(field) or kind.fields_are or inherited
        # A class that contains itself would be walked without end.
        blocks = [it for it in child_blocks(field.annotation) if it not in above]
        for block in blocks:
            yield from unclassified(block, here, own, (*above, kind))
        if own is None and not blocks:
            yield here


def declared(field: FieldInfo) -> Declared | None:
    """The class that a field declares itself."""
    return next((mark for mark in field.metadata if isinstance(mark, Declared)), None)


@dataclass(frozen=True)
class Difference:
    """One value that differs: its dotted path (or the name of what follows from it), its class, and both values."""

    field_class: FieldClass
    name: str
    before: Any
    now: Any
    is_settable: bool = True
    """Whether the newer specification has a value of this name that can be set."""

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.before)} -> {_short(self.now)} ({self.field_class})"


def spec_differences(before: SpecModel, now: SpecModel, *, only_free: bool = False) -> list[Difference]:
    """Every value that differs and makes it another specification; ``only_free``: those that do not.

    A value that one of the two does not have, because it has another kind of block there, is None.
    """
    first, second = ({leaf.path: leaf for leaf in leaves(spec)} for spec in (before, now))
    return [
        Difference(_class_of(leaf), path, _value(first.get(path)), _value(second.get(path)), path in second)
        for path, leaf in (first | second).items()
        if (_class_of(leaf) in _NO_RESULT) is only_free and not _equal(first.get(path), second.get(path))
    ]


def _class_of(leaf: Leaf) -> FieldClass:
    return leaf.declared.field_class if leaf.declared else FieldClass.WORK


def _equal(first: Leaf | None, second: Leaf | None) -> bool:
    return (first is None) == (second is None) and _value(first) == _value(second)


def _value(leaf: Leaf | None) -> Any:
    return None if leaf is None else leaf.value


def _short(value: Any) -> str:
    text = to_typed(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
