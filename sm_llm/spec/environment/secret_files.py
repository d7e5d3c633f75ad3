"""Which files hold secrets, by their name, their folder or their content: never packed, never recorded."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from sm_llm.redaction import has_private_key, is_published_token

if TYPE_CHECKING:
    from pathlib import Path

SCANNED_BYTES = 16 * 1024 * 1024
"""Bytes of a file that are searched for keys and tokens. Programs are smaller; what is larger is data."""

# Compared in lower case: the default credential files of the AWS, Google, Azure, Kubernetes, Docker, Hugging Face,
# Kaggle, Databricks, Terraform, Vault, git, npm, PyPI, PostgreSQL and MySQL command lines, and the file types that hold
# private keys.
_NAMES = (
    ".env", ".env.*", "*.env", ".envrc",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks",
    "*.keystore", "*.kdbx", "*.asc.key",
    ".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".pgpass", "pgpass.conf", ".my.cnf", ".htpasswd",
    "credentials", "credentials.*", "accesstokens.json", "msal_token_cache.*", "application_default_credentials.json",
    "client_secret*.json", "service-account*.json", "service_account*.json", "serviceaccount*.json", "kaggle.json",
    ".databrickscfg", ".boto", ".s3cfg", ".vault-token", ".terraformrc", "terraform.rc", "*.tfstate", "*.tfstate.*",
    "kubeconfig", "*.kubeconfig", ".dockercfg", ".wgetrc", ".curlrc",
    "secret.*", "secrets.*", "token", ".token", "*.token", ".*_history", ".lesshst", ".viminfo",
)  # fmt: skip
_HARMLESS = (
    ".env.example", ".env.sample", ".env.template", ".env.dist", "id_*.pub",
    "secrets.py", "secret.py", "credentials.py", "secrets.md", "credentials.md", "secret.md",
)  # fmt: skip
"""Names that match above, and by convention hold no values. Their content still counts."""
_FOLDERS = (".aws", ".ssh", ".kube", ".azure", ".gnupg", "gcloud", ".kaggle", ".vault")
_IN_FOLDERS = (".docker/config.json", ".huggingface/token", "huggingface/token", "huggingface/stored_tokens")
_CREDENTIAL_FILES = ("credentials", "settings")
_TRACKER_FOLDERS = (".mlflow", "wandb", ".databricks", ".config")


def secret_by_name(name: str) -> str:
    """Why the file of this ``/``-separated name holds secrets, judged by the name alone; empty if it does not."""
    path = PurePosixPath(name.lower())
    for folder in path.parts[:-1]:
        if folder in _FOLDERS:
            return f"lies in {folder}/, where credentials are kept"
    ending = "/".join(path.parts[-2:])
    tracked = len(path.parts) > 1 and path.parts[-2] in _TRACKER_FOLDERS and path.name in _CREDENTIAL_FILES
    if ending in _IN_FOLDERS or tracked:
        return "holds credentials by its name"
    if any(fnmatchcase(path.name, it) for it in _HARMLESS):
        return ""
    return "holds secrets by its name" if any(fnmatchcase(path.name, it) for it in _NAMES) else ""


def secret_by_content(path: Path) -> str:
    """Why the file's first ``SCANNED_BYTES`` must not be shown; empty if nothing was found in them.

    Found are private keys, by the header that begins a line, and tokens in a published format.
    """
    with path.open("rb") as stream:
        text = stream.read(SCANNED_BYTES).decode("latin-1")
    if has_private_key(text):
        return "holds a private key"
    if is_published_token(text):
        return "holds what has the format of an access token"
    return "holds the credentials of a service account" if _is_service_account(text) else ""


def _is_service_account(text: str) -> bool:
    return len(text) < 100_000 and re.search(r'"type"\s*:\s*"(service_account|authorized_user)"', text) is not None
