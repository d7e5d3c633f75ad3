"""Short notes that all processes of a job can read, kept by torchrun itself, so that they outlive a worker.

Whoever can connect to the store can list, read and replace its entries. Notes are therefore signed with a value that
only the processes of one attempt have.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=10)
# How long one host may start later than another.
_MEETING = timedelta(minutes=15)


class KeyValueStore:
    """Notes by name, below one prefix, signed with ``secret``. Threads may share it.

    Every method raises ``RuntimeError`` when the store does not answer, and for a note without our signature.
    """

    def __init__(self, store: Store, prefix: str, secret: str) -> None:
        self._store = store
        self._prefix = prefix
        self._secret = secret.encode()

    def put(self, name: str, text: str) -> None:
        """Write or replace a note."""
        key = self._prefix + name
        self._store.set(key, self._signed(key, text))

    def get(self, name: str) -> str | None:
        """A note, or None if nobody has written it."""
        key = self._prefix + name
        # ``get`` of a key that nobody has set would wait for it until the time-out.
        return self._text(key, self._store.get(key)) if self._store.check([key]) else None

    def first(self, name: str, text: str) -> str:
        """Write a note unless somebody was first; returns what stands there."""
        key = self._prefix + name
        # An empty expected value stands for a key that is absent: of several writers the store lets one win.
        return self._text(key, self._store.compare_set(key, "", self._signed(key, text)))

    def _signed(self, key: str, text: str) -> str:
        """Its name is signed as well: no note can take the place of another."""
        return hmac.new(self._secret, f"{key}\0{text}".encode(), hashlib.sha256).hexdigest() + text

    def _text(self, key: str, found: bytes) -> str:
        text = found[_SIGNATURE:].decode("utf-8", "replace")
        # Compared in constant time, so that nobody can guess a signature byte by byte.
        if not hmac.compare_digest(self._signed(key, text).encode(), found):
            raise RuntimeError(f"a program that is not of this job has written {key!r} to the job's store")
        return text


_SIGNATURE = 2 * hashlib.sha256().digest_size
PORT = 7779
"""Of a board of our own; the training toolkit's torchrun takes 7777."""


def open_key_value_store(prefix: str, secret: str, leader: str, *, is_leader: bool) -> KeyValueStore:
    """A board on the first host of a job whose hosts have no torchrun in common; it goes when the first one ends.

    It listens at the address that the host's name stands for, not on every interface.
    """
    from torch._C._distributed_c10d import TCPStore

    # Without a socket of ours, torch listens on all interfaces.
    own: dict[str, Any] = {"master_listen_fd": _listen(leader)} if is_leader else {}
    store = TCPStore(leader, PORT, is_master=is_leader, wait_for_workers=False, timeout=_MEETING, **own)
    return KeyValueStore(store, f"sm_llm/{prefix}/", secret)


def _listen(host: str) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # An attempt that ended moments ago may have left connections in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        # The store owns and closes the descriptor from here on.
        return listener.detach()


def connect(prefix: str, secret: str, environ: Mapping[str, str] = os.environ) -> KeyValueStore | None:
    """The store of this torchrun; None without one, or with one whose store lives in rank 0 and dies with it."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch._C._distributed_c10d import TCPStore

    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    return KeyValueStore(store, f"sm_llm/{prefix}/", secret)
