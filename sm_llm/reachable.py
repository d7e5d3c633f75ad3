"""Whether a server on the web accepts connections: a library's own retries would take half a minute to find out."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_SECONDS = 5.0


def connects(url: str) -> bool:
    """Whether the host of ``url`` accepts a connection; True behind a proxy, which resolves names itself."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not getproxies().keys().isdisjoint({parts.scheme, "all"}) and not proxy_bypass(host):
        return True
    try:
        with socket.create_connection((host, parts.port or (80 if parts.scheme == "http" else 443)), _SECONDS):
            return True
    except (OSError, ValueError):
        return False
