"""The common ground of all specification classes: strict, frozen, lazily built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict

from sm_llm.spec.field_classes import Declared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic.fields import FieldInfo


class SpecModel(BaseModel):
    """A frozen specification block; an unknown key is an error, and so is a value of another type.

    The string under a field documents it: ``sm_llm.spec.reference.docs`` reads it from the source when somebody asks,
    which keeps it out of every start of the program.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    fields_are: ClassVar[Declared | None] = None
    """The class of fields that declare none themselves (``sm_llm.spec.field_classes``)."""


LocationUse = Literal["source", "pattern", "output"]
"""What a task does with a place: reads it, reads what a pattern matches, or writes there."""


@dataclass(frozen=True)
class _LocationMark:
    """Marks a field whose value is a place."""

    use: LocationUse


Source = Annotated[str, _LocationMark("source")]
"""A folder, file or URI that the task reads: ``sm_llm.spec.references.sources`` lists these fields."""
Pattern = Annotated[str, _LocationMark("pattern")]
"""Files that the task reads, as a pattern or URL: ``sm_llm.spec.references.patterns`` lists these fields."""
Output = Annotated[str, _LocationMark("output")]
"""A folder or server, beside the storage, that the task writes to: ``sm_llm.spec.references.outputs`` lists these
fields."""


def location_use(field: FieldInfo) -> LocationUse | None:
    """What the task does with the place, or the places, that a field holds; None for a field of something else."""
    return next(_uses(field.metadata, field.annotation), None)


def _uses(marks: Iterable[Any], annotation: Any) -> Iterator[LocationUse]:
    yield from (mark.use for mark in marks if isinstance(mark, _LocationMark))
    for part in get_args(annotation):
        yield from _uses(getattr(part, "__metadata__", ()), part)
