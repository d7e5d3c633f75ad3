"""Keeps a checkpoint that another run will begin from, though its own run would collect it meanwhile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sm_llm.storage.base import Store

_WANTED = "ckpt/wanted/step-"
_PIN = re.compile(r"ckpt/wanted/step-([0-9]{1,18})")
PIN_DAYS = 7
"""A run that has not begun after so long, for want of capacity, say, may find its checkpoint gone."""
_TEXT = f"A branch begins here: not collected for {PIN_DAYS} days from when this was written.\n".encode()


def pin(store: Store, step: int) -> None:
    """Keep the checkpoint of ``step`` for ``PIN_DAYS`` from now on. Raises ``StorageError``."""
    key = f"{_WANTED}{step:08d}"
    store.delete([key])  # an older one would end earlier
    store.put_if_absent(key, _TEXT)


def pinned(store: Store, now: float) -> set[int]:
    """The steps that are kept at ``now``, by the store's clock in seconds since the epoch. Raises ``StorageError``."""
    oldest = now - PIN_DAYS * 86400
    recent = (_PIN.fullmatch(it.key) for it in store.list(_WANTED) if (it.modified or now) >= oldest)
    return {int(match[1]) for match in recent if match}  # what else lies there is not a pin of ours
