"""Named inputs of a job, the storage its run lives in, and how S3 is reached."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.field_classes import FREE

MOUNT = "/opt/ml/input/data"
"""Where SageMaker mounts input channels in a container, by their names."""

FOLDERS = ("output", "checkpoints", "scratch")
"""What arguments of a program name as ``{output}``; ``{inputs.NAME}`` is the folder of an input."""
PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
"""A word in braces in an argument of a program; most are the program's own."""
OF_INPUTS = "inputs."
INPUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What SageMaker takes as the name of a channel, and every backend as that of a folder."""


class S3Input(SpecModel):
    """A prefix in S3; on SageMaker an input channel."""

    uri: str
    """``s3://bucket/prefix``."""
    mode: Annotated[Literal["File", "FastFile", "Pipe"], FREE] = "FastFile"
    """``FastFile`` reads from S3 on demand, ``File`` copies all of it before the start. Pipe is not supported."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """Whether every node gets all objects, or its share of them; that is for programs on SageMaker only."""
    data_type: Literal["S3Prefix", "ManifestFile"] = "S3Prefix"
    """Whether ``uri`` is a prefix, or the manifest of SageMaker that lists objects, which is for SageMaker only."""


class FileSystemInput(SpecModel):
    """A folder of a shared file system that SageMaker mounts; the job needs that file system's network."""

    file_system_id: str = Field(pattern=r"^fs-[0-9a-f]{8,}$")
    """``fs-`` and hexadecimal digits."""
    file_system_type: Literal["FSxLustre", "EFS"] = "FSxLustre"
    """The kind of file system."""
    directory_path: str = Field(pattern=r"^/")
    """The folder; for FSx for Lustre it begins with the mount name: /abcdefgh/data."""
    access_mode: Annotated[Literal["ro", "rw"], FREE] = "ro"
    """Read only, or read and write."""

    @property
    def uri(self) -> str:
        """``fsx://fs-…/path`` or ``efs://fs-…/path``: what a record shows of it."""
        scheme = "efs" if self.file_system_type == "EFS" else "fsx"
        return f"{scheme}://{self.file_system_id}{self.directory_path}"


Input = str | S3Input | FileSystemInput
"""A folder or URI, or what the platform mounts."""


def input_location(value: Input) -> str:
    """The URI of an input."""
    return value if isinstance(value, str) else value.uri


def input_variable(name: str) -> str:
    """The variable in which a program finds the folder of an input."""
    return f"SM_LLM_INPUT_{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}"


def is_folder_name(name: str) -> bool:
    """Whether a word in braces is meant as one of ours, known or not."""
    return name in FOLDERS or name.startswith(OF_INPUTS)


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
