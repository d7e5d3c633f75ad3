"""The nodes of a cluster as ``sinfo`` lists them: state, reason, accelerators, and what HyperPod does about a fault."""

from __future__ import annotations

import re

from sm_llm.launcher.backend import ClusterNode

FIELDS = ("NodeList", "StateLong", "Gres", "GresUsed", "Reason")
"""What ``sinfo`` is asked for."""

# ``gpu:8``, ``gpu:h100:8(S:0-1)`` or ``neuron:16``: type and sockets may be missing.
_ACCELERATORS = re.compile(r"(?:^|,)(?:gpu|neuron[a-z]*)(?::(?!\d+\b)[^,:()]+)?:(\d+)")
_USABLE = ("idle", "mixed", "allocated", "completing")
# Reasons by which HyperPod's health checks, or an administrator, ask for a node's replacement or reboot.
_ACTIONS = {"action:replace": "being replaced", "action:reboot": "being rebooted"}


def node_of(fields: list[str]) -> ClusterNode:
    """A node from the values of ``FIELDS``."""
    name, state, total, used, reason = (it.strip() for it in fields)
    # A flag behind the state: "*" does not respond, "~" is switched off, "$" is reserved, and others.
    is_usable = state.isalpha() and state in _USABLE
    # None is not 0: without GRES in its configuration Slurm knows nothing of a node's accelerators.
    count = _accelerators(total)
    free = None if count is None else max(0, count - (_accelerators(used) or 0)) if is_usable else 0
    asked = next((words for action, words in _ACTIONS.items() if action in reason.lower()), "")
    return ClusterNode(name, state, "" if reason in ("none", "(null)") else reason, count, free, asked)


def _accelerators(text: str) -> int | None:
    """How many accelerators a list of generic resources holds; None where it names none."""
    found = _ACCELERATORS.findall(text)
    return sum(map(int, found)) if found else None
