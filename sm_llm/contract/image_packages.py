"""Packages that belong to an image: it builds them for its own CUDA or Neuron, and another version breaks the rest."""

from __future__ import annotations

import re

LOCK_FILE = "sm_llm_lock.txt"
"""File beside the entrypoint with the packages to install; without it nothing is installed."""
WHEELHOUSE = "SM_LLM_WHEELHOUSE"
"""Environment variable with an S3 prefix of wheels to install from; without it pip asks its index."""
WHOLE_ENVIRONMENT = "SM_LLM_WHOLE_ENVIRONMENT"
"""Environment variable that is set where the interpreter's environment is the user's own: nothing is installed."""
REQUIREMENTS = "requirements.txt"
"""What a program needs beside its image: a file in the root of its folder."""
_OWNED = ("torch", "torchvision", "torchaudio", "triton", "flash-attn", "transformer-engine", "deepspeed")
# What an image stack pins beside them.
_OWNED_BY_STACK = {
    "smp": ("transformers", "datasets", "megatron-core", "accelerate"),
    "neuron": ("torch-xla", "torch-neuronx", "neuronx-distributed", "neuronx-cc", "libneuronxla", "transformers"),
}


def is_owned(name: str, stack: str | None) -> bool:
    """Whether a package, in any spelling, belongs to the images of a stack; ``stack`` None is any image."""
    name = normalised(name)
    return name in _OWNED or name in _OWNED_BY_STACK.get(stack or "", ()) or name.startswith("nvidia-")


def normalised(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
