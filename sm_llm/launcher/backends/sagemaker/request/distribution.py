"""How a managed job starts its processes: SageMaker's launch parameters, and the environment of the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import LINE_PREFIX
from sm_llm.spec.job_machines import machines, network_environment
from sm_llm.spec.tasks import parallelism_of, starts_ranks, training_of

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec

TEE = "PET_TEE"
"""Stands for torchrun's ``--tee``, in whose command line the training toolkit lets nobody write."""
# Named after MPI, and read by the toolkit's torchrun launcher as well.
_PROCESSES = "sagemaker_mpi_num_of_processes_per_host"


@dataclass(frozen=True)
class Distribution:
    """What starts the processes of every node."""

    estimator: dict[str, Any] | None
    """The ``distribution`` of SageMaker's estimator; None is one process per node."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """What the estimator turns it into, not yet as JSON."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables by the facts of the instance type; the user's own win."""


def distribution(job: JobSpec) -> Distribution:
    """The launch parameters and network environment of a job."""
    environment = network_environment(job) | _log_environment(job)
    mp_parameters = _mp_parameters(job)
    if not starts_ranks(job.task):
        parameters = {} if mp_parameters is None else {"mp_parameters": mp_parameters}
        return Distribution(None, parameters, environment)
    estimator: dict[str, Any] = {"torch_distributed": {"enabled": True}}
    hyperparameters: dict[str, Any] = {"sagemaker_torch_distributed_enabled": True}
    # As the SDK's estimator sends it, which a test compares; of instance groups it sends none.
    if job.compute.instance_type is not None:
        hyperparameters["sagemaker_instance_type"] = job.compute.instance_type
    if mp_parameters is not None:
        # What the SDK makes of this distribution; a test compares the two requests.
        estimator["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": mp_parameters}}
        hyperparameters["mp_parameters"] = mp_parameters
        hyperparameters["sagemaker_distributed_dataparallel_enabled"] = False
        hyperparameters["sagemaker_instance_type"] = job.compute.instance_type
    rows = machines(job)
    # The toolkit starts one process per accelerator unless a number is given.
    if not rows or any(job.compute.processes != row.processes for row in rows):
        hyperparameters[_PROCESSES] = job.compute.processes
    return Distribution(estimator, hyperparameters, environment)


def _log_environment(job: JobSpec) -> dict[str, str]:
    """Of several processes torchrun labels the lines: CloudWatch has one stream for all of a host."""
    # 3 means both streams of every rank: standard output and standard error.
    return {TEE: "3", **LINE_PREFIX} if starts_ranks(job.task) and job.compute.processes > 1 else {}


def _mp_parameters(job: JobSpec) -> dict[str, Any] | None:
    """What SageMaker hands to the engine's own library (``modelparallel``); None without one: torchrun suffices."""
    parallelism, training = parallelism_of(job.task), training_of(job.task)
    if parallelism is None:
        return None
    return parallelism.library_parameters(training.seed if training else 0)
