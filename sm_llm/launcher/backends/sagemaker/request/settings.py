"""The account side of a job: role, region, network, keys, tags and variables, each with where it comes from."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.aws import need_aws
from sm_llm.errors import Issue, PlanError
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.environment.variables import reserved_issues
from sm_llm.spec.loading.yaml_text import from_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from sm_llm.spec.job import JobSpec


# The SDK's own variables for the files that stand in for its two default ones.
_ADMIN, _USER = "SAGEMAKER_ADMIN_CONFIG_OVERRIDE", "SAGEMAKER_USER_CONFIG_OVERRIDE"
_FILE = "config.yaml"
_SESSION_CONFIG = "sagemaker_session.sagemaker_config"
_SESSION: ContextVar[Mapping[str, Any] | None] = ContextVar("session_defaults", default=None)
_HAS_ROLE: ContextVar[bool] = ContextVar("has_role", default=False)


@dataclass(frozen=True)
class SdkDefaults:
    """Values for training jobs by their path below ``SageMaker.TrainingJob`` (``VpcConfig.Subnets``), and origins."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The value at ``path``, or None."""
        return self.values.get(path)


@contextmanager
def session_defaults(config: Mapping[str, Any] | None, *, has_role: bool = False) -> Iterator[None]:
    """Inside, the configuration of an SDK session stands in for the files; None leaves those.

    The SDK fills in what a call leaves out from the session's configuration alone, which may come from anywhere.
    With ``has_role`` a job needs no role of its specification: it gets one that a pipeline alone knows.
    """
    # Context variables: two sessions may be used by two threads of one process.
    token, role = _SESSION.set(config), _HAS_ROLE.set(has_role)
    try:
        yield
    finally:
        _SESSION.reset(token)
        _HAS_ROLE.reset(role)


def read_sdk_defaults(environ: Mapping[str, str] = os.environ) -> SdkDefaults:
    """Merge the administrator's file and the user's, which wins; or read what ``session_defaults`` was given.

    Raises ``PlanError`` for a file that was named but cannot be read, and for values of another shape than the SDK
    wants; the usual places may be empty.
    """
    config = _SESSION.get()
    if config is None:
        return _of_files(environ)
    # Only the block SageMaker: the rest of a configuration is not about training jobs.
    own = _merged([(_SESSION_CONFIG, config.get("SageMaker") or {})], _SESSION_CONFIG)
    try:
        files = _of_files(environ)
    except PlanError:  # the session has not read them
        return own
    # Where the files give the same values they are named as the origin, which the user can edit.
    return files if files.values == own.values else own


def _of_files(environ: Mapping[str, str]) -> SdkDefaults:
    texts = ((location, _read(location, is_named)) for location, is_named in _locations(environ))
    trees = ((location, from_yaml(text, location).get(("SageMaker",))) for location, text in texts if text is not None)
    return _merged(
        ((location, block if isinstance(block, dict) else {}) for location, block in trees), "SageMaker SDK defaults"
    )


def _merged(blocks: Iterable[tuple[str, Mapping[str, Any]]], what: str) -> SdkDefaults:
    """Values of the blocks ``SageMaker`` of configurations, by where each was found; later ones win."""
    found = SdkDefaults()
    issues: list[Issue] = []
    for location, block in blocks:
        job = block.get("TrainingJob")
        for path, value in _leaves(job if isinstance(job, dict) else {}):
            if value is None:
                continue  # a key whose value is commented out
            if issue := _shape_issue(path, value, location):
                issues.append(issue)
                continue
            found.values[path] = value
            found.origins[path] = what if what == location else f"{what} {location}"
    if issues:
        raise PlanError(issues)
    return found


def _shape_issue(path: str, value: Any, location: str) -> Issue | None:
    """What is wrong with a value that we read, so that it is not taken for something else."""
    shape, fits = _SHAPES.get(path, ("", lambda _: True))
    if fits(value):
        return None
    return Issue(
        "sdk-default-invalid", f"SageMaker.TrainingJob.{path}", f"must be {shape}", value, "Correct it there", location
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(it, str) for it in value)


def _is_tags(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(it, dict) and {"Key", "Value"} <= set(it) for it in value)


_TEXT = ("text", lambda value: isinstance(value, str))
_TEXTS = ("a list of texts", _is_texts)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
# What the SDK's schema wants of the values that are read here, in words and as a test.
_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "RoleArn": _TEXT,
    "VpcConfig.Subnets": _TEXTS,
    "VpcConfig.SecurityGroupIds": _TEXTS,
    "OutputDataConfig.KmsKeyId": _TEXT,
    "ResourceConfig.VolumeKmsKeyId": _TEXT,
    "EnableInterContainerTrafficEncryption": _FLAG,
    "EnableNetworkIsolation": _FLAG,
    "Environment": ("a mapping", lambda value: isinstance(value, dict)),
    "Tags": ("a list of mappings with Key and Value", _is_tags),
}


def _locations(environ: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """The SDK's places: those of ``platformdirs``."""
    user_folder = environ.get("HOME") or str(Path.home())
    if sys.platform == "darwin":
        site = "/Library/Application Support"
        personal = f"{user_folder}{site}"
    else:
        # Of several folders of the site platformdirs takes the first.
        site = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)[0]
        personal = environ.get("XDG_CONFIG_HOME") or f"{user_folder}/.config"
    for variable, folder in ((_ADMIN, site), (_USER, personal)):
        named = environ.get(variable)
        yield named or f"{folder}/sagemaker/{_FILE}", named is not None


def _read(location: str, is_named: bool) -> str | None:
    # The SDK takes an address in S3 for either file, too.
    if location.startswith("s3://"):
        return _read_s3(location)
    file = Path(location) / _FILE if Path(location).is_dir() else Path(location)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        # Only the default files may be missing. One that a variable names was meant to be read.
        if not is_named and isinstance(error, FileNotFoundError | NotADirectoryError):
            return None
        raise PlanError(
            [Issue("sdk-defaults-unreadable", location, f"SageMaker SDK defaults cannot be read: {error}")]
        ) from None


def _read_s3(location: str) -> str:
    from sm_llm.storage.uri import open_store

    folder, _, name = location.rpartition("/")
    # An address that does not name a YAML file is a folder with config.yaml, as the SDK infers.
    if not name.endswith((".yaml", ".yml")):
        folder, name = location.rstrip("/"), _FILE
    body = open_store(folder).get(name)
    if body is None:
        raise PlanError([Issue("sdk-defaults-not-found", location, "SageMaker SDK defaults are not there")])
    return body.decode("utf-8")


def _leaves(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted path; lists, tags and variables stay whole."""
    for key, value in block.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in ("Environment", "Tags"):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


# Our setting -> where the SDK's defaults keep it.
_BORROWED = {
    "role": "RoleArn",
    "subnets": "VpcConfig.Subnets",
    "security_group_ids": "VpcConfig.SecurityGroupIds",
    "encrypt_inter_container_traffic": "EnableInterContainerTrafficEncryption",
    "output_kms_key_id": "OutputDataConfig.KmsKeyId",
    "volume_kms_key_id": "ResourceConfig.VolumeKmsKeyId",
}


@dataclass(frozen=True)
class JobSettings:
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


def settings(job: JobSpec, environ: Mapping[str, str] = os.environ) -> JobSettings:
    """The settings of a job. Raises ``PlanError`` if the SDK's defaults cannot be read."""
    options = SageMakerOptions.of(job)
    defaults = read_sdk_defaults(environ)
    own: dict[str, Any] = {
        "role": options.role,
        # An empty list and false are what nobody wrote, and leave the setting to the SDK's defaults.
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
        # Every other setting has a default in the class.
        if value is not None or name == "role":
            values[name] = value
    tags = _borrowed_tags(defaults)
    environment = {str(key): str(value) for key, value in (defaults.get("Environment") or {}).items()}
    origins |= {f"tags.{key}": defaults.origins["Tags"] for key in tags if key not in options.tags}
    origins |= {f"environment.{key}": defaults.origins["Environment"] for key in environment}
    isolation = bool(defaults.get("EnableNetworkIsolation"))
    if isolation:
        origins["network_isolation"] = defaults.origins["EnableNetworkIsolation"]
    return JobSettings(
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


def setting_issues(found: JobSettings) -> list[Issue]:
    """What is missing, or cannot be."""
    issues = []
    if not found.role and not _HAS_ROLE.get():
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
