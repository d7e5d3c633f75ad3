"""The random number generators of one process: seeded, saved as JSON and restored bit for bit."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, rank: int) -> None:
    """Seed all generators; each rank draws its own numbers (weights and data order do not come from here)."""
    own = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)


def capture() -> dict[str, Any]:
    """State of Python's, numpy's, torch's and this process's CUDA generator, as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def restore(state: dict[str, Any]) -> None:
    """Continue every generator exactly where ``capture`` saw it."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
