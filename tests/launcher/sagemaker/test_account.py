"""Errors of AWS are reported with what to do about them."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, UnauthorizedSSOTokenError

from sm_llm.errors import SubmitError
from sm_llm.launcher.aws_account import aws_errors


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
