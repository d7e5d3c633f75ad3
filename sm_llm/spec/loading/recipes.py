"""The recipes that come with the package: whole jobs and workflows, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def recipe_files() -> dict[str, Path]:
    """Name -> YAML file of every recipe, by name."""
    folder = Path(str(files("sm_llm.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_summary(path: Path) -> str:
    """The first comment line of a recipe: what it does."""
    with path.open(encoding="utf-8") as stream:
        return stream.readline().lstrip("# ").strip()
