"""A shell in the container of a running training job: SageMaker's remote debugging, by AWS Systems Manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.backends.sagemaker.account import describe, split_native
from sm_llm.launcher.backends.sagemaker.jobs.states import node_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.aws_account import AwsAccount

# The one secondary status in which the containers can be entered.
_RUNNING = "Training"


def session_command(native_id: str, node: int, connect: Callable[[str], AwsAccount]) -> list[str]:
    """The command of the AWS CLI that opens a session on ``node``, counted from 0.

    Raises ``SubmitError`` for a job that does not train now, was started without remote debugging, or has fewer nodes.
    """
    region, name = split_native(native_id)
    job = describe(connect(region), name)
    status, nodes = str(job.get("SecondaryStatus")), node_count(job)
    if not job.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"):
        raise SubmitError(
            f"training job {name} was started without remote debugging. Launch with backend.remote_debug=true; the "
            "role then needs ssmmessages:CreateControlChannel, CreateDataChannel, OpenControlChannel, OpenDataChannel"
        )
    if status != _RUNNING:
        raise SubmitError(f"training job {name} is in status {status}; a shell can be opened while it is {_RUNNING}")
    if not 0 <= node < nodes:
        raise SubmitError(f"training job {name} has the nodes 0 to {nodes - 1}, not {node}")
    target = f"sagemaker-training-job:{name}_algo-{node + 1}"
    return ["aws", "ssm", "start-session", "--target", target, "--region", region]
