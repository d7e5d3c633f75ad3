"""Variables that belong to torchrun, SageMaker or sm_llm are refused on every backend; others are kept."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.environment.variables import FREE, RESERVED, reserved
from sm_llm.spec.loading.load import load

TASK: dict[str, Any] = {"kind": "script", "entry": "train.py"}
BACKENDS = [{"name": "local"}, {"name": "sagemaker"}]
NAMES = [
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "TORCHELASTIC_RUN_ID", "PET_NNODES", "SM_MODEL_DIR", "SM_HPS", "SM_CHANNEL_TRAIN", "SAGEMAKER_PROGRAM",
    "SAGEMAKER_BASE_DIR", "CA_REPOSITORY_ARN", "SM_LLM_OUTPUT", "SM_LLM_WHEELHOUSE", "SM_LLM_JOB_FILE",
    "NODE_RANK", "GLOBAL_RANK", "NNODES", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "AWS_REGION", "AWS_DEFAULT_REGION",
    "CURRENT_HOST", "TRAINING_JOB_NAME", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "RUN_NEURON_PARALLEL_COMPILE",
]  # fmt: skip
KEPT = ["NCCL_DEBUG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MY_RANK", "SMALL", "PIP_INDEX_URL", *FREE]


SOURCES = {
    "torchrun": ("torch/distributed/elastic/agent/server/local_elastic_agent.py", r'"([A-Z][A-Z_]+)": '),
    "training toolkit": ("sagemaker_training/environment.py", r'os\.environ\["?(?:params\.)?([A-Z_]+)"?\] ='),
    "launcher of the toolkit": ("sagemaker_training/torch_distributed.py", r'os\.environ\["([A-Z_]+)"\] ='),
    "PyTorch's part of the toolkit": (
        "sagemaker_pytorch_container/training.py",
        r"os\.environ\[['\"]([A-Z_]+)['\"]\] =",
    ),
}
"""Programs that set variables of a job's processes: their file, and how they set one."""
OF_THE_TOOLKIT = {
    "JOB_NAME_ENV": "SAGEMAKER_JOB_NAME",
    "CURRENT_HOST_ENV": "CURRENT_HOST",
    "REGION_NAME_ENV": "SAGEMAKER_REGION",
    "BASE_PATH_ENV": "SAGEMAKER_BASE_DIR",
}
"""Constants of the toolkit that hold names."""
GIVEN_BACK = {
    "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "RDMAV_FORK_SAFE", "NCCL_SOCKET_IFNAME", "NCCL_PROTO", "NCCL_IB_DISABLE",
    "NCCL_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # fmt: skip
"""What a job may set: torchrun keeps it, or the worker gives it back (``toolkit.settle_environment``)."""


def spec(block: str, name: str, backend: dict[str, str]) -> dict[str, Any]:
    value = {"environment": "10.0.0.9", "secrets": "ssm:x"}[block]
    return {"name": "x", "task": TASK, "backend": backend, block: {name: value}}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda it: it["name"])
@pytest.mark.parametrize("block", ["environment", "secrets"])
@pytest.mark.parametrize("name", NAMES)
def test_F12_C9_a_variable_of_somebody_else_is_refused_with_the_reason(
    name: str, block: str, backend: dict[str, str]
) -> None:
    with pytest.raises(SpecError) as caught:
        load(spec(block, name, backend), environ={})
    found = {fault.path: fault for fault in caught.value.issues}
    assert (owner := reserved(name)) is not None
    assert owner.owner in found[f"{block}.{name}"].message
    assert found[f"{block}.{name}"].remedy


@pytest.mark.parametrize("name", KEPT)
def test_C9_any_other_variable_is_kept(name: str) -> None:
    loaded = load(spec("environment", name, {"name": "local"}), environ={})
    assert loaded.spec.environment == {name: "10.0.0.9"}


@pytest.mark.parametrize("program", SOURCES)
def test_C9_every_variable_that_torchrun_or_the_toolkit_sets_is_refused_or_given_back(program: str) -> None:
    file, pattern = SOURCES[program]
    package, _, rest = file.partition("/")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    text = (Path(found.origin).parent / rest).read_text()
    names = {OF_THE_TOOLKIT.get(name, name) for name in re.findall(pattern, text)}
    assert names
    assert [name for name in names - GIVEN_BACK if reserved(name) is None] == []


def test_C9_a_workflow_and_its_steps_are_checked_alike() -> None:
    steps = {"a": {"task": TASK, "environment": {"RANK": "1"}}}
    with pytest.raises(SpecError) as caught:
        load({"name": "x", "steps": steps, "environment": {"WORLD_SIZE": "2"}}, environ={})
    assert {"environment.WORLD_SIZE", "steps.a.environment.RANK"} <= {fault.path for fault in caught.value.issues}


def test_C9_every_entry_of_the_table_is_reached() -> None:
    assert {reserved(name) for name in NAMES} == set(RESERVED)
