"""The session of the SageMaker SDK beside the job that it starts: region, and variables that only a pipeline fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.request.request_addresses import DEFAULT_BUCKET
from sm_llm.launcher.backends.sagemaker.request.settings import session_defaults
from sm_llm.launcher.backends.sagemaker.sdk.sdk_overrides import is_variable, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager


def defaults_of(session: Any, given: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """Inside, a plan reads the SDK's defaults as a session that was given has them; without one it reads the files.

    ``given`` are the arguments of an estimator that are no fields: a role among them is a pipeline variable.
    """
    # An empty configuration stays empty, because None stands for the files.
    config = None if session is None else getattr(session, "sagemaker_config", None) or {}
    return session_defaults(config, has_role="role" in (given or {}))


def is_pipeline(session: Any) -> bool:
    """Whether a session defines steps of a pipeline instead of starting jobs."""
    from sagemaker.workflow.pipeline_context import PipelineSession

    return isinstance(session, PipelineSession)


def session_issues(session: Any) -> Iterator[Issue]:
    """What is not a session, or one that would start containers on this machine."""
    if session is None:
        return
    # After that: the SDK takes seconds to import.
    from sagemaker.local.local_session import LocalSession
    from sagemaker.session import Session

    if not isinstance(session, Session):
        remedy = "Give a sagemaker.Session or PipelineSession, or leave it out"
        yield Issue(
            "session-invalid", "sagemaker_session", "is not a session of the SDK", type(session).__name__, remedy
        )
    elif isinstance(session, LocalSession):
        problem = "is the local mode of the SDK, which is not supported"
        remedy = (
            "Emulate the training job here: sm_llm.launch(spec, 'backend.name=local', 'backend.contract=sagemaker')"
        )
        yield Issue("session-of-local-mode", "sagemaker_session", problem, type(session).__name__, remedy)


def region_issues(session: Any, region: str) -> Iterator[Issue]:
    """A session that would send the request of a job in ``region`` to another region, or store files in one."""
    # A session may have been given a client of another region than its own.
    client = getattr(getattr(session, "sagemaker_client", None), "meta", None)
    for path, found in (
        ("sagemaker_session", getattr(session, "boto_region_name", None)),
        ("sagemaker_session.sagemaker_client", getattr(client, "region_name", None)),
    ):
        if found not in (None, region):
            problem = f"sends requests to {found}, and the job is of {region} (backend.region): image, keys and network"
            yield Issue(
                "session-region-mismatch",
                path,
                problem,
                found,
                f"Give a session of {region}, or set backend.region={found}",
            )
            return
    # Not by default_bucket(), which makes the bucket if it does not exist.
    bucket = getattr(session, "_default_bucket", None) or getattr(session, "_default_bucket_name_override", None)
    match = DEFAULT_BUCKET.fullmatch(bucket) if isinstance(bucket, str) else None
    if match and match["region"] != region:
        problem = f"is in {match['region']}, and the job is of {region} (backend.region)"
        yield Issue(
            "session-bucket-region-mismatch",
            "sagemaker_session.default_bucket",
            problem,
            bucket,
            f"Give a bucket in {region}",
        )


def was_created(session: Any, name: str, output_path: str) -> bool:
    """Whether SageMaker has training job ``name``, that of ``output_path``; true where it does not answer that."""
    from sm_llm.launcher.aws_account import AwsAccount
    from sm_llm.launcher.backends.sagemaker.account import NoSuchJob, describe

    try:
        found = describe(AwsAccount(session.boto_region_name, {"sagemaker": session.sagemaker_client}), name)
    except NoSuchJob:
        return False
    except Exception:
        return True
    return bool(found.get("OutputDataConfig", {}).get("S3OutputPath", output_path) == output_path)


def variable_issues(session: Any, given: Mapping[str, Any]) -> Iterator[Issue]:
    """Pipeline variables in arguments by name, where ``session`` starts jobs: they have no value there."""
    if is_pipeline(session):
        return
    for name, value in given.items():
        if isinstance(value, dict):
            yield from variable_issues(session, {f"{name}.{key}": item for key, item in value.items()})
        elif is_variable(value):
            remedy = "Give a value, or a PipelineSession as sagemaker_session"
            yield Issue(
                "variable-outside-pipeline",
                name,
                "is a pipeline variable, which has no value outside a pipeline",
                shown(value),
                remedy,
            )
