"""Lays out SageMaker's container contract for a node of a local run, so that the worker sees no difference."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JOB_ENVIRONMENT, LINE_PREFIX, RUN_FOLDER_ENVIRONMENT, JobFile
from sm_llm.runs.run_paths import ContainerPaths, RunPaths
from sm_llm.spec.tasks import TASK_KINDS, parallelism_of

if TYPE_CHECKING:
    from collections.abc import Mapping

NETWORK_INTERFACE = "lo"
LOOPBACK = "sm_llm.worker.loopback"
"""Module that runs torchrun with its key-value store on the loopback interface."""
LOOPBACK_ENVIRONMENT = dict.fromkeys(
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else NETWORK_INTERFACE
)
"""Makes processes of a local run listen there alone, where the user's own variables set nothing else."""
INSTANCE_TYPE = "local"
INSTANCE_GROUP = "local"
PORT = "<free-port>"
"""Stands in a submission for the rendezvous port, which is picked, and kept reserved, when an attempt starts."""


def host_names(node_count: int) -> list[str]:
    """SageMaker's names of a job's hosts: algo-1, algo-2, …"""
    return [f"algo-{node + 1}" for node in range(node_count)]


def rank_logs(base: Path) -> Path:
    """Where torchrun keeps its own files of a node: errors, and what each of several processes printed."""
    return ContainerPaths(base).scratch / "torchrun"


def entry_script(base: Path, kind: str) -> Path:
    """The entrypoint of one node, e.g. ``<base>/code/train.py``."""
    return ContainerPaths(base).code / TASK_KINDS[kind].entrypoint


def lay_out(paths: RunPaths, job: JobFile, node: int, source: str) -> ContainerPaths:
    """Create the folders, configuration files, channel links and entry script (text ``source``) of one node."""
    base = paths.node_dir(job.attempt, node)
    # A try of this attempt that was rolled back may have left files.
    if base.exists():
        shutil.rmtree(base)
    container = ContainerPaths(base)
    for folder in (container.config, container.model, container.output_data, container.code, container.scratch):
        folder.mkdir(parents=True)
    _write_configuration(container, job, node)
    _link_channels(container, job.channels)
    entry_script(base, job.spec.task.kind).write_text(source, encoding="utf-8")
    return container


def _write_configuration(container: ContainerPaths, job: JobFile, node: int) -> None:
    hosts = host_names(job.spec.compute.instance_count)
    _write_json(container.resource_config, resource_config(hosts, node))
    channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    _write_json(container.input_data_config, dict.fromkeys(job.channels, channel))
    # The toolkit reads the file in any case; what a job is stands in job.json.
    _write_json(container.hyperparameters, {})


def resource_config(hosts: list[str], node: int) -> dict[str, Any]:
    """``resourceconfig.json`` as SageMaker writes it."""
    return {
        "current_host": hosts[node],
        "current_instance_type": INSTANCE_TYPE,
        "current_group_name": INSTANCE_GROUP,
        "hosts": hosts,
        "instance_groups": [
            {"instance_group_name": INSTANCE_GROUP, "instance_type": INSTANCE_TYPE, "hosts": hosts},
        ],
        "network_interface_name": NETWORK_INTERFACE,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _link_channels(container: ContainerPaths, channels: Mapping[str, str]) -> None:
    (container.base / "input" / "data").mkdir(parents=True)
    for name, source in channels.items():
        try:
            container.channel(name).symlink_to(source)
        except OSError:  # a system, or a file system, without links
            container.channel_pointer(name).write_text(str(source), encoding="utf-8")


def node_environment(paths: RunPaths, job: JobFile, node: int, devices: str | None, threads: int) -> dict[str, str]:
    """The variables that SageMaker's toolkit, torchrun and the worker expect on one node.

    ``devices`` is the node's share of GPUs (``CUDA_VISIBLE_DEVICES``), None where the machine has none;
    ``threads`` is the CPU threads of each process. The spec's own ``environment`` comes last and wins.
    """
    container = ContainerPaths(paths.node_dir(job.attempt, node))
    hosts = host_names(job.spec.compute.instance_count)
    variables = {
        "SAGEMAKER_BASE_DIR": str(container.base),
        JOB_ENVIRONMENT: str(paths.job_file),
        RUN_FOLDER_ENVIRONMENT: str(paths.root),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(job.spec.backend.stop_seconds)),  # torch 2.13 and newer
        **LINE_PREFIX,
        **_strategy_variables(job),
        **_contract_variables(container, job, hosts, node, 0 if devices is None else devices.count(",") + 1),
    }
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = devices
    return {**variables, **job.spec.environment}


def _strategy_variables(job: JobFile) -> dict[str, str]:
    """What the engine of a job reads: a managed job gets it with the rest of its instance type's environment."""
    parallelism, storage = parallelism_of(job.spec.task), job.spec.storage
    if parallelism is None or storage is None:
        return {}
    return parallelism.environment(storage if "://" in storage else str(Path(storage).absolute()))


def _contract_variables(
    container: ContainerPaths, job: JobFile, hosts: list[str], node: int, gpus: int
) -> dict[str, str]:
    return {
        "SM_CURRENT_HOST": hosts[node],
        "SM_HOSTS": json.dumps(hosts),
        "SM_CURRENT_INSTANCE_TYPE": INSTANCE_TYPE,
        "SM_CURRENT_INSTANCE_GROUP": INSTANCE_GROUP,
        "SM_NETWORK_INTERFACE_NAME": NETWORK_INTERFACE,
        "SM_NUM_GPUS": str(gpus),
        "SM_NUM_CPUS": str(os.cpu_count() or 1),
        "SM_HPS": "{}",
        "SM_USER_ARGS": "[]",
        "SM_MODEL_DIR": str(container.model),
        "SM_OUTPUT_DIR": str(container.failure.parent),
        "SM_OUTPUT_DATA_DIR": str(container.output_data),
        "SM_INPUT_DIR": str(container.config.parent),
        "SM_INPUT_CONFIG_DIR": str(container.config),
        "SM_MODULE_DIR": str(container.code),
        "SM_MODULE_NAME": job.spec.task.kind,
        "SM_USER_ENTRY_POINT": TASK_KINDS[job.spec.task.kind].entrypoint,
        "SM_CHANNELS": json.dumps(sorted(job.channels)),
        **{f"SM_CHANNEL_{name.upper()}": str(container.channel(name)) for name in job.channels},
    }


def clear_scratch(paths: RunPaths, attempt: int) -> None:
    """Delete the node scratch folders of one attempt; what matters was published from them."""
    for scratch in paths.attempt_dir(attempt).glob("node-*/scratch"):
        shutil.rmtree(scratch, ignore_errors=True)
