"""An AWS account: one session for every call, and what the services' errors mean to a user."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from sm_llm.aws import fresh_session, need_aws
from sm_llm.errors import SubmitError
from sm_llm.storage.s3.s3_client import EXPIRED, code_of, credentials_hint

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONFIG = {"connect_timeout": 10, "read_timeout": 30, "retries": {"mode": "standard", "total_max_attempts": 5}}


_NOT_FOUND = re.compile("not found|could not find|does not exist", re.IGNORECASE)


_UNKNOWN_KEYS = "AWS does not know these credentials. Set AWS_PROFILE or other keys, and check the region"


_MEANINGS = {
    "ResourceLimitExceeded": "the account's quota for this instance type does not allow it. Ask for more in Service "
    "Quotas (SageMaker, '<type> for training job usage'), or use fewer nodes",
    "ResourceInUse": "a training job of this name exists already",
    "AccessDeniedException": "access denied. Needed: sagemaker:CreateTrainingJob and iam:PassRole for the role",
    "ThrottlingException": "the service is throttling; give the command again in a minute",
    "UnrecognizedClientException": _UNKNOWN_KEYS,
    "InvalidClientTokenId": _UNKNOWN_KEYS,
    "InvalidSignatureException": _UNKNOWN_KEYS,
}


class Expired(SubmitError):
    """The caller's credentials have expired; jobs do not mind."""


@dataclass(frozen=True)
class AwsAccount:
    """Clients of one region, made when they are first used."""

    region: str
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _session(self) -> Any:
        need_aws()
        return fresh_session()

    def client(self, service: str) -> Any:
        """The client of a service, e.g. ``sagemaker``, ``logs``, ``iam``."""
        if service not in self._made:
            need_aws()
            from botocore.config import Config

            self._made[service] = self._session.create_client(
                service, region_name=self.region, config=Config(**_CONFIG)
            )
        return self._made[service]


@lru_cache
def account(region: str) -> AwsAccount:
    """The clients of a region, made once: a wait polls every few seconds."""
    return AwsAccount(region)


@contextmanager
def aws_errors(action: str) -> Iterator[None]:
    """Raise an error of AWS as a ``SubmitError``: what was tried, and the remedy. ``Expired`` is for credentials."""
    need_aws()
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except ClientError as error:
        code = code_of(error)
        message = error.response.get("Error", {}).get("Message", "")
        # The services have several codes for expired credentials.
        if code in EXPIRED or "expired" in code.lower():
            account.cache_clear()  # credentials that are refreshed are read anew
            raise Expired(f"{action}: the credentials have expired ({code}). Refresh them") from error
        meaning = _MEANINGS.get(code)
        raise SubmitError(f"{action}: {meaning} ({message})" if meaning else f"{action}: {code}: {message}") from error
    except (BotoCoreError, HTTPClientError) as error:
        raise SubmitError(f"{action}: {error}{credentials_hint(error)}") from error


def is_missing(error: Exception) -> bool:
    """Whether the service reports that what was named does not exist; it has two ways to report that."""
    return code_of(error) in ("ValidationException", "ResourceNotFound") and bool(_NOT_FOUND.search(str(error)))
