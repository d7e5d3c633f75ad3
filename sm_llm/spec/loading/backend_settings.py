"""Options of a backend without a job: where a cluster is, for verbs that ask the cluster itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import create_model

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.base import SpecModel
from sm_llm.spec.loading.overrides import given_twice, parse_fields, parse_overrides
from sm_llm.spec.tree import from_python
from sm_llm.spec.validation.fields import validate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.spec.loading.overrides import Override

Settings = TypeVar("Settings", bound=SpecModel)
_ROOT = "backend"


def backend_settings(
    kind: type[Settings], overrides: Sequence[Override], fields: Mapping[str, Any] | None = None
) -> Settings:
    """``backend.KEY=VALUE`` as an object of ``kind``. Raises ``SpecError`` with every issue."""
    typed, issues = parse_overrides(overrides)
    given, wrong = parse_fields(fields or {})
    issues += [*wrong, *given_twice([*typed, *given])]
    # The path of a message is then that of the same option in a job.
    whole = create_model("Settings", __base__=SpecModel, **{_ROOT: (kind, ...)})  # type: ignore[call-overload]
    tree = from_python({_ROOT: {}}, "")
    for path, value in [*typed, *given]:
        if path[0] == _ROOT:
            tree.put(path, value, whole)
        else:
            remedy = f"Write {_ROOT}.{path[-1]}=VALUE"
            issues.append(
                Issue("setting-of-no-backend", ".".join(path), "is not an option of a backend", remedy=remedy)
            )
    # After all changes, so that one message holds what is wrong with any of them.
    found, refused = validate(whole, tree)
    if found is None or issues or refused:
        raise SpecError([*issues, *refused])
    return cast("Settings", getattr(found, _ROOT))
