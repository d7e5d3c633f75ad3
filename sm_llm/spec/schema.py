"""Reading the specification classes as a schema: which class stands where, and what a value may be."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from sm_llm.spec.base import SpecModel

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation without ``None``; ``Annotated`` around a union is removed."""
    # A union with a tag is wrapped in Annotated; the Annotated of a single type belongs to that type and stays.
    if get_origin(annotation) is Annotated and _is_union(get_args(annotation)[0]):
        annotation = get_args(annotation)[0]
    if not _is_union(annotation):
        return (annotation,)
    return tuple(member for part in get_args(annotation) if part is not type(None) for member in members(part))


def is_optional(annotation: Any) -> bool:
    """Whether ``None`` is allowed."""
    return _is_union(annotation) and type(None) in get_args(annotation)


def blocks(annotation: Any) -> tuple[type[SpecModel], ...]:
    """The specification classes among the alternatives."""
    return tuple(kind for kind in members(annotation) if isinstance(kind, type) and issubclass(kind, SpecModel))


def child_blocks(annotation: Any) -> tuple[type[SpecModel], ...]:
    """The specification classes among the alternatives, and among the items of a mapping or list of them."""
    items = [get_args(kind)[-1] for kind in members(annotation) if get_origin(kind) in (dict, list, tuple)]
    return (*blocks(annotation), *(block for item in items for block in child_blocks(item)))


def tag(annotation: Any) -> str | None:
    """The key that distinguishes the classes of a union (``kind``, ``format``), or None."""
    classes = blocks(annotation)
    if len(classes) < 2:
        return None
    # A tag is a field that every class of the union has, with one possible value in each.
    first = classes[0].model_fields
    return next((name for name in first if all(constant(kind, name) for kind in classes)), None)


def tag_values(annotation: Any) -> dict[str, type[SpecModel]]:
    """Tag -> class of a tagged union."""
    key = tag(annotation)
    return {value: kind for kind in blocks(annotation) if key and (value := constant(kind, key))}


def default_block(field: FieldInfo) -> type[SpecModel] | None:
    """The class that a field is by default, if it is a block."""
    default = field.get_default(call_default_factory=True)
    return type(default) if isinstance(default, SpecModel) else None


def block_for(annotation: Any, value: Any) -> type[SpecModel] | None:
    """The class that a mapping at this place is meant to be, or None if it is none or not known."""
    classes = blocks(annotation)
    if len(classes) == 1:
        return classes[0]
    if key := tag(annotation):
        return tag_values(annotation).get(str(value.get(key))) if isinstance(value, Mapping) else None
    # Without a tag the keys show what is meant: the class that has most of them.
    keys = set(value) if isinstance(value, Mapping) else set()
    return max(
        (kind for kind in classes if keys & set(kind.model_fields)),
        key=lambda kind: len(keys & set(kind.model_fields)),
        default=None,
    )


def child(annotation: Any, value: Any, key: str) -> Any:
    """The annotation of ``key`` inside a value of type ``annotation``; ``Any`` where nothing is known."""
    if block := block_for(annotation, value):
        field = block.model_fields.get(key)
        return field.annotation if field else Any
    for kind in members(annotation):
        if get_origin(kind) in (dict, list, tuple):
            return get_args(kind)[-1]
    return Any


def takes_texts(annotation: Any) -> bool:
    """Whether it is a mapping whose keys are the user's own and whose values may be text, but not null."""
    items = [get_args(kind)[-1] for kind in members(annotation) if get_origin(kind) is dict]
    return any(str in members(item) and not is_optional(item) for item in items)


def knows(annotation: Any, value: Any, path: Sequence[str]) -> bool:
    """Whether the schema has a place for ``path`` in a value of type ``annotation``; free mappings have all."""
    if not path:
        return True
    inner = value.get(path[0]) if isinstance(value, Mapping) else None
    if block := block_for(annotation, value):
        field = block.model_fields.get(path[0])
        # A block that nobody wrote is of the default's class.
        usual = default_block(field) if field and inner is None else None
        return field is not None and knows(usual or field.annotation, inner, path[1:])
    # Several classes, and neither tag nor keys choose one: the path may be of any.
    if classes := blocks(annotation):
        return any(knows(kind, value, path) for kind in classes)
    items = [get_args(kind)[-1] for kind in members(annotation) if get_origin(kind) in (dict, list, tuple)]
    return annotation is Any or any(knows(item, inner, path[1:]) for item in items)


def dotted_paths(annotation: Any, value: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every path the schema knows below a value; free mappings contribute the keys they hold."""
    block = block_for(annotation, value)
    # Where neither a tag nor the keys choose a class, the keys of all of them may follow.
    untagged = blocks(annotation) if block is None and tag(annotation) is None else ()
    own = list(block.model_fields) if block else list(value) if isinstance(value, Mapping) else []
    for key in dict.fromkeys(map(str, [*own, *(name for kind in untagged for name in kind.model_fields)])):
        yield (*prefix, key)
        inner = value.get(key) if isinstance(value, Mapping) else None
        usual = default_block(block.model_fields[key]) if block and inner is None else None
        yield from dotted_paths(usual or child(annotation, value, key), inner, (*prefix, key))


def describe(annotation: Any) -> str:
    """What may stand here, in words: ``a whole number or null``."""
    words = [_describe_one(kind) for kind in members(annotation)]
    return " or ".join(dict.fromkeys(words)) + (" or null" if is_optional(annotation) else "")


def _describe_one(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _describe_one(get_args(kind)[0])
    simple = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if kind in simple:
        return simple[kind]
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin is Literal:
            return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
        case origin if origin is list:
            return f"a list (each item {describe(arguments[0])})"
        case origin if origin is tuple:
            return f"a list of {len(arguments)} (each item {describe(arguments[0])})"
    if blocks(kind):
        return "a mapping with " + ", ".join(kind.model_fields)
    return "a mapping" if get_origin(kind) is dict else "a value"


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def constant(kind: type[SpecModel], name: str) -> str | None:
    """The only value a field can have (``kind: train``), or None for an ordinary field."""
    field = kind.model_fields.get(name)
    values = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
    return values[0] if len(values) == 1 else None
