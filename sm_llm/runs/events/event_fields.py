"""Checks the fields of an event against its class: an event log is data that anybody may have written."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from sm_llm.runs.run_record import LATEST, MOST_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Mapping

# JSON has the types already: a number in quotes was not written by us.
_STRICT = ConfigDict(strict=True)
# JSON allows a whole number of any length; formatting or adding up a huge one would cost minutes or raise.
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Envelope(BaseModel):
    model_config = _STRICT

    kind: str
    time: Annotated[float, Field(ge=0, le=LATEST)]
    attempt: Annotated[int, Field(ge=0, le=MOST_ATTEMPTS)]


class _Part(BaseModel):
    """A mapping inside an event; fields that nobody reads are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Split(_Part):
    rows: _Count
    documents: _Count


class _Splits(_Part):
    train: _Split
    validation: _Split | None = None


class _Documents(_Part):
    used: _Count


class _Tokenizer(_Part):
    vocab_size: _Count


class _Account(_Part):
    seq_length: _Count
    tokens_in: _Count
    tokens_kept: _Count
    documents: _Documents
    tokenizer: _Tokenizer
    splits: _Splits


# (kind, field) -> what its mapping must hold: the parts that are read.
_INSIDE: dict[tuple[str, str], Any] = {("account", "account"): _Account}


def checked(record: Mapping[str, Any], kind: type | None) -> dict[str, Any]:
    """The event ``record`` with every field of its class ``kind``: those left out with their defaults, and no others.

    Of a kind that this release does not know (None) only kind, time and attempt are checked. Raises ``ValueError``.
    """
    try:
        envelope = _Envelope.model_validate(record).model_dump()
        # A log of a newer release must stay readable: what is not known is carried along and shown by nobody.
        if kind is None:
            return {**record, **envelope}
        model, defaults = _model(kind)
        return {**envelope, **defaults, **model.model_validate(record).model_dump(exclude_unset=True)}
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@cache
def _model(kind: type) -> tuple[type[BaseModel], dict[str, Any]]:
    """What validates the fields of an event class, and the defaults of those that may be left out."""
    hints, declared, defaults = get_type_hints(kind), {}, {}
    for it in fields(kind):
        # The envelope has checked it; in an event class it is a constant.
        if it.name == "kind":
            continue
        hint = _INSIDE.get((kind.kind, it.name)) or _bounded(hints[it.name])  # type: ignore[attr-defined]
        declared[it.name] = (hint, ... if it.default is MISSING else it.default)
        if it.default is not MISSING:
            defaults[it.name] = it.default
    return create_model(kind.__name__, __config__=_STRICT, **declared), defaults  # type: ignore[call-overload]


def _bounded(hint: Any) -> Any:
    """``hint`` with every whole number in it a count that fits into 63 bits."""
    if hint is int:
        return _Count
    origin, inside = get_origin(hint), tuple(map(_bounded, get_args(hint)))
    if origin in (Union, types.UnionType):
        return reduce(or_, inside)
    return origin[inside] if origin is not None else hint
