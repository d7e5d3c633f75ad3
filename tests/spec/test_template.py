"""A recipe as a commented file means what the recipe means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.loading.load import load, recipe_files
from sm_llm.spec.loading.yaml_text import from_yaml
from sm_llm.spec.reference.template import commented

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", recipe_files())
def test_the_commented_copy_is_equal(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(commented(name))
    environ = {"HOME": str(tmp_path)}
    assert load(file, environ=environ).spec == load(name, environ=environ).spec


@pytest.mark.parametrize("name", recipe_files())
def test_the_defaults_in_its_comments_are_the_defaults(name: str, tmp_path: Path) -> None:
    """With every commented field uncommented the file still means the same."""
    lines = []
    for line in commented(name).splitlines():
        bare = line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line
        while bare.lstrip().startswith("# ") and _is_field(bare.replace("# ", "", 1)):
            bare = bare.replace("# ", "", 1)
        lines.append(bare if _is_field(bare) else line)
    text = "\n".join(lines)
    assert "eps: 1.0e-08" in text.replace("# ", "")
    file = tmp_path / "job.yaml"
    file.write_text(text)
    environ = {"HOME": str(tmp_path)}
    full = load(file, environ=environ)
    assert full.spec == load(name, environ=environ).spec
    assert len(full.origins) > len(load(name, environ=environ).origins) + 20


def _is_field(line: str) -> bool:
    key = line.strip().partition(":")[0]
    return key.isidentifier() and key.islower() and ": " in f"{line} " and not line.rstrip().endswith(".")


def test_every_documented_field_is_there_with_its_words() -> None:
    text = commented("smoke")
    assert "# Peak learning rate. AdamW moves" in text
    assert "format: synthetic  # or rows, json_rows, stream" in text
    assert text.startswith("# Train a few steps on random tokens")
    assert from_yaml(text, "x").value["name"] == "smoke"
    assert max(map(len, text.splitlines())) <= 125


def test_a_name_that_is_not_a_recipe_is_refused() -> None:
    with pytest.raises(SpecError, match="is not a recipe"):
        commented("nope")
