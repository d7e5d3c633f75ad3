"""What must never be shown: text in the format of a token, credentials in addresses, secrets whose values are known."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from collections.abc import Iterator

_Value = TypeVar("_Value")

HIDDEN = "[hidden]"
SHORTEST = 6
"""Characters of the shortest known secret that is searched for: a shorter one would blot out half of every log."""

# Formats as their makers publish them: Hugging Face, AWS key ids, GitHub, GitLab, OpenAI and Anthropic, Slack, NVIDIA,
# Google, Stripe, npm, PyPI, Databricks, DigitalOcean, Vault, Weights & Biases, and JSON web tokens.
_PUBLISHED = (
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{20,}|[sr]k_live_[A-Za-z0-9]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{20,}|nvapi-[\w-]{20,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|npm_[A-Za-z0-9]{36}"
    r"|pypi-AgE[\w-]{20,}|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{32,}|hv[bs]\.[\w-]{20,}|wandb_v1_\w{20,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
)
_PRIVATE_KEY = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
_WHOLE_KEY = rf"{_PRIVATE_KEY}(?:.*?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)?"
# Of an address: its password, the path of a webhook, and query parameters that grant access (OAuth, AWS, Azure).
_PASSWORD = r"(?<=://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)"
_WEBHOOK = (
    r"(?<=hooks\.slack\.com/)(?:services|workflows)/[\w/-]+|(?<=/api/webhooks/)\d+/[\w-]+"
    r"|(?<=\.webhook\.office\.com/)[\w@/-]+"
)
_PARAMETER = (
    r"(?<=[?&])((?:access[_-]?|auth[_-]?|api[_-]?|refresh[_-]?|id[_-]?|private[_-]?)?(?:token|key)|secret|client_secret"
    r"|password|passwd|pwd|sig|signature|X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId)=[^&\s#'\"]+"
)
_TOKEN = re.compile("|".join((_PUBLISHED, _WHOLE_KEY, _PASSWORD, _WEBHOOK)), re.DOTALL)
_QUERY = re.compile(_PARAMETER, re.IGNORECASE)
_PUBLISHED_TOKEN = re.compile(_PUBLISHED)
_KEY_LINE = re.compile(rf"^[ \t]*{_PRIVATE_KEY}", re.MULTILINE)

SECRET_WORDS = (
    r"token|secret|password|passwd|passphrase|pwd|pgpass|auth|authorization|credentials?|api_?key|access_?key"
    r"|secret_?key|private_?key|signing_?key|encryption_?key|wandb_?key|pat|webhook(?:_?url)?|dsn|cookie"
)
"""Alternatives of a regular expression, for the last word of a name whose value is a secret (``GH_PAT``, ``AUTH``)."""
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![A-Za-z0-9])(?:[A-Za-z0-9]+[_.-])*(?:{SECRET_WORDS})['\"]?\s*(?::=|=>|[:=])\s*)"
    r"(?:(?P<quote>['\"])[^'\"\n]+(?P=quote)|(?P<bare>[^\s'\"()\[\]{}$<>,;]+)[ \t]*(?=$|#|\n))",
    re.IGNORECASE | re.MULTILINE,
)


def is_token_shaped(text: str) -> bool:
    """Whether ``text`` holds something in the format of a token, a private key, or credentials inside an address."""
    return _TOKEN.search(text) is not None or _QUERY.search(text) is not None


def is_published_token(text: str) -> bool:
    """Whether ``text`` holds a token in a format that its maker publishes."""
    return _PUBLISHED_TOKEN.search(text) is not None


def has_private_key(text: str) -> bool:
    """Whether a line of ``text`` begins a private key (PEM, OpenSSH or PGP)."""
    return _KEY_LINE.search(text) is not None


def redact(text: str) -> str:
    """``text`` with everything that has the format of a token, and all credentials in addresses, as ``HIDDEN``."""
    return _QUERY.sub(rf"\1={HIDDEN}", _TOKEN.sub(HIDDEN, text))


def redact_assignments(text: str) -> str:
    """``redact``, and the values that lines of a program or configuration give to names such as ``db_password``."""
    return redact(_ASSIGNED.sub(rf"\g<name>{HIDDEN}", text))


@dataclass(frozen=True)
class Hidden:
    """Secrets whose values are known, and whatever has the format of one, to be kept out of whatever is written.

    A value is also found as JSON, ``repr``, URLs and base64 write it, and in parts: the lines of a value of several
    lines, and the texts inside a value that is JSON.
    """

    values: tuple[str, ...] = ()

    def __call__(self, text: str) -> str:
        """``text`` without them."""
        return redact(self._known.sub(HIDDEN, text) if self._known else text)

    def inside(self, value: _Value) -> _Value:
        """``value`` (text, or a mapping, list or dataclass of such) without them; anything else as it is."""
        return cast("_Value", self._inside(value))

    @cached_property
    def _known(self) -> re.Pattern[str] | None:
        parts = {part for value in self.values for part in _parts(value) if len(part) >= SHORTEST}
        forms = {form for part in parts for form in _forms(part)}
        return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None

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


def _parts(value: str) -> Iterator[str]:
    """The value itself and what a program shows of it alone: its lines, and the texts inside JSON."""
    yield value
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line.strip() for line in lines)
    try:
        yield from _texts(json.loads(value))
    except (ValueError, RecursionError):
        return


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        lines = value.splitlines()
        yield from (line.strip() for line in lines if len(lines) > 1)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _forms(part: str) -> set[str]:
    """``part`` as it is and as JSON, ``repr``, URLs and base64 write it."""
    forms = {part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1], repr(part)[1:-1]}
    forms |= {quote(part, safe=""), quote(part), quote_plus(part)}
    raw = part.encode("utf-8", "surrogatepass")
    forms |= {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}
    # Base64 of a longer text that contains the part depends on where in a group of three bytes the part begins.
    # Characters that also encode bytes before or after it are left out: they differ from text to text.
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + raw).decode()
        whole = (shift + len(raw)) * 8 // 6
        core = encoded[(0, 2, 3)[shift] : whole]
        if len(core) >= SHORTEST:
            forms |= {core, core.replace("+", "-").replace("/", "_")}
    return forms
