"""Defaults of the SageMaker SDK that administrators set for everybody, and where each was written.

The SDK reads an administrator's and then a user's file and fills in what a call leaves out. Jobs that are started
without the SDK get the same values from here.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError
from sm_llm.spec.loading.yaml_text import from_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_ADMIN, _USER = "SAGEMAKER_ADMIN_CONFIG_OVERRIDE", "SAGEMAKER_USER_CONFIG_OVERRIDE"
_FILE = "config.yaml"
_SESSION_CONFIG = "sagemaker_session.sagemaker_config"
_SESSION: ContextVar[Mapping[str, Any] | None] = ContextVar("session_defaults", default=None)


@dataclass(frozen=True)
class SdkDefaults:
    """Values for training jobs by their path below ``SageMaker.TrainingJob`` (``VpcConfig.Subnets``), and origins."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The value at ``path``, or None."""
        return self.values.get(path)


@contextmanager
def session_defaults(config: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, the configuration of an SDK session stands in for the files; None leaves those.

    The SDK fills in what a call leaves out from the session's configuration alone, which may come from anywhere.
    """
    token = _SESSION.set(config)
    try:
        yield
    finally:
        _SESSION.reset(token)


def read_sdk_defaults(environ: Mapping[str, str] = os.environ) -> SdkDefaults:
    """Merge the administrator's file and the user's, which wins; or read what ``session_defaults`` was given.

    Raises ``PlanError`` for a file that was named but cannot be read, and for values of another shape than the SDK
    wants; the usual places may be empty.
    """
    config = _SESSION.get()
    if config is None:
        return _of_files(environ)
    own = _merged([(_SESSION_CONFIG, config.get("SageMaker") or {})], _SESSION_CONFIG)
    try:
        files = _of_files(environ)
    except PlanError:  # the session has not read them
        return own
    return files if files.values == own.values else own


def _of_files(environ: Mapping[str, str]) -> SdkDefaults:
    texts = ((place, _read(place, is_named)) for place, is_named in _places(environ))
    trees = ((place, from_yaml(text, place).get(("SageMaker",))) for place, text in texts if text is not None)
    return _merged(
        ((place, block if isinstance(block, dict) else {}) for place, block in trees), "SageMaker SDK defaults"
    )


def _merged(blocks: Iterable[tuple[str, Mapping[str, Any]]], what: str) -> SdkDefaults:
    """Values of the blocks ``SageMaker`` of configurations, by where each was found; later ones win."""
    found = SdkDefaults()
    issues: list[Issue] = []
    for place, block in blocks:
        job = block.get("TrainingJob")
        for path, value in _leaves(job if isinstance(job, dict) else {}):
            if value is None:
                continue  # a key whose value is commented out
            if issue := _shape_issue(path, value, place):
                issues.append(issue)
                continue
            found.values[path] = value
            found.origins[path] = what if what == place else f"{what} {place}"
    if issues:
        raise PlanError(issues)
    return found


def _shape_issue(path: str, value: Any, place: str) -> Issue | None:
    """What is wrong with a value that we read, so that it is not taken for something else."""
    shape, fits = _SHAPES.get(path, ("", lambda _: True))
    if fits(value):
        return None
    return Issue(
        "sdk-default-invalid", f"SageMaker.TrainingJob.{path}", f"must be {shape}", value, "Correct it there", place
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(it, str) for it in value)


def _is_tags(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(it, dict) and {"Key", "Value"} <= set(it) for it in value)


_TEXT = ("text", lambda value: isinstance(value, str))
_TEXTS = ("a list of texts", _is_texts)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
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
"""What the SDK's schema wants of the values that are read here, in words and as a test."""


def _places(environ: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """The SDK's places: those of ``platformdirs``."""
    home = environ.get("HOME") or str(Path.home())
    if sys.platform == "darwin":
        site = "/Library/Application Support"
        personal = f"{home}{site}"
    else:
        site = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)[0]
        personal = environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    for variable, folder in ((_ADMIN, site), (_USER, personal)):
        named = environ.get(variable)
        yield named or f"{folder}/sagemaker/{_FILE}", named is not None


def _read(place: str, is_named: bool) -> str | None:
    if place.startswith("s3://"):
        return _read_s3(place)
    file = Path(place) / _FILE if Path(place).is_dir() else Path(place)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not is_named and isinstance(error, FileNotFoundError | NotADirectoryError):
            return None
        raise PlanError(
            [Issue("sdk-defaults-unreadable", place, f"SageMaker SDK defaults cannot be read: {error}")]
        ) from None


def _read_s3(place: str) -> str:
    from sm_llm.storage.uri import open_store

    folder, _, name = place.rpartition("/")
    if not name.endswith((".yaml", ".yml")):
        folder, name = place.rstrip("/"), _FILE
    body = open_store(folder).get(name)
    if body is None:
        raise PlanError([Issue("sdk-defaults-not-found", place, "SageMaker SDK defaults are not there")])
    return body.decode("utf-8")


def _leaves(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted path; lists, tags and variables stay whole."""
    for key, value in block.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in ("Environment", "Tags"):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
