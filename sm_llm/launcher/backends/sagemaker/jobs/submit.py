"""Starts a training job: the role is checked, what is missing in S3 is uploaded, then one call creates the job."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

from sm_llm.errors import SubmitError
from sm_llm.launcher.backends.sagemaker.account import Account, NoSuchJob, console_line, describe, told
from sm_llm.launcher.display.lines import size
from sm_llm.runs.run_record import Attempt
from sm_llm.storage.s3.s3_client import code_of, status_of
from sm_llm.storage.uri import open_store
from sm_llm.terminal import quoted, say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sm_llm.launcher.backends.base import Submission
    from sm_llm.runs.run_home import RunHome
    from sm_llm.storage.base import Store


def create_job(submission: Submission, home: RunHome, account: Account, on_claimed: Callable[[], None]) -> str:
    """Claim the attempt in the run's record, upload and create the job; returns ``REGION/JOB``.

    Raises ``SubmitError``; then no job was created and the attempt is free again, or the error states that a job may
    exist, and the attempt is kept for it.
    """
    job, request = submission.job, submission.request
    check_role(account, str(request["RoleArn"]))
    native_id = f"{account.region}/{request['TrainingJobName']}"
    kept = f"requests/attempt-{job.attempt}.json"
    opened = Attempt(
        number=job.attempt, native_id=native_id, host=socket.gethostname(), started=time.time(), request=kept
    )
    home.claim(opened)
    try:
        on_claimed()
        sent = upload(submission, home)
        _put(home.store, kept, (json.dumps(request, indent=2) + "\n").encode())
        _create(request, home.uri, account)
    except _Unanswered:
        raise
    except BaseException:
        home.unclaim(job.attempt)
        raise
    say(*submitted_lines(submission, account, sent), err=True)
    return native_id


class _Unanswered(SubmitError):
    """Nobody knows whether a job was created."""


def _create(request: Mapping[str, Any], uri: str, account: Account) -> None:
    """Create the job, also where SageMaker created it and its answer was lost, or Ctrl-C came before the answer.

    Raises ``SubmitError`` if there is no job, and ``_Unanswered`` if that is unknown.
    """
    name = request["TrainingJobName"]
    try:
        with told(f"SageMaker did not take training job {name}"):
            account.client("sagemaker").create_training_job(**request)
    except BaseException as error:
        if _is_refusal(error.__cause__) or not _exists(account, request, uri, error):
            raise
        if not isinstance(error, SubmitError):
            raise _Unanswered(
                f"interrupted, but job {name} was created. Stop it with: sm-llm stop {quoted(uri)}"
            ) from error


def _exists(account: Account, request: Mapping[str, Any], uri: str, error: BaseException) -> bool:
    """Whether the job is there after an ``error`` without an answer. Raises ``_Unanswered`` without one."""
    name = request["TrainingJobName"]
    try:
        found = describe(account, name)
    except NoSuchJob:
        return False
    except BaseException:  # Ctrl-C again, too
        perhaps = f"Job {name} may have been created all the same; check it with: sm-llm status {quoted(uri)}"
        raise _Unanswered(f"{str(error) or 'interrupted'}. {perhaps}") from error
    return bool(found.get("HyperParameters") == request["HyperParameters"])


def _is_refusal(error: BaseException | None) -> bool:
    """Whether SageMaker answered that it created nothing; "in use" may be the answer to a second try of botocore."""
    return 400 <= status_of(error) < 500 and code_of(error) != "ResourceInUse"


def upload(submission: Submission, home: RunHome | None = None) -> dict[str, int]:
    """Store what a submission needs in S3, leaving out what is there already; returns what was sent, in bytes.

    The caller has claimed the attempt: its files take the place of those of a try that was refused.
    """
    sent = {}
    for uri, body in submission.uploads.items():
        if home is not None and uri.startswith(f"{home.uri}/"):  # a connection costs more than what is sent
            store, key = home.store, uri.removeprefix(f"{home.uri}/")
        else:
            folder, _, key = uri.rpartition("/")
            store = open_store(folder, submission.job.spec.storage_options.model_dump())
        if _put(store, key, body, is_content_named="/bundles/" in uri):
            sent[uri] = len(body)
    return sent


def _put(store: Store, key: str, body: bytes, *, is_content_named: bool = False) -> bool:
    """Store ``body`` under ``key``; returns whether it was not there yet."""
    if store.put_if_absent(key, body):
        return True
    if is_content_named or store.get(key) == body:
        return False
    store.delete([key])
    return store.put_if_absent(key, body)


def check_role(account: Account, role: str) -> None:
    """Raise ``SubmitError`` for a role that does not exist; who may not read roles is not stopped."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        account.client("iam").get_role(RoleName=role.rpartition("/")[2])
    except ClientError as error:
        if code_of(error) == "NoSuchEntity":
            raise SubmitError(f"backend.role: there is no role {role}. Check the name and the account") from None
    except BotoCoreError:
        return


def submitted_lines(submission: Submission, account: Account, sent: Mapping[str, int]) -> list[str]:
    """What was submitted, where its output will be, and how to follow it."""
    request, uri = submission.request, submission.job.run_uri
    name, resources = request["TrainingJobName"], request["ResourceConfig"]
    nodes = f"{submission.job.spec.compute.instance_count} x {resources.get('InstanceType', 'several types')}"
    return [
        f"submitted training job {name} ({nodes}) in {account.region}; uploaded {size(sum(sent.values()))}",
        f"its results will be in {uri}; follow it with: sm-llm logs -f {quoted(uri)}",
        console_line(account.region, name),
    ]
