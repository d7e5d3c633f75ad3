"""Where a user's own configuration lies; imports nothing, for it is asked by verbs that have no time to lose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def user_config_file(environ: Mapping[str, str]) -> Path:
    """``$XDG_CONFIG_HOME/sm_llm/config.yaml``, or the same below ``~/.config``."""
    configuration = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(configuration) / "sm_llm" / "config.yaml"


def has_user_defaults(environ: Mapping[str, str]) -> bool:
    """Whether there may be any: the file, or a variable of ours."""
    return any(name.startswith("SM_LLM_") for name in environ) or user_config_file(environ).exists()
