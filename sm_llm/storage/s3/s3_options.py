"""How S3 is reached and how objects are written there: endpoint, region, encryption, storage class, owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class S3Options:
    """The same fields as the ``storage_options`` block of a specification; None leaves a thing to AWS's own settings.

    Credentials are never among them: they come from AWS's own chain (variables, profile, role), and are refreshed
    by it.
    """

    endpoint_url: str | None = None
    region: str | None = None
    kms_key_id: str | None = None
    storage_class: str | None = None
    expected_bucket_owner: str | None = None
    shared_with_group: bool | None = None
    """Of folders alone."""

    @classmethod
    def of(cls, options: S3Options | Mapping[str, Any] | None) -> S3Options:
        """Options as they are, or from the ``storage_options`` of a specification as a mapping."""
        return options if isinstance(options, S3Options) else cls(**(options or {}))

    @property
    def owner(self) -> dict[str, str]:
        """Arguments of every call."""
        return {"ExpectedBucketOwner": self.expected_bucket_owner} if self.expected_bucket_owner else {}

    @property
    def writing(self) -> dict[str, str]:
        """Arguments of every call that creates an object."""
        arguments = dict(self.owner)
        if self.kms_key_id:
            arguments |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key_id}
        if self.storage_class:
            arguments["StorageClass"] = self.storage_class
        return arguments
