"""Training jobs of an account by their names: what the service knows of one, and where it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.aws import fresh_session
from sm_llm.errors import SubmitError
from sm_llm.launcher.aws_account import aws_errors, is_missing
from sm_llm.launcher.backends.sagemaker.request.request import SageMakerTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.aws_account import AwsAccount
    from sm_llm.launcher.planning.plan import Plan


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


# A plan waits for no service that does not answer.
_ASK = {"connect_timeout": 3, "read_timeout": 5, "retries": {"mode": "standard", "total_max_attempts": 1}}


def role_notes(plan: Plan, session: Any = None) -> Iterator[str]:
    """A warning where the role of a job is of another account than the credentials that are used here: those of a
    botocore ``session``, or of AWS's own chain."""
    target = plan.target
    # Credentials for another store than AWS's are not asked about; without any, a plan contacts nothing.
    if not isinstance(target, SageMakerTarget) or plan.job.storage_options.endpoint_url:
        return
    account = (target.settings.role or "").split(":")[4:5]
    own = _caller(target.settings.region or "", session or fresh_session()) if account else None
    if own and account != [own]:
        yield (
            f"backend.role: {target.settings.role} is of account {account[0]}, and the credentials here are of {own}: "
            "SageMaker passes no job the role of another account"
        )


def _caller(region: str, session: Any) -> str | None:
    """The account of the credentials of a botocore session; None where that is not answered."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        if session.get_credentials() is None:
            return None
        return str(
            session.create_client("sts", region_name=region, config=Config(**_ASK)).get_caller_identity()["Account"]
        )
    except (BotoCoreError, ClientError):
        return None
