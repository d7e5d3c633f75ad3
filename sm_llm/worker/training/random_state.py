"""The random number generators of one process: seeded, saved as JSON and restored bit for bit."""

from __future__ import annotations

import base64
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from sm_llm.worker.device import Device


def seed_everything(seed: int, rank: int, device: Device) -> None:
    """Seed all generators; each rank draws its own numbers (weights and data order do not come from here)."""
    # Neighbouring seeds and ranks give unrelated states; seed + rank would give two jobs the same ones.
    own = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)
    device.seed(own)


def capture(device: Device) -> dict[str, Any]:
    """State of Python's, numpy's, torch's and the device's generator, as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if (own := device.random_state()) is not None:
        state[device.type] = _text(own)
    return state


def restore(state: dict[str, Any], device: Device) -> None:
    """Continue every generator exactly where ``capture`` saw it."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    # A run may continue on other hardware: then this device's generator starts at its seed.
    if device.type in state:
        device.restore_random(_tensor(state[device.type]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    # A copy, because the bytes of ``b64decode`` cannot be written to.
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
