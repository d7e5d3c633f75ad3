"""What processes of a job send each other as text: JSON of known types, since a pickle would run what it holds."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from sm_llm.errors import CheckpointError, RunFailed, StorageError
from sm_llm.storage.publication.publish import CommitManifest, CommitResult, Newest, Rejected, Save

# The classes that a message may hold, beside what JSON has and tuples of it.
_TYPES: dict[str, type[Any]] = {
    it.__name__: it for it in (CheckpointError, CommitManifest, Newest, CommitResult, Rejected, Save, StorageError)
}


def encode(value: Any) -> str:
    """``value`` as text. Raises ``TypeError`` for one that no message may hold."""
    return json.dumps(_plain(value))


def decode(text: str) -> Any:
    """The value of a message. Raises ``RunFailed`` for text that ``encode`` did not write."""
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
        raise RunFailed(f"a message of another process cannot be read: {error}") from error


def _plain(value: Any) -> Any:
    # Exact types: a subclass would arrive as its base, without notice.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return {"of": type(value).__name__, "items": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"of": "dict", "items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    # An error of a derived class travels as the nearest known one.
    name = next((name for kind in type(value).__mro__ for name, it in _TYPES.items() if it is kind), None)
    if name is None:
        raise TypeError(f"a message cannot hold a {type(value).__name__}")
    if isinstance(value, BaseModel):
        return {"of": name, "items": value.model_dump(mode="json")}
    if isinstance(value, Exception):
        return {"of": name, "items": str(value)}
    return {"of": name, "items": {it.name: _plain(getattr(value, it.name)) for it in fields(value)}}


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        if isinstance(plain, list):
            raise TypeError("a bare list")
        return plain
    name, items = plain["of"], plain["items"]
    if name in ("list", "tuple"):
        return [*map(_value, items)] if name == "list" else tuple(map(_value, items))
    if name == "dict":
        return {_value(key): _value(item) for key, item in items}
    kind = _TYPES[name]
    if issubclass(kind, BaseModel):
        # Validated again: what arrives was written by another process.
        return kind.model_validate(items)
    if is_dataclass(kind):
        return kind(**{key: _value(item) for key, item in items.items()})
    return kind(str(items))
