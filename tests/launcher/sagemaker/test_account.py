"""Errors of AWS are reported with what to do about them."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, NoCredentialsError, UnauthorizedSSOTokenError
from moto import mock_aws

from sm_llm.errors import SubmitError
from sm_llm.launcher.aws_account import aws_errors
from sm_llm.launcher.planner import check_from_here
from sm_llm.launcher.planner import plan as make_plan

SPEC: dict[str, Any] = {
    "name": "x",
    "task": {"kind": "script", "entry": "-m json.tool"},
    "compute": {"instance_type": "ml.m5.xlarge"},
    "storage": "s3://bucket/runs",
    "backend": {"name": "sagemaker", "region": "us-east-1", "max_run_seconds": 3600},
}


@pytest.mark.parametrize(
    ("error", "remedy"), [(NoCredentialsError(), "Set AWS_PROFILE"), (UnauthorizedSSOTokenError(), "aws sso login")]
)
def test_credentials_that_are_not_there_come_with_a_remedy(error: Exception, remedy: str) -> None:
    with pytest.raises(SubmitError, match=remedy) as caught, aws_errors("cannot look"):
        raise error
    assert str(caught.value).startswith("cannot look: ")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("UnrecognizedClientException", "AWS does not know these credentials"),
        ("ResourceLimitExceeded", "quota"),
        ("SomethingNew", "SomethingNew: said"),
    ],
)
def test_what_the_service_refuses_keeps_its_own_words(code: str, words: str) -> None:
    refused = ClientError({"Error": {"Code": code, "Message": "said"}}, "CreateTrainingJob")
    with pytest.raises(SubmitError, match=words) as caught, aws_errors("cannot look"):
        raise refused
    assert "said" in str(caught.value)


@pytest.mark.parametrize(("account", "notes"), [("123456789012", 0), ("999999999999", 1)])
def test_a_role_of_another_account_than_the_callers_is_warned_of(
    account: str, notes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        boto3.client("s3", "us-east-1").create_bucket(Bucket="bucket")
        (plan,) = make_plan(SPEC, f"backend.role=arn:aws:iam::{account}:role/x")
        check_from_here([plan, plan])
    text = " ".join(capsys.readouterr().err.split())
    assert text.count(f"is of account {account}, and the credentials here are of 123456789012") == notes
