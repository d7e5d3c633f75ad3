"""The generated pages of ``docs/reference`` are those of the code, and lack nothing."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from pydantic import Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.field_classes import FREE
from tests import references


@pytest.mark.parametrize("name", ["specification.md", "cli.md", "issues.md"])
def test_page_is_what_the_code_states(name: str) -> None:
    written = (references.FOLDER / name).read_text(encoding="utf-8")
    assert written == references.pages()[name], "stale: run python -m tests.references"


def test_there_is_not_an_other_page() -> None:
    assert {it.name for it in references.FOLDER.iterdir()} == set(references.pages())


class Described(SpecModel):
    """A block."""

    size: Annotated[int, FREE] = Field(default=10**6, ge=1, le=2**31)
    """Bytes of it."""


class Silent(SpecModel):
    """A block."""

    size: Annotated[int, FREE] = 1


def test_a_field_is_shown_with_type_default_meaning_bounds_and_class() -> None:
    assert "| `size` | a whole number | `1000000` | Bytes of it. | ≥ 1, ≤ 2^31 | free |" in references.specification(
        [Described]
    )


def test_a_field_without_a_description_is_refused_by_name() -> None:
    with pytest.raises(references.Undocumented, match=r"Silent\.size has no description"):
        references.specification([Silent])


def test_an_option_without_help_is_refused_by_name() -> None:
    app = typer.Typer()

    @app.command()
    def first(size: int = 1) -> None:
        """Does something."""

    @app.command()
    def second() -> None:
        """Does something else."""

    with pytest.raises(references.Undocumented, match="sm-llm first: --size has no help text"):
        references.command_line(typer.main.get_command(app))
