"""Names whose values are secrets: of environment variables, of settings in a file, of parameters in an address."""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET = frozenset(
    {
        "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pass", "pwd", "pw", "auth",
        "authorization", "credential", "credentials", "cred", "creds", "pat", "webhook", "dsn", "cookie", "jwt",
        "apikey", "bearer", "otp", "sas", "passwort", "kennwort", "passcode", "mnemonic",
    }
)  # fmt: skip
_KEYS = frozenset({"key", "keys"})
# Words that make a secret of the ``key`` behind them: most keys are names of entries.
_OF_KEYS = frozenset(
    {
        "access", "account", "api", "deploy", "encryption", "fernet", "master", "private", "secret", "service",
        "session", "shared", "sign", "signing", "ssh", "ssl", "storage", "tls", "wandb", "x",
    }
)  # fmt: skip
# Words behind that change nothing: ``DB_PASSWORD_OLD``.
_AFTERWARDS = frozenset(
    {
        "backup", "base", "default", "dev", "env", "hash", "header", "json", "new", "old", "pem", "prod",
        "production", "stage", "staging", "string", "test", "url", "value", "values",
    }
)  # fmt: skip
# Words before ``token`` where it is a piece of text or a place in a listing; ``pass`` where it is one over data.
_OF_TEXT = frozenset(
    {
        "bos", "cls", "continuation", "eos", "image", "mask", "max", "min", "n", "new", "next", "num", "pad", "page",
        "per", "prompt", "sep", "special", "total", "unk",
    }
)  # fmt: skip
_OF_DATA = frozenset({"backward", "by", "first", "forward", "second", "single"})
_OF_TOKENS = frozenset({"access", "api", "auth", "bearer", "github", "hf", "hub", "refresh"})
# Words that are written without a separator: ``PGPASSWORD``, ``HFTOKEN``.
_JOINED = re.compile(
    r"\w*(?:password|passwd|passphrase|apikey)s?|\w{2,}(?:token|secret|pwd)|(?:admin|db|ftp|my|pg|root|ssh|user)pass"
    r"|(?:admin|db|ldap|root|user)pw|(?:access|account|priv|private|secret|storage)keys?|connectionstring|(?:gh|github|gitlab)pat"
)
_PAIRS = frozenset({("connection", "string"), ("conn", "string"), ("conn", "str"), ("seed", "phrase")})
_ENCODED = re.compile(r"[_-]?(?:b|base)64$", re.IGNORECASE)


def words(name: str) -> list[str]:
    """The words of a name in lower case, whether separators or capitals part them."""
    return [it.lower() for it in _WORD.findall(name)]


def is_secret_name(name: str) -> bool:
    """Whether what is kept under ``name`` is a secret: ``GH_PAT``, ``dbPassword``, ``x-api-key``, ``API_KEYS``.

    A key is one only with a word before it that marks it; tokens of a text (``pad_token``, ``max_tokens``) are none.
    """
    found = words(_ENCODED.sub("", name))
    if tuple(found[-2:]) in _PAIRS:
        return True
    while found and (found[-1] in _AFTERWARDS or found[-1].isdigit()):
        found.pop()
    if not found:
        return False
    last, before = found[-1], found[-2] if len(found) > 1 else ""
    if last == "token":
        return before not in _OF_TEXT
    if last == "tokens":
        return before in _OF_TOKENS or not before
    if last == "pass":
        return before not in _OF_DATA
    if last in _KEYS:
        return before in _OF_KEYS
    return last in _SECRET or _JOINED.fullmatch(last) is not None
