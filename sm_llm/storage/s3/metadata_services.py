"""Refuses endpoints that are metadata services, which give a machine its credentials."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from sm_llm.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# EC2 and EKS over IPv6, Alibaba Cloud, Azure's host, Oracle's; all others are link-local.
_ADDRESSES = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "fd00:ec2::23", "100.100.100.200", "168.63.129.16", "192.0.0.192"))
)
_NAMES = frozenset(
    {"metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal"}
)
# IPv6 addresses whose last 32 bits are one of IPv4 (RFC 4291, 7915, 6052 and 8215).
_CARRIERS = tuple(map(ipaddress.ip_network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")))
_OF_AWS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")


def refuse_metadata(endpoint: str) -> None:
    """Raise ``StorageError`` if ``endpoint`` is a metadata service, by name or by any address that it resolves to.

    Addresses count however they are spelt, also where IPv6 carries an IPv4 address. A host that resolves to nothing is
    left to the connection, whose error names the reason.
    """
    host = unquote(urlsplit(endpoint).hostname or "").rstrip(".").lower()
    # Nobody but AWS can let these names resolve to anything else.
    if host.endswith(_OF_AWS):
        return
    if host in _NAMES or any(_is_metadata(it) for address in _resolved(host) for it in _unfolded(address)):
        raise StorageError(f"the endpoint {endpoint} is a metadata service, not an S3 store. Name another one")


def _resolved(host: str) -> Iterator[Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, address in found:
        # Link-local IPv6 addresses carry their interface behind a "%".
        yield ipaddress.ip_address(str(address[0]).partition("%")[0])


def _unfolded(address: Address) -> Iterator[Address]:
    yield address
    if isinstance(address, ipaddress.IPv6Address):
        yield from (it for it in (address.ipv4_mapped, address.sixtofour) if it is not None)
        if any(address in it for it in _CARRIERS):
            yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _is_metadata(address: Address) -> bool:
    return address.is_link_local or address in _ADDRESSES
