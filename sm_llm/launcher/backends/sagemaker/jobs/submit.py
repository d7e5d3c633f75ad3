"""Starts a training job: what is missing in S3 is uploaded, then one call creates the job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sm_llm.errors import SubmitError
from sm_llm.launcher.aws_account import AwsAccount, aws_errors
from sm_llm.launcher.backends.sagemaker.account import NoSuchJob, console_line, describe
from sm_llm.launcher.submission import MayRun
from sm_llm.runs.run_paths import RunPaths
from sm_llm.storage.s3.s3_client import code_of, status_of
from sm_llm.storage.uri import open_store
from sm_llm.terminal import echo, quoted, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.launcher.backend import Submission
    from sm_llm.runs.run_store import RunStore
    from sm_llm.storage.base import Store


def native_id(submission: Submission, region: str) -> str:
    """``REGION/JOB``."""
    return f"{region}/{submission.request['TrainingJobName']}"


def create_job(submission: Submission, run_store: RunStore, account: AwsAccount) -> str:
    """Upload and create the job of a claimed attempt; returns ``REGION/JOB``.

    Raises ``SubmitError``; then no job was created, or (``MayRun``) the error states that a job may exist.
    """
    request = submission.request
    # Everything the job reads lies there before it exists: it may start at once.
    sent = upload(submission, run_store)
    keep_request(run_store, submission.job.attempt, request)
    _create(request, run_store.uri, account)
    echo(*submitted_lines(submission, account, sent), err=True)
    return native_id(submission, account.region)


def keep_request(run_store: RunStore, attempt: int, request: Mapping[str, Any]) -> None:
    """Store what is sent for an attempt, in place of what a try that was refused has left."""
    put_anew(run_store.store, RunPaths.request_key(attempt), (json.dumps(request, indent=2) + "\n").encode())


def _create(request: Mapping[str, Any], uri: str, account: AwsAccount) -> None:
    """Create the job, also where SageMaker created it and its answer was lost, or Ctrl-C came before the answer.

    Raises ``SubmitError`` if there is no job, and ``MayRun`` if that is unknown.
    """
    name = request["TrainingJobName"]
    try:
        with aws_errors(f"SageMaker did not take training job {name}"):
            account.client("sagemaker").create_training_job(**request)
    except BaseException as error:
        # The handler above keeps the error of botocore as the cause.
        if _is_refusal(error.__cause__) or not _exists(account, request, uri, error):
            raise
        # The job exists, so a SubmitError here was only a lost answer: the launch continues.
        if not isinstance(error, SubmitError):
            raise MayRun(f"interrupted, but job {name} was created. Stop it with: sm-llm stop {quoted(uri)}") from error


def _exists(account: AwsAccount, request: Mapping[str, Any], uri: str, error: BaseException) -> bool:
    """Whether the job is there after an ``error`` without an answer. Raises ``MayRun`` without one."""
    name = request["TrainingJobName"]
    try:
        found = describe(account, name)
    except NoSuchJob:
        return False
    except BaseException:  # Ctrl-C again, too
        perhaps = f"Job {name} may have been created all the same; check it with: sm-llm status {quoted(uri)}"
        raise MayRun(f"{str(error) or 'interrupted'}. {perhaps}") from error
    # A job of somebody else may have the name; only ours has these hyperparameters.
    return bool(found.get("HyperParameters") == request["HyperParameters"])


def _is_refusal(error: BaseException | None) -> bool:
    """Whether SageMaker answered that it created nothing; "in use" may be the answer to a second try of botocore."""
    return 400 <= status_of(error) < 500 and code_of(error) != "ResourceInUse"


def upload(submission: Submission, run_store: RunStore | None = None) -> dict[str, int]:
    """Store what a submission needs in S3, leaving out what is there already; returns what was sent, in bytes.

    The caller has claimed the attempt: its files take the place of those of a try that was refused.
    """
    sent = {}
    for uri, body in submission.uploads.items():
        if run_store is not None and uri.startswith(f"{run_store.uri}/"):  # a connection costs more than what is sent
            store, key = run_store.store, uri.removeprefix(f"{run_store.uri}/")
        else:
            folder, _, key = uri.rpartition("/")
            store = open_store(folder, submission.job.spec.storage_options.model_dump())
        if put_anew(store, key, body, is_content_named="/bundles/" in uri):
            sent[uri] = len(body)
    return sent


def put_anew(store: Store, key: str, body: bytes, *, is_content_named: bool = False) -> bool:
    """Store ``body`` under ``key``; returns whether it was not there yet."""
    if store.put_if_absent(key, body):
        return True
    if is_content_named or store.get(key) == body:
        return False
    store.delete([key])
    return store.put_if_absent(key, body)


def check_role(account: AwsAccount, role: str) -> None:
    """Raise ``SubmitError`` for a role that does not exist; who may not read roles is not stopped."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        account.client("iam").get_role(RoleName=role.rpartition("/")[2])
    except ClientError as error:
        if code_of(error) == "NoSuchEntity":
            raise SubmitError(f"backend.role: there is no role {role}. Check the name and the account") from None
    except BotoCoreError:
        return


def submitted_lines(submission: Submission, account: AwsAccount, sent: Mapping[str, int]) -> list[str]:
    """What was submitted, where its output will be, and how to follow it."""
    request, uri = submission.request, submission.job.run_uri
    name, resources = request["TrainingJobName"], request["ResourceConfig"]
    nodes = f"{submission.job.spec.compute.instance_count} x {resources.get('InstanceType', 'several types')}"
    return [
        f"submitted training job {name} ({nodes}) in {account.region}; uploaded {size(sum(sent.values()))}",
        f"its results will be in {uri}; follow it with: sm-llm logs -f {quoted(uri)}",
        console_line(account.region, name),
    ]
