"""S3's rules for names of buckets (S3 User Guide, "General purpose bucket naming rules")."""

from __future__ import annotations

import re

# The rules of S3's user guide, "General purpose bucket naming rules".
_FORM = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
# Of names that are reserved; aliases of access points may stand for a bucket.
_SUFFIXES = (".mrap", "--table-s3")


def bucket_problem(name: str) -> str:
    """What is wrong with a bucket's name; empty for a valid one."""
    if not _FORM.fullmatch(name):
        return (
            "must have 3 to 63 lower-case letters, digits, dots and hyphens, and begin and end with a letter or digit"
        )
    if ".." in name:
        return "must not have two dots side by side"
    if _ADDRESS.fullmatch(name):
        return "must not have the form of an IP address"
    if name.startswith(_PREFIXES):
        return f"must not begin with {', '.join(_PREFIXES)}"
    return f"must not end with {' or '.join(_SUFFIXES)}" if name.endswith(_SUFFIXES) else ""
