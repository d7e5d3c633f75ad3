"""Which files hold secrets, by their name, their folder or their content: never packed, never recorded."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from sm_llm.code_redaction import given_values
from sm_llm.redaction import has_private_key, is_published_token
from sm_llm.secret_names import is_secret_name

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK_BYTES = 16 * 1024 * 1024
# A file is searched in blocks that share so much, more than any key or token is long.
_OVERLAP_BYTES = 64 * 1024

# Compared in lower case: the default credential files of the AWS, Google, Azure, Kubernetes, Docker, Hugging Face,
# Kaggle, Databricks, Terraform, Vault, git, npm, PyPI, PostgreSQL and MySQL command lines, and the file types that hold
# private keys.
_NAMES = (
    ".env", ".env[._-]*", "*.env", ".envrc", ".envrc.*", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem",
    "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "*.asc.key", "*.p8", "*.pkcs12", "*.kdb",
    "*.ovpn", "id_xmss*", "secring.*", "*.gpg.key", "logins.json", "key[34].db", ".netrc", "_netrc", ".npmrc",
    ".yarnrc.yml", ".mylogin.cnf", ".ftpconfig", "sftp-config.json", ".pypirc", ".git-credentials", ".pgpass",
    "pgpass.*", ".my.cnf", ".htpasswd", "credentials", "credentials.*", "accesstokens.json", "msal_token_cache.*",
    "application_default_credentials.json", "client_secret*.json", "service-account*.json", "service_account*.json",
    "serviceaccount*.json", "kaggle.json", ".databrickscfg", ".boto", ".s3cfg", ".vault-token", ".terraformrc",
    "terraform.rc", "*.tfstate", "*.tfstate.*", "kubeconfig", "kubeconfig.*", "kube-config", "kube-config.*",
    "kube_config", "*.kubeconfig", ".dockercfg", ".dockerconfigjson", "docker-config.json", ".wgetrc", ".curlrc",
    "secret", "secrets", "secret.*", "secrets.*", "*[._-]secret.*", "*[._-]secrets.*", "*[._-]secret", "*[._-]secrets",
    "token", ".token", "*.token", "token.json", "hf_token", ".hf_token", "token.txt", "*[._-]token.txt", "password",
    "passwords", "password.*", "passwords.*", "*[._-]password.*", "*[._-]passwords.*", "passwd", "passwd.*", "api_key",
    "api_key.*", "api-key", "api-key.*", "apikey", "apikey.*", "*[._-]api_key.*", "*[._-]apikey.*", "auth.json",
    "secret_key", "secret_key.*", "shadow", "gshadow", "cookies.txt", "cookies.sqlite", "*[._-]credentials",
    "*[._-]credentials.*", "rootkey.csv", "accesskeys.csv", "*_accesskeys.csv", "rclone.conf", "*.tfvars",
    "*.tfvars.json", ".vault_pass*", ".vault-pass*", "vault_pass*", "vault-pass*", ".*_history", ".history",
    ".zhistory", "fish_history", ".histfile", "history.sqlite", ".lesshst", ".viminfo", ".pgpass.*",
    ".renviron", ".renviron.*", "*_rsa", "*_ed25519", "*_ecdsa", "deploy_key*", "firebase-adminsdk*.json",
    "gcp-key*.json",
    "token.pickle", ".passwd", ".passwd-s3fs", ".modal.toml", ".clearml.conf", "clearml.conf", ".dropbox_uploader",
    ".sentryclirc", ".netrc.gpg", ".vast_api_key", ".msmtprc", ".lftprc",
)  # fmt: skip
# Names that match above, and by convention hold no values. Their content still counts.
_HARMLESS = (
    ".env.example", ".env.sample", ".env.template", ".env.dist", "id_*.pub", "*secrets.py", "*secret.py",
    "*credentials.py", "*secrets.md", "*credentials.md", "*secret.md", "*example.tfvars", "*password.py",
    "*passwords.py", "*password.md", "*passwords.md", "passwd.py", "*api_key.py", "*apikey.py", "*api-key.md",
)  # fmt: skip
_FOLDERS = (".aws", ".ssh", ".kube", ".azure", ".gnupg", "gcloud", ".kaggle", ".vault", ".oci", ".snowsql")
_IN_FOLDERS = (
    ".docker/config.json", ".huggingface/token", "huggingface/token", "huggingface/stored_tokens", "gh/hosts.yml",
    ".composer/auth.json", ".m2/settings.xml", "docker/config.json", "kube/config", ".huggingface/stored_tokens",
    ".runpod/config.toml", ".ngc/config", "ngc/config",
    ".doctl/config.yaml", ".fly/config.yml", ".config/hub", ".snowflake/connections.toml",
    "glab-cli/config.yml",
)  # fmt: skip
# What editors and people put behind the name of an older copy.
_LATER = re.compile(r"(?:~|\.(?:bak|backup|copy|old|orig|save|swo|swp|tmp|[0-9]+)|[ _-](?:backup|bak|copy|old))$")
_CREDENTIAL_FILES = ("credentials", "settings")
_TRACKER_FOLDERS = (".mlflow", "wandb", ".databricks", ".config")


# A private key also where its header does not begin the line: in a string or a comment. With what follows the header,
# for a program may well speak of it.
_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:[\s\x22',#]|\\[nr])*[A-Za-z0-9+/=]{8,}"
    r"|PuTTY-User-Key-File-[0-9]:|AGE-SECRET-KEY-1[0-9A-Z]{20,}|^---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----",
    re.MULTILINE,
)
_ACCESS = re.compile(
    r"aws_secret_access_key['\"]?\s*[=:]\s*['\"]?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
    r"|client-key-data['\"]?\s*:\s*['\"]?[A-Za-z0-9+/=]{8,}"
    r"|\"terraform_version\"\s*:\s*\"[^\"]*\"[^{}]{0,400}\"lineage\"\s*:"
    r"|\"(?:refresh_token|client_secret)\"\s*:\s*\"[^\"\s]{12,}\"",
    re.IGNORECASE,
)
_SETTINGS = re.compile(
    r"\bmachine\s+\S+\s+login\s+\S+\s+(?:account\s+\S+\s+)?password\s+\S+"
    r"|\bmachine\s+\S+\s+password\s+\S+\s+login\s+\S+|^[\w.@-]+:\$(?:apr1|2[aby]|[1567])\$"
    r"|hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]{20,}|/api/(?:v[0-9]+/)?webhooks/[0-9]{6,}/[\w-]{20,}"
    r"|[?&]sig=[\w%+/-]{20,}",
    re.IGNORECASE | re.MULTILINE,
)
# A setting, and a value of letters and digits that is no sentence, path or reference.
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]{0,80})(?:\\?['\"])?\]?[ \t]*(?::|=>|=)[ \t]*(?:\\?['\"])?"
    r"(?P<value>(?=[\w+/=.~@!^-]{0,60}[0-9])(?=[\w+/=.~@!^-]{0,60}[A-Za-z])[A-Za-z0-9+_][\w+/=.~@!^-]{9,200})"
    r"(?![^\s'\",;\\\w+/=.~@!^-])"
)
# Letters and digits that are no path or reference.
_LIKELY = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[^\s<>$/][^\s<>]{7,200}")
_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]{1,20}://[^/\s:@'\"<>]{0,200}:([^/\s'\"<>]{1,200})@[\w.\[-]", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r".*[{}$%].*|[*x.]+|(?:(?:my|your|the|a)[_-]?)?(?:password|passwd|pass|pwd|pw|secret|token|changeme|example)[0-9]?",
    re.IGNORECASE,
)
# Bytes of a file that is searched for settings; larger ones are data.
_LARGEST_SETTINGS = 4 << 20
# Of programs and pages: addresses and values in them are mostly examples.
_PROSE = (".py", ".pyi", ".md", ".rst", ".html", ".c", ".cc", ".cpp", ".h", ".cu", ".rs", ".go", ".js", ".ts")


def secret_by_name(name: str) -> str:
    """Why the file of this ``/``-separated name holds secrets, judged by the name alone; empty if it does not."""
    path = PurePosixPath(_first_name(name.lower()))
    for folder in path.parts[:-1]:
        if folder in _FOLDERS:
            return f"lies in {folder}/, where credentials are kept"
    outcome = "/".join(path.parts[-2:])
    tracked = len(path.parts) > 1 and path.parts[-2] in _TRACKER_FOLDERS and path.name in _CREDENTIAL_FILES
    if outcome in _IN_FOLDERS or tracked:
        return "holds credentials by its name"
    # After the folders: in ``.aws`` a file counts whatever its name.
    if any(fnmatchcase(path.name, it) for it in _HARMLESS):
        return ""
    return "holds secrets by its name" if any(fnmatchcase(path.name, it) for it in _NAMES) else ""


def _first_name(name: str) -> str:
    """``name`` without what marks it as a copy of a file: it holds the same."""
    while match := _LATER.search(name):
        name = name[: match.start()]
    return name


def secret_by_content(path: Path) -> str:
    """Why the file must not be shown; empty if nothing was found in it.

    Found are private keys by their header, tokens in a published format, keys of AWS, access files of Kubernetes and of
    OAuth. In files that are no programs or pages also webhooks, logins, addresses with a password and, up to 4 MiB,
    values of settings whose names are those of secrets.
    """
    before, is_prose, is_data = b"", path.suffix.lower() in _PROSE, path.stat().st_size > _LARGEST_SETTINGS
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            if reason := _reason(before + block, is_prose, is_data):
                return reason
            before = block[-_OVERLAP_BYTES:]
    return ""


def _reason(block: bytes, is_prose: bool, is_data: bool) -> str:
    # Latin-1 decodes any bytes, one character for each; what is searched for is ASCII.
    text = block.decode("latin-1")
    if "\0" in text[:4096]:  # UTF-16, as PowerShell writes it, or no text at all
        text += "\n" + text.replace("\0", "")
    if has_private_key(text) or _KEY.search(text):
        return "holds a private key"
    if is_published_token(text):
        return "holds what has the format of an access token"
    if _is_service_account(text):
        return "holds the credentials of a service account"
    if _ACCESS.search(text):
        return "holds an access key"
    if is_prose:
        return ""
    if _SETTINGS.search(text):
        return "holds a password or the address of a webhook"
    if any(_PLACEHOLDER.fullmatch(it) is None for it in _PASSWORD.findall(text)):
        return "holds an address with a password"
    if is_data:
        return ""
    assigned = ((it["name"], it["value"]) for it in _ASSIGNED.finditer(text) if is_secret_name(it["name"]))
    named = ((name, value) for name, value in given_values(text) if _LIKELY.fullmatch(value))
    return next((f"gives a value to {name}" for name, value in chain(assigned, named) if _is_given(value)), "")


def _is_given(value: str) -> bool:
    return _PLACEHOLDER.fullmatch(value) is None


def _is_service_account(text: str) -> bool:
    return len(text) < 100_000 and re.search(r'"type"\s*:\s*"(service_account|authorized_user)"', text) is not None
