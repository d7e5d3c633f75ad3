"""GPUs by the names that people and NVIDIA's driver write, such as ``A100 80GB`` and ``NVIDIA H100 80GB HBM3``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sm_llm.spec.machines.hardware import INSTANCES, Card

_ELSEWHERE: dict[str, tuple[float, ...]] = {
    "A100": (64,),
    "H100": (64, 94, 96),
    "H100 NVL": (94,),
    "H100 PCIe": (80,),
    "GH200": (96, 144),
    # What the driver calls the smaller one: the 480 GB are its CPU's.
    "GH200 480GB": (96,),
}
"""GiB of cards that no instance type has."""
_RENTED = {
    name: tuple(sorted({row.accelerator_gib for row in INSTANCES if row.accelerator == name}))
    for name in dict.fromkeys(str(row.accelerator) for row in INSTANCES if row.is_gpu)
}
GPU_GIB: dict[str, tuple[float, ...]] = {
    name: (*_RENTED.get(name, ()), *_ELSEWHERE.get(name, ())) for name in sorted(_RENTED | _ELSEWHERE)
}
"""Name -> memory of one card as its driver shows it, in GiB; first what is meant where a name states none."""
# What the driver puts around a name: vendor, product line, form and kind of memory.
_AROUND = re.compile(
    r"nvidia|tesla|sxm\d?|pcie|nvl|hbm\d?e?|h|ac|blackwell|max|q|server|workstation|edition", re.IGNORECASE
)
# MIG's profiles, such as 3g.40gb, state their own.
_MEMORY = re.compile(r"(?:\dg\.)?([1-9]\d{0,3}(?:\.\d+)?)g(?:i?b)?", re.IGNORECASE)
_SPACE_IN_MEMORY = re.compile(r"(?<=\d) (?=gi?b\b)", re.IGNORECASE)
# 10^9 bytes are 7% less than a GiB, and a driver keeps some memory.
_NEAR = 0.075


@dataclass(frozen=True)
class GpuName:
    """A name as it was read."""

    model: str
    """As in ``GPU_GIB``, or for another one as it was written, without memory and vendor."""
    stated_gib: float | None

    @property
    def sizes(self) -> tuple[float, ...]:
        """GiB of the cards of this name; empty where the table has none."""
        return GPU_GIB.get(self.model, ())

    @property
    def card(self) -> Card | None:
        """The GPU that is meant; None where its memory is not known, or no card of this name has the memory stated."""
        if not self.sizes:
            return Card(self.model, self.stated_gib) if self.model and self.stated_gib else None
        if self.stated_gib is None:
            return Card(self.model, self.sizes[0])
        nearest = min(self.sizes, key=lambda it: abs(it - (self.stated_gib or 0)))
        return Card(self.model, nearest) if abs(self.stated_gib / nearest - 1) <= _NEAR else None


def read_gpu(text: str) -> GpuName:
    """Model and memory that a name states. Words that are not part of a known name make it another one."""
    written = _SPACE_IN_MEMORY.sub("", " ".join(re.split(r"[\s-]+", text.strip())))
    # The longest first, since some names contain another.
    for model in sorted(GPU_GIB, key=len, reverse=True):
        before, found, behind = f" {written} ".lower().partition(f" {model} ".lower())
        stated, others = _stated(f"{before} {behind}".split())
        if found and len(stated) <= 1 and all(map(_AROUND.fullmatch, others)):
            return GpuName(model, stated[0] if stated else None)
    stated, others = _stated(written.split())
    if len(stated) != 1:
        return GpuName(written, None)
    return GpuName(" ".join(word for word in others if word.lower() != "nvidia"), stated[0])


def card(text: str) -> Card | None:
    """The GPU of a name (``GpuName.card``)."""
    return read_gpu(text).card


def _stated(words: list[str]) -> tuple[list[float], list[str]]:
    """GiB of the words that state a memory, and the other words."""
    found = [_MEMORY.fullmatch(word) for word in words]
    return [float(it[1]) for it in found if it], [word for word, it in zip(words, found, strict=True) if not it]
