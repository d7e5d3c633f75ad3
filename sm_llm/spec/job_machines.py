"""The instance types of a job's nodes: those of its groups where it has groups, else ``compute.instance_type``.

Other modules ask here for what follows from the machines, because ``compute.instance_type`` is one of several types in
a job of groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.spec.machines.hardware import Card, Instance, instance, instance_bf16_flops
from sm_llm.spec.tasks import parallelism_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.spec.backends.base import InstanceGroup
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.parallelism.base import StrategySpec

_PIPELINE_INFLIGHT, _ZERO1_INFLIGHT = "7", "3"


def groups(job: JobSpec) -> Sequence[InstanceGroup]:
    """The instance groups of a job; empty where all nodes are of one type."""
    return job.backend.node_groups


def machine_types(job: JobSpec) -> tuple[str, ...]:
    """Names of the instance types of all nodes, each once; empty where none is given."""
    named: list[str | None] = [group.instance_type for group in groups(job)]
    return tuple(dict.fromkeys(name for name in named or [job.compute.instance_type] if name is not None))


def machines(job: JobSpec) -> tuple[Instance, ...]:
    """The rows of all types of a job; empty where one of them is not in the table, for then nothing follows."""
    rows = [instance(name) for name in machine_types(job)]
    known = tuple(row for row in rows if row is not None)
    return known if len(known) == len(rows) else ()


def slowest_flops(job: JobSpec) -> float | None:
    """Peak dense bf16 FLOP/s of the slowest accelerator of a job, for which the others wait; None where unknown."""
    peaks = [instance_bf16_flops(row) for row in machines(job)]
    known = [peak for peak in peaks if peak is not None]
    return min(known) if known and len(known) == len(peaks) else None


def smallest_accelerator(job: JobSpec) -> Instance | None:
    """The type whose GPUs or NeuronCores have the least memory; None where not all nodes have some that the table
    knows."""
    rows = machines(job)
    return min(rows, key=lambda row: row.accelerator_gib) if rows and all(row.accelerator for row in rows) else None


def smallest_card(job: JobSpec) -> Card | None:
    """The accelerator with the least memory: of the instance types, or ``compute.gpu``, or this machine's for a local
    job; None where it is not known."""
    row = smallest_accelerator(job)
    if row is not None:
        return row.card
    return None if machine_types(job) else _card_without_type(job)


def cards(job: JobSpec) -> tuple[Card, ...]:
    """Every accelerator that a job computes on, each kind once, from the same sources; empty where none is known."""
    found = [row.card for row in machines(job)] if machine_types(job) else [_card_without_type(job)]
    return tuple({it.name: it for it in found if it is not None}.values())


def _card_without_type(job: JobSpec) -> Card | None:
    """The GPU of nodes whose type is not given."""
    # Also for a local job: its plan may be for another machine.
    if job.compute.gpu is not None:
        from sm_llm.spec.machines.gpu_names import card

        return card(job.compute.gpu)
    if not job.backend.runs_here or computes_on_cpu(job):
        return None
    from sm_llm.spec.machines.machine import own_card

    return own_card()


def computes_on_cpu(job: JobSpec) -> bool:
    """Whether a job computes on CPUs, as far as it is known: by its instance types, the GPU that it names, or for a
    local job this machine."""
    if machine_types(job):
        rows = machines(job)
        return bool(rows) and not any(row.accelerator for row in rows)
    if job.compute.gpu is not None:
        return False
    if not job.backend.runs_here:
        return False
    from sm_llm.spec.machines.machine import VISIBLE, this_machine

    # An empty value hides all GPUs.
    own = job.environment.get(VISIBLE)
    return not own if own is not None else not this_machine().gpus


def network_environment(job: JobSpec, *, has_efa: bool | None = None) -> dict[str, str]:
    """Variables for libfabric, NCCL and the Neuron runtime, by what the instance type has.

    EFA is named only where every node has a card for it (or ``has_efa``, where something else decides what a job gets
    of them), and only between nodes: on one node its warnings mislead. The protocol of NCCL and the rest of libfabric's
    switches are left to current plugins, which choose better themselves.
    """
    rows, parallelism = machines(job), parallelism_of(job.task)
    # A cluster of one's own may leave the type out, and a strategy for Neuron still needs its variables.
    is_neuron = all(row.is_neuron for row in rows) if rows else _is_for_neuron(parallelism)
    variables = _neuron_environment(job) if is_neuron else {}
    if has_efa is None:
        has_efa = bool(rows) and all(row.efa_cards for row in rows)
    if has_efa and job.compute.instance_count > 1:
        variables |= _efa_environment(is_neuron=is_neuron)
    return variables


def _is_for_neuron(parallelism: StrategySpec | None) -> bool:
    return parallelism is not None and parallelism.image_stack == "neuron"


def _efa_environment(*, is_neuron: bool) -> dict[str, str]:
    if is_neuron:
        return {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    # A process that holds huge pages cannot always fork, as loaders of data do: "Cannot allocate memory". That is all
    # that aws-ofi-nccl 1.7 and newer need; the provider is named for older ones.
    return {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}


def _neuron_environment(job: JobSpec) -> dict[str, str]:
    """As AWS's tutorials set them, without what is deprecated; MALLOC_ARENA_MAX must be there before torchrun."""
    parallelism = parallelism_of(job.task)
    # Each stage starts micro-batches before earlier ones are back: more of its work waits at the runtime.
    pipelined = parallelism is not None and parallelism.degrees.pipeline > 1
    variables = {
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": _PIPELINE_INFLIGHT if pipelined else _ZERO1_INFLIGHT,
        "MALLOC_ARENA_MAX": "128" if pipelined else "64",
        **(parallelism.environment(job.storage or "") if parallelism is not None else {}),
    }
    return variables | _logical_cores(job, variables.get("NEURON_CC_FLAGS"))


def _logical_cores(job: JobSpec, flags: str | None) -> dict[str, str]:
    """How many cores of Trn2 the runtime shows as one, which graphs must be compiled for: it refuses other ones."""
    if not any(row.family.startswith("trn2") for row in machines(job)):
        return {}
    # 2 is the default of both, and what the table of machines counts with; an image may have another one.
    together = job.environment.get("NEURON_LOGICAL_NC_CONFIG", "2")
    compiled = {} if flags is None else {"NEURON_CC_FLAGS": f"{flags} --logical-nc-config={together}"}
    return {"NEURON_LOGICAL_NC_CONFIG": together, **compiled}
