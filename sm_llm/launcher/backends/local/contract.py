"""The contract that a local job runs under: the local one, or that of a platform that is emulated on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.launcher.backend import emulation
from sm_llm.spec.backends.local import LocalOptions

if TYPE_CHECKING:
    from sm_llm.launcher.backend import Emulation
    from sm_llm.spec.job import JobSpec

EMULATED = "training_job"
"""Key of a local submission's request that holds the request of the emulated platform."""


def emulated(job: JobSpec) -> Emulation | None:
    """What runs the job under the contract of another platform; None under the local one."""
    contract = LocalOptions.of(job).contract
    return None if contract == "local" else emulation(contract)
