"""How the storage of a job is reached, where it is in S3."""

from __future__ import annotations

from pydantic import Field

from sm_llm.spec.base import SpecModel


class StorageOptions(SpecModel):
    """Access to S3 and how objects are written there; null leaves a thing to AWS's own settings. Of a folder, who may
    read it.

    Credentials are not part of a specification: they come from AWS's own chain of variables, profiles and roles.
    """

    endpoint_url: str | None = Field(default=None, pattern=r"^https?://[^/]")
    """Address of another endpoint: a VPC endpoint, or a store that speaks S3."""
    region: str | None = None
    """AWS region of the bucket."""
    kms_key_id: str | None = None
    """Id or ARN of the KMS key that encrypts what is written (SSE-KMS)."""
    storage_class: str | None = Field(default=None, pattern=r"^[A-Z_]+$")
    """Storage class of what is written, for example INTELLIGENT_TIERING."""
    expected_bucket_owner: str | None = Field(default=None, pattern=r"^\d{12}$")
    """AWS account id that must own the bucket; a bucket of anyone else is refused."""
    shared_with_group: bool | None = None
    """Whether the group of this user may read folders of runs; null and false keep them to the user. Not for S3."""
