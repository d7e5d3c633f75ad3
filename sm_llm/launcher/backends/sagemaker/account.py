"""Training jobs of an account by their names: what the service knows of one, and where it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import SubmitError
from sm_llm.launcher.aws_account import aws_errors, is_missing

if TYPE_CHECKING:
    from sm_llm.launcher.aws_account import AwsAccount


class NoSuchJob(SubmitError):
    """There is no training job of this name in the region."""


def describe(account: AwsAccount, name: str) -> dict[str, Any]:
    """The service's description of a training job. Raises ``NoSuchJob``, or ``SubmitError`` without an answer."""
    with aws_errors(f"cannot describe training job {name} in {account.region}"):
        from botocore.exceptions import ClientError

        try:
            found: dict[str, Any] = account.client("sagemaker").describe_training_job(TrainingJobName=name)
        except ClientError as error:
            if is_missing(error):
                raise NoSuchJob(f"there is no training job {name} in {account.region}") from None
            raise
    return found


def split_native(native_id: str) -> tuple[str, str]:
    """``REGION/JOB`` -> region and name of the job. Raises ``SubmitError`` for anything else."""
    region, slash, name = native_id.partition("/")
    if not (region and slash and name):
        raise SubmitError(f"sagemaker://{native_id} names no training job. Write sagemaker://REGION/JOB")
    return region, name


def console_line(region: str, name: str) -> str:
    """Where the job is shown in AWS's console."""
    return f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{name}"
