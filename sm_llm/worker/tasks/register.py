"""The register task: a published result becomes a version of a model on SageMaker, where its files lie."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import TYPE_CHECKING, Any

from sm_llm.errors import RunFailed
from sm_llm.spec.tasks import RegisterTask
from sm_llm.storage.hub.hub_ledger import LEDGERS, Ledger
from sm_llm.storage.publication.result import result_address
from sm_llm.storage.uri import is_s3
from sm_llm.worker.checkpoint.earlier import begins_alone
from sm_llm.worker.publishing.own_record import region_of
from sm_llm.worker.publishing.publish_final import publish_final, result_folder

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec
    from sm_llm.storage.base import Store
    from sm_llm.worker.context import WorkerContext

RECORD = "model_package.json"
"""What the task publishes: the version's ARN and the request that made it."""
_LEDGER = f"{LEDGERS}register/"
# The longest ``ClientToken`` that SageMaker takes.
_TOKEN_LENGTH = 36


def run(context: WorkerContext, job: JobSpec) -> None:
    """Register ``job.task``; a run does so once. One process works; the others have nothing to do.

    Raises ``RunFailed`` where the model is not in S3 or the service refuses, ``StorageError`` for a run without result.
    """
    task = job.task
    assert isinstance(task, RegisterTask)
    if not begins_alone(context):
        return
    address = result_address(task.model, job.storage_options.model_dump())
    if not is_s3(address):
        raise RunFailed(f"task.model: {address} is not in S3, where SageMaker reads models from")
    request = package(task, address)
    request["ClientToken"] = _token(context.store, request)
    arn = _register(request)
    context.log(f"registered {address} as {arn}")
    folder = result_folder(context)
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps({"arn": arn, "request": request}, indent=2) + "\n", encoding="utf-8")
    meta = {"kind": "model_package", "arn": arn, "spec_digest": context.job.spec_digest}
    publish_final(context, context.store, folder, lambda value: [value], meta)


def package(task: RegisterTask, address: str) -> dict[str, Any]:
    """The request for the model package of the files at ``address``. The slash at its end keeps others out."""
    source = {"S3Uri": f"{address.rstrip('/')}/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    return {
        "ModelPackageGroupName": task.group,
        "InferenceSpecification": {
            "Containers": [{"Image": task.image_uri, "ModelDataSource": {"S3DataSource": source}}],
            "SupportedContentTypes": ["application/json"],
            "SupportedResponseMIMETypes": ["application/json"],
        },
        # A person decides about deployment, not a training job.
        "ModelApprovalStatus": "PendingManualApproval",
    }


def _token(store: Store, request: dict[str, Any]) -> str:
    """What SageMaker knows ``request`` by: an attempt that repeats it gets the version that the first one has made.

    One attempt may be killed after it has registered the model and before it has published that. The run's storage
    keeps the key, not the run's name alone, so that a job which begins the run anew registers a version of its own.
    """
    key = Ledger(store, _LEDGER).once("token", uuid.uuid4().hex)
    return hashlib.sha256(f"{key}{json.dumps(request, sort_keys=True)}".encode()).hexdigest()[:_TOKEN_LENGTH]


def _register(request: dict[str, Any]) -> str:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    group = request["ModelPackageGroupName"]
    try:
        # In a container boto3 finds no region by itself where only SageMaker's variable names it.
        client = boto3.client("sagemaker", region_name=region_of(os.environ))
        try:
            client.describe_model_package_group(ModelPackageGroupName=group)
        except ClientError as error:
            # SageMaker has no error code of its own for an absent group: it is a ValidationException with this text.
            if "does not exist" not in str(error):
                raise
            client.create_model_package_group(ModelPackageGroupName=group)
        return str(client.create_model_package(**request)["ModelPackageArn"])
    except (BotoCoreError, ClientError) as error:
        needed = "sagemaker:CreateModelPackage, CreateModelPackageGroup and DescribeModelPackageGroup"
        raise RunFailed(f"the model was not registered: {error}. The job's role needs {needed}") from error
