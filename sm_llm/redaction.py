"""What must never be shown: text in the shape of a token, and secrets whose values are known."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

_Value = TypeVar("_Value")

HIDDEN = "[hidden]"
_SHORTEST = 6
"""A known secret shorter than this is not searched for: it would blot out half of every log."""

# Formats as their makers publish them: Hugging Face, AWS key ids, GitHub, GitLab, OpenAI and Anthropic, Slack, NVIDIA,
# JSON web tokens, private keys, and passwords inside addresses.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{20,}|xox[abeprs]-[\w-]{10,}"
    r"|nvapi-[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)",
    re.DOTALL,
)


def is_token_shaped(text: str) -> bool:
    """Whether ``text`` holds something in the shape of a token, a private key, or a password in an address."""
    return _TOKEN.search(text) is not None


def redact(text: str) -> str:
    """``text`` with everything that has the shape of a token replaced by ``HIDDEN``."""
    return _TOKEN.sub(HIDDEN, text)


@dataclass(frozen=True)
class Hidden:
    """Secrets whose values are known, to be kept out of whatever is written."""

    values: tuple[str, ...] = ()

    def __call__(self, text: str) -> str:
        """``text`` without them, also where JSON or ``repr`` has escaped them."""
        for value in sorted(self.values, key=len, reverse=True):
            if len(value) >= _SHORTEST:
                for form in {value, json.dumps(value)[1:-1], repr(value)[1:-1]}:
                    text = text.replace(form, HIDDEN)
        return text

    def inside(self, value: _Value) -> _Value:
        """``value`` (text, or a mapping, list or dataclass of such) without them; anything else as it is."""
        return cast("_Value", self._inside(value)) if self.values else value

    def _inside(self, value: Any) -> Any:
        if type(value) is str:
            return self(value)
        if isinstance(value, dict):
            return {key: self._inside(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._inside, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{it.name: self._inside(getattr(value, it.name)) for it in fields(value) if it.init})
        return value
