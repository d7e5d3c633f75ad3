"""A recipe as a file to own: every field it sets, and every field it could set as a comment, each explained."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.load import read_source, recipe_files
from sm_llm.spec.loading.yaml_text import to_yaml
from sm_llm.spec.reference.docs import class_doc, field_docs
from sm_llm.spec.schema import block_for, child, default_block, tag, tag_values
from sm_llm.spec.validation.fields import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

    from sm_llm.spec.base import SpecModel

_WIDTH = 110
_INDENT = "  "


def commented(recipe: str) -> str:
    """YAML text of a recipe that means the same as the recipe, with every field's documentation beside it.

    Fields that the recipe leaves at their default are there as comments. Raises ``SpecError`` for a name that is
    no recipe.
    """
    files = recipe_files()
    if recipe not in files:
        remedy = did_you_mean(recipe, files) or f"Recipes: {', '.join(files)}"
        raise SpecError([Issue("recipe-unknown", recipe, "is not a recipe", remedy=remedy)])
    value = read_source(recipe).value
    kind: type[SpecModel] = WorkflowSpec if "steps" in value else JobSpec
    text = files[recipe].read_text(encoding="utf-8")
    heading = [line for line in text.splitlines() if line.startswith("#")]
    return "\n".join([*heading, *_block(kind, value, kind)]) + "\n"


def _block(kind: type[SpecModel], value: dict[str, Any], annotation: Any) -> Iterator[str]:
    """Lines of one block. The key that chooses the class comes first."""
    docs, key = field_docs(kind), tag(annotation)
    for name in sorted(kind.model_fields, key=lambda name: name != key):
        field = kind.model_fields[name]
        if name == key:
            yield from _comment(class_doc(kind))
            others = [other for other in tag_values(annotation) if other != value[name]]
            yield f"{name}: {value[name]}  # or {', '.join(others)}"
            continue
        yield ""
        yield from _comment(docs.get(name, ""))
        if name in value:
            yield from _entry(name, value[name], child(kind, value, name))
        else:
            yield from (f"# {line}" if line else "#" for line in _unset(name, field))


def _entry(name: str, value: Any, annotation: Any) -> Iterator[str]:
    """``name: value``, over several lines for a mapping that holds something."""
    key = to_yaml(name)
    if not (isinstance(value, dict) and value):
        yield f"{key}: {to_yaml(value)}"
        return
    yield f"{key}:"
    block = block_for(annotation, value)
    yield from _indented(_block(block, value, annotation) if block else _entries(value, annotation))


def _entries(value: dict[str, Any], annotation: Any) -> Iterator[str]:
    for key, item in value.items():
        lines = list(_entry(key, item, child(annotation, value, key)))
        yield from ["", *lines] if len(lines) > 1 else lines


def _unset(name: str, field: FieldInfo) -> Iterator[str]:
    """A field at its default: its value, or the fields of the block that the default is."""
    default = field.get_default(call_default_factory=True)
    block = default_block(field) or block_for(field.annotation, None)
    if default is None or default is PydanticUndefined or block is None:
        yield f"{name}: {to_yaml(None if default is PydanticUndefined else default)}"
        return
    yield f"{name}:"
    yield from _indented(_unset_block(block))


def _unset_block(block: type[SpecModel]) -> Iterator[str]:
    docs = field_docs(block)
    for name, field in block.model_fields.items():
        lines = list(_unset(name, field))
        yield from _comment(docs.get(name, ""))
        yield from lines


def _indented(lines: Iterator[str]) -> Iterator[str]:
    first = True
    for line in lines:
        if line or not first:
            yield f"{_INDENT}{line}" if line else ""
        first = False


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text.replace("``", "`"), _WIDTH)]
