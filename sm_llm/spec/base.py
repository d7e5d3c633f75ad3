"""The common ground of all specification classes: strict, frozen, lazily built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict

from sm_llm.spec.field_classes import Declared

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class SpecModel(BaseModel):
    """A frozen specification block; an unknown key is an error, and so is a value of another type.

    The string under a field documents it: ``sm_llm.spec.reference.docs`` reads it from the source when somebody asks,
    which keeps it out of every start of the program.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    fields_are: ClassVar[Declared | None] = None
    """The class of fields that declare none themselves (``sm_llm.spec.field_classes``)."""


@dataclass(frozen=True)
class _SourceMark:
    """Marks a field whose value is a place that the task reads from."""


Source = Annotated[str, _SourceMark()]
"""A folder, file or URI that the task reads: ``sm_llm.spec.references.sources`` lists these fields."""


def is_source(field: FieldInfo) -> bool:
    """Whether a field holds one ``Source`` or several."""
    return any(isinstance(mark, _SourceMark) for mark in field.metadata) or _mentions_source(field.annotation)


def _mentions_source(annotation: Any) -> bool:
    marks = getattr(annotation, "__metadata__", ())
    return any(isinstance(mark, _SourceMark) for mark in marks) or any(map(_mentions_source, get_args(annotation)))
