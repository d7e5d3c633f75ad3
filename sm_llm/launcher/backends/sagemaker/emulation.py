"""The SageMaker emulation: a CreateTrainingJob request runs here under SageMaker's own toolkit, without docker.

What SageMaker would do with the request is done here: channels are brought to the container's folders, its
configuration files are written, and ``train`` of the toolkit is started once per host, with SAGEMAKER_BASE_DIR in the
place of /opt/ml. The toolkit fetches the code bundle and runs torchrun itself.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Issue, StorageError
from sm_llm.launcher.backends.sagemaker.request.request_addresses import channel_issues
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.launcher.planning.plan import Checks
from sm_llm.owned import temporary_folder
from sm_llm.package import PACKAGE
from sm_llm.runs.run_lock import exclusive
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.inputs import S3Input
from sm_llm.storage.uri import parse
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan, Target
    from sm_llm.spec.inputs import Input
    from sm_llm.spec.job import JobSpec

_TOOLKIT = ("sagemaker_training", "sagemaker_pytorch_container")
_TOOLKIT_MODULE = "sagemaker_pytorch_container.training:main"
_PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
_GROUP = "homogeneousCluster"
# All hosts are addresses of this machine's loopback interface, which other machines do not reach.
_INTERFACE = "lo"
_DAY = 86_400
_STAND_IN_TYPE = "ml.m5.2xlarge"
# What a request needs of an account; nothing here reads it.
_STAND_IN: dict[str, Any] = {
    "role": "arn:aws:iam::000000000000:role/emulation",
    "region": "us-east-1",
    "image": "built",
    "image_uri": "emulation",
    "max_run_seconds": _DAY,
}


def issues(job: JobSpec) -> list[Issue]:
    """What is missing on this machine, and inputs that SageMaker would not take."""
    missing = [name for name in _TOOLKIT if find_spec(name) is None]
    remedy = "pip install sagemaker-training sagemaker-pytorch-training"
    found = (
        [Issue("emulation-package-missing", "backend.contract", f"{missing[0]} is not installed", "sagemaker", remedy)]
        if missing
        else []
    )
    return [*found, *channel_issues(job)]


def decide(plan: Plan) -> Checks:
    """What SageMaker would give the job, and why it would give nothing."""
    from sm_llm.launcher.backends.sagemaker.plan_checks import decide

    decided = decide(replace(plan, job=as_training_job(plan.job)))
    return Checks(decided.target, decided.issues)


def render(plan: Plan, job: JobFile, target: Target) -> Submission:
    """What SageMaker would be sent; local inputs become channels of the request."""
    from sm_llm.launcher.backends.sagemaker.render import render

    cloud = replace(plan, job=as_training_job(job.spec), target=target)
    return render(cloud, job.model_copy(update={"spec": cloud.job, "channels": {}}))


def nodes(request: Mapping[str, Any], base_of: Callable[[int], Path], port: str) -> list[dict[str, Any]]:
    """The toolkit's own command for every host, whose base folder is ``base_of(node)``, and its variables."""
    count = range(host_count(request))
    return [{"argv": command(port), "env": environment(request, base_of(node))} for node in count]


def as_training_job(job: JobSpec) -> JobSpec:
    """A local job as one of SageMaker, as far as nothing but this machine decides."""
    compute = job.compute.model_copy(
        update={
            "instance_type": job.compute.instance_type or _STAND_IN_TYPE,
            "processes_per_instance": job.compute.processes,
        }
    )
    inputs = {name: _as_channel(value) for name, value in job.inputs.items()}
    update = {"compute": compute, "backend": SageMakerOptions(**_STAND_IN), "inputs": inputs}
    return job.model_copy(update=update)


def _as_channel(value: Input) -> Input:
    """A folder or file of this machine as what it would be on SageMaker: an input channel."""
    folder = local_folder(value) if isinstance(value, str) else None
    return value if folder is None or not folder.exists() else S3Input(uri=str(folder.absolute()), mode="File")


def hosts(count: int) -> list[str]:
    """Names that resolve to this machine without anybody's help, in the order in which the toolkit sorts them."""
    return [f"127.0.0.{number + 1}" for number in range(count)]


def lay_out(request: Mapping[str, Any], base: Path, node: int, processes: int, options: Mapping[str, Any]) -> None:
    """Make the base folder of one host as SageMaker would. ``options`` hold how S3 is reached.

    Raises ``StorageError`` for a channel that cannot be brought here.
    """
    # A try of this attempt that was rolled back may have left files.
    shutil.rmtree(base, ignore_errors=True)
    container = ContainerPaths(base)
    for folder in (container.config, container.code, container.model, container.output_data, container.scratch):
        folder.mkdir(parents=True)
    for channel in request.get("InputDataConfig", ()):
        name = channel["ChannelName"]
        _bring(channel["DataSource"], container.channel(name), options, is_of_run=name == JOB_CHANNEL)
    hyperparameters = dict(request.get("HyperParameters", {}))
    if _is_distributed(hyperparameters):  # there may be no GPUs here to count
        hyperparameters.setdefault(_PROCESSES, json.dumps(processes))
    _write_torchrun(base)
    _write(container.hyperparameters, hyperparameters)
    _write(container.resource_config, _resource_config(request, node))
    _write(
        container.input_data_config, {it["ChannelName"]: _described(it) for it in request.get("InputDataConfig", ())}
    )


def _write_torchrun(base: Path) -> None:
    """A ``torchrun`` for the toolkit to find first: the real one would let other machines reach its store."""
    loopback = str(PACKAGE / "worker" / "loopback.py")
    # The kernel limits the length of a shebang line and does not split its arguments, so a shell starts Python.
    lines = [
        "#!/bin/sh",
        f"'''exec' {quoted(sys.executable)} -P \"$0\" \"$@\"",
        "' '''",  # so far a shell reads it; Python takes that for a text
        "import runpy, sys",
        f"sys.argv[:] = [{loopback!r}, 'torch.distributed.run', *sys.argv[1:]]",
        f"runpy.run_path({loopback!r}, run_name='__main__')",
    ]
    program = _programs(base) / "torchrun"
    program.parent.mkdir()
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    program.chmod(0o700)


def _programs(base: Path) -> Path:
    return base / "bin"


def _is_distributed(hyperparameters: Mapping[str, str]) -> bool:
    return hyperparameters.get("sagemaker_torch_distributed_enabled") == "true"


def _lead_to(location: Path, target: Path) -> None:
    """Show a folder of this machine as a channel, or a file in one, without a copy where links work."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if location.is_file():
        target.mkdir()
        target = target / location.name
    try:
        target.symlink_to(location)
    except OSError:
        (shutil.copytree if location.is_dir() else shutil.copy2)(location, target)


def _bring(source: Mapping[str, Any], target: Path, options: Mapping[str, Any], *, is_of_run: bool) -> None:
    if "FileSystemDataSource" in source:
        location = source["FileSystemDataSource"]
        raise StorageError(f"{location['FileSystemId']}: a file system of AWS cannot be mounted on this machine")
    from sm_llm.storage.syncing.sync import sync

    uri = source["S3DataSource"]["S3Uri"]
    if (folder := parse(uri).path) is not None and not is_of_run:
        _lead_to(folder, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    sync(uri.rstrip("/"), target, one_weight_format=False, options=options)


def _resource_config(request: Mapping[str, Any], node: int) -> dict[str, Any]:
    resources = request["ResourceConfig"]
    groups = resources.get("InstanceGroups") or [{"InstanceGroupName": _GROUP, **resources}]
    names = hosts(sum(it["InstanceCount"] for it in groups))
    described, left = [], list(names)
    for group in groups:
        # Hosts are counted through the groups in their order.
        own, left = left[: group["InstanceCount"]], left[group["InstanceCount"] :]
        described.append(
            {"instance_group_name": group["InstanceGroupName"], "instance_type": group["InstanceType"], "hosts": own}
        )
    own_group = next(it for it in described if names[node] in it["hosts"])
    return {
        "current_host": names[node],
        "current_instance_type": own_group["instance_type"],
        "current_group_name": own_group["instance_group_name"],
        "hosts": names,
        "instance_groups": described,
        "network_interface_name": _INTERFACE,
    }


def _described(channel: Mapping[str, Any]) -> dict[str, str]:
    return {
        "TrainingInputMode": channel.get("InputMode", "File"),
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def host_count(request: Mapping[str, Any]) -> int:
    """Hosts of a request."""
    resources = request["ResourceConfig"]
    groups = resources.get("InstanceGroups") or [resources]
    return sum(int(group["InstanceCount"]) for group in groups)


def command(port: str) -> list[str]:
    """What a training image runs. ``port`` is for torchrun on one host, which would else take 29500."""
    return ["env", f"PET_MASTER_PORT={port}", sys.executable, "-P", "-m", "sagemaker_training.cli.train"]


def environment(request: Mapping[str, Any], base: Path) -> dict[str, str]:
    """Variables of one container: the image's, the service's, and those of the request, which win."""
    programs = os.pathsep.join(
        [str(_programs(base)), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    name = request["TrainingJobName"]
    return {
        "PATH": programs,  # the toolkit starts torchrun by its name
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_TRAINING_MODULE": _TOOLKIT_MODULE,
        "TRAINING_JOB_NAME": name,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-east-1:000000000000:training-job/{name}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": "",  # the bundle brings the code
        **request.get("Environment", {}),
    }


def upload(submission: Submission) -> None:
    """Store what the request refers to, in S3 or in folders. Raises ``StorageError`` and ``SubmitError``."""
    from sm_llm.launcher.backends.sagemaker.jobs.submit import upload as store

    # A store in a folder needs the folder to exist; S3 has none to make.
    for uri in submission.uploads:
        if (folder := parse(uri.rpartition("/")[0]).path) is not None:
            folder.mkdir(parents=True, exist_ok=True)
    store(submission)


@contextmanager
def alone(count: int) -> Iterator[None]:
    """Wait for this user's other emulated jobs of several hosts: the toolkit always gives torchrun the same port."""
    if count == 1:
        yield
        return
    with exclusive(temporary_folder() / "emulation.lock"):
        yield
