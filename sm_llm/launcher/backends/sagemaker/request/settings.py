"""The account side of a job: role, region, network, keys, tags and variables, each with where it comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.request.limits import need_aws
from sm_llm.launcher.backends.sagemaker.request.sdk_defaults import SdkDefaults, read_sdk_defaults
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.environment.variables import reserved_issues

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.job import JobSpec

_BORROWED = {
    "role": "RoleArn",
    "subnets": "VpcConfig.Subnets",
    "security_group_ids": "VpcConfig.SecurityGroupIds",
    "encrypt_inter_container_traffic": "EnableInterContainerTrafficEncryption",
    "output_kms_key_id": "OutputDataConfig.KmsKeyId",
    "volume_kms_key_id": "ResourceConfig.VolumeKmsKeyId",
}
"""Our setting -> where the SDK's defaults keep it."""


@dataclass(frozen=True)
class Settings:
    """What a job takes from its specification or else from the SDK's defaults; ``origins`` holds which is which."""

    role: str | None
    region: str | None
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    encrypt_inter_container_traffic: bool = False
    output_kms_key_id: str | None = None
    volume_kms_key_id: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Defaults for variables; those of the job win."""
    network_isolation: bool = False
    origins: dict[str, str] = field(default_factory=dict)


def settings(job: JobSpec, environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of a job. Raises ``PlanError`` if the SDK's defaults cannot be read."""
    options = SageMakerOptions.of(job)
    defaults = read_sdk_defaults(environ)
    own: dict[str, Any] = {
        "role": options.role,
        "subnets": tuple(options.vpc.subnets) or None,
        "security_group_ids": tuple(options.vpc.security_group_ids) or None,
        "encrypt_inter_container_traffic": options.encrypt_inter_container_traffic or None,
        "output_kms_key_id": options.output_kms_key_id,
        "volume_kms_key_id": options.volume_kms_key_id,
    }
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, path in _BORROWED.items():
        value = own[name]
        if value is None and (borrowed := defaults.get(path)) is not None:
            value = tuple(borrowed) if isinstance(borrowed, list) else borrowed
            origins[name] = defaults.origins[path]
        if value is not None or name == "role":
            values[name] = value
    tags = _borrowed_tags(defaults)
    environment = {str(key): str(value) for key, value in (defaults.get("Environment") or {}).items()}
    origins |= {f"tags.{key}": defaults.origins["Tags"] for key in tags if key not in options.tags}
    origins |= {f"environment.{key}": defaults.origins["Environment"] for key in environment}
    isolation = bool(defaults.get("EnableNetworkIsolation"))
    if isolation:
        origins["network_isolation"] = defaults.origins["EnableNetworkIsolation"]
    return Settings(
        region=options.region or region_of(environ), tags={**tags, **options.tags}, environment=environment,
        network_isolation=isolation, origins=origins, **values,
    )  # fmt: skip


def region_of(environ: Mapping[str, str]) -> str | None:
    """The region that AWS's own settings name: a variable, or the profile's."""
    if named := environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"):
        return named
    need_aws()
    import botocore.session

    found: str | None = botocore.session.get_session().get_config_variable("region")
    return found


def setting_issues(found: Settings) -> list[Issue]:
    """What is missing, or cannot be."""
    issues = []
    if found.role is None:
        remedy = "Set backend.role, or once for all jobs: SM_LLM_ROLE, role in the user configuration, or the SDK's"
        issues.append(Issue("role-missing", "backend.role", "no IAM role is given", remedy=remedy))
    if found.region is None:
        issues.append(
            Issue("region-missing", "backend.region", "no AWS region is given", remedy="Set it, or AWS_REGION")
        )
    if bool(found.subnets) != bool(found.security_group_ids):
        given, missing = ("subnets", "security_group_ids") if found.subnets else ("security_group_ids", "subnets")
        problem, remedy = f"is missing; {given} are given", "Give both, or neither"
        issues.append(
            Issue(
                "vpc-incomplete", f"backend.vpc.{missing}", problem, remedy=remedy, origin=found.origins.get(given, "")
            )
        )
    if found.network_isolation:
        problem = "a job without network cannot read or publish anything in S3"
        where = found.origins["network_isolation"]
        issues.append(
            Issue(
                "network-isolation-unsupported",
                "EnableNetworkIsolation",
                problem,
                True,
                "Ask your administrator for an exception",
                where,
            )
        )
    origin = next((text for path, text in found.origins.items() if path.startswith("environment.")), "")
    issues += reserved_issues(found.environment, origin=origin)
    return issues


def _borrowed_tags(defaults: SdkDefaults) -> dict[str, str]:
    return {str(tag["Key"]): str(tag["Value"]) for tag in defaults.get("Tags") or []}
