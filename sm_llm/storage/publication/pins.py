"""Keeps a checkpoint that another run will begin from, though its own run would collect it meanwhile."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.storage.stored_names import report_unknown

if TYPE_CHECKING:
    from sm_llm.storage.base import Store

_WANTED = "ckpt/wanted/step-"
_PIN = re.compile(r"ckpt/wanted/step-([0-9]{1,18})")
PIN_DAYS = 7
"""A run that has not begun after so long, for want of capacity, say, may find its checkpoint gone."""
_TEXT = f"A branch begins here: not collected for {PIN_DAYS} days from when this was written."


@dataclass(frozen=True)
class Pin:
    """One pin. ``renews``: another branch wants the same checkpoint, and this pin took the place of its own."""

    store: Store
    key: str
    body: bytes
    renews: bool

    def release(self) -> None:
        """Remove it, unless another branch needs it, too. Raises ``StorageError``."""
        if not self.renews and self.store.get(self.key) == self.body:
            self.store.delete([self.key])


def pin(store: Store, step: int) -> Pin:
    """Keep the checkpoint of ``step`` for ``PIN_DAYS`` from now on. Raises ``StorageError``."""
    key = f"{_WANTED}{step:08d}"
    mine = Pin(store, key, f"{_TEXT}\n{secrets.token_hex(8)}\n".encode(), store.head(key) is not None)
    store.delete([key])  # an older one would end earlier
    store.put_if_absent(key, mine.body)
    return mine


def pinned(store: Store, now: float) -> set[int]:
    """The steps that are kept at ``now``, by the store's clock in seconds since the epoch. Raises ``StorageError``."""
    oldest = now - PIN_DAYS * 86400
    found = [(it, _PIN.fullmatch(it.key)) for it in store.list("ckpt/wanted/")]
    report_unknown(store.uri, (it.key for it, match in found if match is None))
    # A pin without a time counts as new: to keep a checkpoint for too long does no harm.
    return {int(match[1]) for it, match in found if match and (it.modified or now) >= oldest}
