"""A user's own defaults, from ``~/.config/sm_llm/config.yaml`` and ``SM_LLM_*`` variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import Field

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.backends.base import VpcSpec
from sm_llm.spec.backends.table import options_class
from sm_llm.spec.base import SpecModel
from sm_llm.spec.inputs import StorageOptions
from sm_llm.spec.loading.user_file import user_config_file
from sm_llm.spec.loading.yaml_text import from_typed, from_yaml, read_text
from sm_llm.spec.tree import Path, Tree
from sm_llm.spec.validation.fields import validate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path as FilePath


class UserDefaults(SpecModel):
    """What a user sets once for all jobs. What names storage serves every backend, the rest those that run on AWS."""

    role: str | None = None
    """IAM role that managed jobs assume."""
    region: str | None = None
    """AWS region."""
    bucket: str | None = None
    """S3 bucket for code bundles and job files."""
    storage: str | None = None
    """Folder or URI under which runs get their folders."""
    storage_options: StorageOptions = Field(default_factory=StorageOptions)
    """How S3 is reached."""
    vpc: VpcSpec = Field(default_factory=VpcSpec)
    """Network of managed jobs."""
    record_git_diff: bool = True
    """Whether a run's record holds the uncommitted changes of the git checkout it is launched from."""


# Environment variable -> default; subnets and security groups are lists separated by commas.
_VARIABLES: dict[str, Path] = {
    "SM_LLM_ROLE": ("role",),
    "SM_LLM_REGION": ("region",),
    "SM_LLM_BUCKET": ("bucket",),
    "SM_LLM_STORAGE": ("storage",),
    "SM_LLM_ENDPOINT_URL": ("storage_options", "endpoint_url"),
    "SM_LLM_SHARED_WITH_GROUP": ("storage_options", "shared_with_group"),
    "SM_LLM_SUBNETS": ("vpc", "subnets"),
    "SM_LLM_SECURITY_GROUP_IDS": ("vpc", "security_group_ids"),
    "SM_LLM_RECORD_GIT_DIFF": ("record_git_diff",),
}


@dataclass(frozen=True)
class Defaults:
    """The user's defaults and, by dotted path, where each was written."""

    values: UserDefaults = field(default_factory=UserDefaults)
    origins: dict[str, str] = field(default_factory=dict)


def read_defaults(environ: Mapping[str, str], config_file: FilePath | None = None) -> Defaults:
    """Defaults from the user's configuration file, with ``SM_LLM_*`` variables over it.

    Raises ``SpecError`` for unknown keys and wrong values, all at once; a file that is not there is fine.
    """
    file = config_file or user_config_file(environ)
    tree = _read_file(file)
    for variable, path in _VARIABLES.items():
        # An empty variable counts as one that is not set.
        if text := environ.get(variable):
            tree.put(path, _from_variable(path, text, f"environment {variable}"), UserDefaults)
    values, issues = validate(UserDefaults, tree)
    if values is None or issues:
        raise SpecError(issues)
    return Defaults(values, {".".join(path): origin for path, origin in tree.origins.items() if path})


def _from_variable(path: Path, text: str, origin: str) -> Tree:
    if path[-1] in ("record_git_diff", "shared_with_group"):
        return from_typed(text, origin)
    return Tree([part.strip() for part in text.split(",") if part.strip()] if path[0] == "vpc" else text, {(): origin})


def with_account(tree: Tree, defaults: Defaults) -> None:
    """Write role, region, bucket and network into a backend that has such options and leaves them out, with their
    origins."""
    backend = tree.value.get("backend")
    options = options_class(backend)
    if options is None or not options.account_fields:
        return
    # The network is a block: its fields are filled in one by one below.
    account = defaults.values.model_dump(include={*options.account_fields} - {"vpc"}, exclude_none=True)
    for name, value in account.items():
        if name not in backend:
            backend[name] = value
            tree.origins["backend", name] = defaults.origins[name]
    network = defaults.values.vpc if "vpc" in options.account_fields else VpcSpec()
    for name, value in network.model_dump(exclude_defaults=True).items():
        own = backend.setdefault("vpc", {})
        # The tree is not checked yet: what is not a mapping is left to the validation.
        if isinstance(own, dict) and name not in own:
            own[name] = value
            tree.origins["backend", "vpc", name] = defaults.origins[f"vpc.{name}"]


def _read_file(file: FilePath) -> Tree:
    label = f"user config {file}"
    try:
        tree = from_yaml(read_text(file), label)
    except FileNotFoundError:
        return Tree()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            [Issue("user-configuration-unreadable", str(file), f"the user configuration cannot be read: {error}")]
        ) from None
    if not isinstance(tree.value, dict):
        raise SpecError(
            [
                Issue(
                    "user-configuration-not-a-mapping",
                    str(file),
                    "a configuration is a mapping of keys to values",
                    tree.value,
                )
            ]
        )
    return tree
