"""What must never be shown: text in the format of a token, credentials in addresses, secrets whose values are known."""

from __future__ import annotations

import base64
import html
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
# Google, Stripe, npm, SendGrid, Shopify, Groq, Replicate, Docker, Grafana, Linear, Pulumi, Telegram, PyPI, Databricks,
# DigitalOcean, Vault, Weights & Biases, and JSON web tokens.
_PUBLISHED = (
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{20,}|[sr]k_live_[A-Za-z0-9]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{20,}|nvapi-[\w-]{20,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|npm_[A-Za-z0-9]{36}"
    r"|GOCSPX-[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{32,}|shp(?:at|ca|pa|ss)_[0-9a-f]{32}|gsk_[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{30,}"
    r"|dckr_pat_[\w-]{20,}|glsa_[A-Za-z0-9]{20,}|lin_api_[A-Za-z0-9]{20,}|gl(?:rt|dt|cbt|ptt|ft|soat)-[\w-]{16,}"
    r"|pul-[0-9a-f]{40}|[0-9]{8,10}:AA[\w-]{33}(?![\w-])"
    r"|pypi-AgE[\w-]{20,}|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{32,}|hv[bs]\.[\w-]{20,}|wandb_v1_\w{20,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
)
_PRIVATE_KEY = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
_WHOLE_KEY = rf"{_PRIVATE_KEY}(?:.*?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)?"
# Of an address: what stands before its last "@" in front of the host, also with JSON's escaped slashes and encoded as a
# part of another address; a user alone is hidden where it may be a token.
_SLASHES = r"(?:[A-Za-z][A-Za-z0-9+.-]{1,30}:)?(?:\\?/){2}"
_IN_ADDRESSES = (
    re.compile(rf"(?<![\w/:])({_SLASHES})[^\s/\\?#\"<>@:]{{0,250}}:[^\s/\\?#\"<>]{{1,1000}}(?=@)"),
    re.compile(r"(https?:(?:\\?/){2})[^\s/\\?#\"<>@:]{8,1000}(?=@)"),
    re.compile(r"(%(?:25)?2F%(?:25)?2F)[^\s%]{0,250}%(?:25)?3A[^\s&]{1,1000}?(?=%(?:25)?40)", re.IGNORECASE),
    re.compile(r"(hooks\.slack(?:-gov)?\.com/)(?:services|workflows|triggers)/[\w/-]+"),
    re.compile(r"(/api/(?:v[0-9]+/)?webhooks/)[0-9]+/[\w-]+"),
    re.compile(r"(\.webhook\.office\.com/|outlook\.office\.com/webhook/|hooks\.zapier\.com/hooks/)[\w@/-]+"),
    re.compile(r"(api\.telegram\.org/bot|/open-apis/bot/v[0-9]+/hook/|maker\.ifttt\.com/\S{1,200}?/with/key/)[\w:-]+"),
    # Headers: a scheme stays, and so does code that makes one.
    re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:digest|aws4-[a-z0-9-]+) )[^\r\n]+", re.IGNORECASE),
    re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?[a-z]+ )[^\s'\"]+", re.IGNORECASE),
    re.compile(r"(authorization['\"]?:\s*['\"]?)(?=[^\s'\"]*[0-9])[\w.~+/=-]{8,}", re.IGNORECASE),
    re.compile(
        r"(\b(?:x-)?(?:api-key|auth-token|vault-token|amz-security-token)['\"]?:\s*['\"]?)(?=[^\s'\"]*[0-9])[\w.~+/=-]{8,}",
        re.IGNORECASE,
    ),
    re.compile(r"(\b(?:set-)?cookie['\"]?:\s*['\"]?[\w.-]{1,80}=)[^\r\n'\"]+", re.IGNORECASE),
    re.compile(r"(\bbearer )(?=[^\s'\"]*[0-9])[\w.~+/-]{16,}=*", re.IGNORECASE),
    # Query parameters that grant access (OAuth, AWS, Azure, Google), of addresses and of fragments.
    re.compile(
        r"([?&;#](?:amp;)?(?:[\w.-]{0,80}(?:token|secret|passwo?r?d|pwd|pass|auth|signature|credential|jwt|apikey|accesskey|sessionid|bearer|assertion)"
        r"|(?:[\w.-]{0,80}[_-])?(?:key|sig|session|ticket|pw|otp)|code|AWSAccessKeyId)=)[^&\s#'\"<>;]+",
        re.IGNORECASE,
    ),
)
_DATABASE = r"\b(?:host(?:addr)?|user(?:name| id)?|uid|dbname|database|server|data source|port|sslmode)\s{0,9}=\s{0,9}"
_GIVEN = r"(?:'[^'\n]{1,300}'|\"[^\"\n]{1,300}\"|(?![$<{%\[])[^\s;'\"&(),]{1,300}(?=[\s;'\"]|$))"
# How databases are reached: libpq, ODBC and ADO give the password among other settings, Oracle behind a slash.
_IN_CONNECTIONS = (
    re.compile(
        rf"({_DATABASE}[^\n(){{}}]{{1,200}}?[;\s]\s{{0,9}}(?:password|passwd|pwd)\s{{0,9}}=\s{{0,9}}){_GIVEN}",
        re.IGNORECASE,
    ),
    re.compile(rf"(\b(?:password|passwd|pwd)\s{{0,9}}=\s{{0,9}}){_GIVEN}(?=[;\s]+{_DATABASE})", re.IGNORECASE),
    re.compile(r"(\bjdbc:oracle:\w{1,20}:[^\s/@\"']{1,100}/)[^\s@\"']{1,200}(?=@)", re.IGNORECASE),
)
# All of what is kept before the part to hide.
_AFTER = (*_IN_ADDRESSES, *_IN_CONNECTIONS)
_TOKEN = re.compile("|".join((_PUBLISHED, _WHOLE_KEY)), re.DOTALL)
_PUBLISHED_TOKEN = re.compile(_PUBLISHED)
_KEY_LINE = re.compile(rf"^[ \t]*{_PRIVATE_KEY}", re.MULTILINE)

_ENCODED = re.compile(r"%[0-9A-F]{2}")


def is_token_shaped(text: str) -> bool:
    """Whether ``text`` holds something in the format of a token, a private key, or credentials inside an address."""
    return _TOKEN.search(text) is not None or any(it.search(text) is not None for it in _AFTER)


def is_published_token(text: str) -> bool:
    """Whether ``text`` holds a token in a format that its maker publishes."""
    return _PUBLISHED_TOKEN.search(text) is not None


def has_private_key(text: str) -> bool:
    """Whether a line of ``text`` begins a private key (PEM, OpenSSH or PGP)."""
    return _KEY_LINE.search(text) is not None


def redact(text: str) -> str:
    """``text`` with everything that has the format of a token, and all credentials in addresses, as ``HIDDEN``."""
    text = _TOKEN.sub(HIDDEN, text)
    for pattern in _AFTER:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


@dataclass(frozen=True)
class Hidden:
    """Secrets whose values are known, and whatever has the format of one, to be kept out of whatever is written.

    A value is also found as JSON, ``repr``, HTML, shells, URLs, base64 and hexadecimal digits write it, and in parts:
    the lines of a value of several lines, what follows ``NAME=`` and ``name:`` in them, and the texts and long numbers
    inside a value that is JSON. Where two secrets overlap, both are hidden.
    """

    values: tuple[str, ...] = ()

    def __call__(self, text: str) -> str:
        """``text`` without them."""
        # Known values first: a format that hid a part of one would leave the rest unrecognised.
        return redact(self._without_known(text))

    def inside(self, value: _Value) -> _Value:
        """``value`` (text, or a mapping, list or dataclass of such) without them; anything else as it is."""
        return cast("_Value", self._inside(value))

    @cached_property
    def _forms(self) -> tuple[str, ...]:
        parts = {part for value in self.values for part in _parts(value) if len(part) >= SHORTEST}
        return tuple({form for part in parts for form in _forms(part)})

    def _without_known(self, text: str) -> str:
        shown, at = [], 0
        for begin, end in _joined(it for form in self._forms for it in _found(form, text)):
            shown += [text[at:begin], HIDDEN]
            at = end
        return "".join([*shown, text[at:]])

    def _inside(self, value: Any) -> Any:
        # Exactly ``str``: a member of a ``StrEnum`` stays one.
        if type(value) is str:
            return self(value)
        if isinstance(value, dict):
            return {self._inside(key): self._inside(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._inside, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{it.name: self._inside(getattr(value, it.name)) for it in fields(value) if it.init})
        return value


def _found(form: str, text: str) -> Iterator[tuple[int, int]]:
    """Where ``form`` begins and ends in ``text``."""
    at = text.find(form)
    while at >= 0:
        yield at, at + len(form)
        # From the next character and not behind this place: a value may overlap with itself.
        at = text.find(form, at + 1)


def _joined(spans: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same places in ascending order, those that overlap or touch as one."""
    begin = end = -1
    for first, last in sorted(spans):
        if first > end:
            if end > begin:
                yield begin, end
            begin, end = first, last
        end = max(end, last)
    if end > begin:
        yield begin, end


def _parts(value: str) -> Iterator[str]:
    """The value itself and what a program shows of it alone: its lines, and the texts inside JSON."""
    yield value
    lines = value.splitlines()
    if len(lines) > 1:
        for line in lines:
            yield line.strip()
            _, separator, rest = re.sub(r"^\s*(?:export\s+)?[\w.-]+\s*[=:]\s*", "\0", line).partition("\0")
            if separator:
                yield rest.strip().strip("'\"")
    try:
        yield from _texts(json.loads(value))
    except (ValueError, RecursionError):
        return


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from _parts(value)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif type(value) in (int, float):
        yield str(value)


def _forms(part: str) -> set[str]:
    """``part`` as it is and as JSON (also inside JSON), ``repr``, HTML, shells, URLs and base64 write it."""
    raw = part.encode("utf-8", "surrogatepass")
    as_json = {json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]}
    as_json |= {it.replace("/", "\\/") for it in as_json}
    urls = {
        quote(part, safe="", errors="surrogatepass"),
        quote(part, errors="surrogatepass"),
        quote_plus(part, errors="surrogatepass"),
    }
    forms = {part, *as_json, *(json.dumps(it)[1:-1] for it in as_json), *urls}
    forms |= {_ENCODED.sub(lambda it: it[0].lower(), it) for it in urls}
    forms |= {repr(part)[1:-1], ascii(part)[1:-1], repr(raw)[2:-1], html.escape(part), html.escape(part, quote=False)}
    forms |= {part.replace("'", "'\"'\"'"), part.replace("'", r"'\''")}
    every = "".join(f"%{byte:02X}" for byte in raw)
    return forms | {raw.hex(), raw.hex().upper(), every, every.lower()} | _as_base64(raw)


def _as_base64(raw: bytes) -> set[str]:
    forms = {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}
    # Base64 of a longer text that contains the part depends on where in a group of three bytes the part begins.
    # Characters that also encode bytes before or after it are left out: they differ from text to text.
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + raw).decode()
        whole = (shift + len(raw)) * 8 // 6
        core = encoded[(0, 2, 3)[shift] : whole]
        if len(core) >= SHORTEST:
            forms |= {core, core.replace("+", "-").replace("/", "_")}
    return forms
