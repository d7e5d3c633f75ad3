"""What a backend adds to a plan: faults, warnings, and facts to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.errors import Fault


@dataclass(frozen=True)
class Review:
    """A backend's view of one plan. ``facts`` are names and values in words, in the order to show them."""

    faults: tuple[Fault, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
