"""From a recipe name, a file, a mapping or an object to one checked specification that knows its origins."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path as FilePath
from typing import Any

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.backends.table import options_class
from sm_llm.spec.environment.variables import conceal
from sm_llm.spec.job import JobSpec, WorkflowSpec, spec_digest
from sm_llm.spec.loading.defaults import Defaults, read_defaults, with_account
from sm_llm.spec.loading.overrides import Override, given_twice, inside_a_list, parse_fields, parse_overrides, resolved
from sm_llm.spec.loading.yaml_text import from_yaml, read_text
from sm_llm.spec.references import is_reference
from sm_llm.spec.tree import Path, Tree, from_python
from sm_llm.spec.validation.check import check
from sm_llm.spec.validation.fields import did_you_mean, validate
from sm_llm.spec.validation.runner import at_new_paths, in_other_blocks

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

SpecSource = str | FilePath | Mapping[str, Any] | JobSpec | WorkflowSpec
"""What a specification can be loaded from: a recipe's name, a YAML file, a mapping or an object."""


@dataclass(frozen=True)
class Loaded:
    """A checked specification, where each of its values came from, and its digest."""

    spec: JobSpec | WorkflowSpec
    origins: dict[str, str]
    """Dotted path -> ``job.yaml:12``, ``recipe tiny-local``, ``override``, ...; a path that is missing is a default."""
    digest: str
    defaults: Defaults = field(default_factory=Defaults)
    """The user's own defaults, of which those of storage have been applied."""


class InvalidSpec(SpecError):
    """A specification whose classes parse, but whose fields do not fit together: more checks can read ``loaded``."""

    def __init__(self, issues: Sequence[Issue], loaded: Loaded) -> None:
        super().__init__(issues)
        self.loaded = loaded


def load(
    source: SpecSource,
    overrides: Sequence[Override] = (),
    fields: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    config_file: FilePath | None = None,
) -> Loaded:
    """Merge, validate and check a specification. A mapping with ``steps`` is a workflow.

    Later ones win: built-in defaults, the user's configuration file, ``SM_LLM_*`` variables, ``source``,
    ``overrides`` (``key.path=value``), ``fields`` (dotted path or nested mapping -> Python value). Relative folders
    stay as they are written: they are those of the working directory, wherever the file lies.

    Raises:
        SpecError: every issue found, each with its dotted path and where the value was written; ``InvalidSpec`` where
            a plan could still look for more.
    """
    defaults = read_defaults(environ, config_file)
    tree = _with_defaults(read_source(source), defaults)
    return _merged(tree, overrides, fields or {}, defaults, environ)


def changed(spec: JobSpec, overrides: Sequence[Override]) -> Loaded:
    """A whole specification with ``overrides`` merged in and checked; nothing of this machine's defaults is read.

    Raises ``SpecError``.
    """
    return _merged(from_python(spec, "job.json"), overrides, {}, Defaults())


def _merged(
    tree: Tree,
    overrides: Sequence[Override],
    fields: Mapping[str, Any],
    defaults: Defaults,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """``environ`` is this machine's, where what a job leaves out may follow from it."""
    kind: type[JobSpec] | type[WorkflowSpec] = WorkflowSpec if "steps" in tree.value else JobSpec
    typed, issues = parse_overrides(overrides)
    given, field_issues = parse_fields(fields)
    changes: list[tuple[Path, Tree]] = []
    for written, value in [*typed, *given]:
        path, issue = resolved(kind, written, tree.value)
        if issue is None:
            changes.append((path, value))
        else:
            issues.append(replace(issue, origin=value.origin(())))
    issues += given_twice(changes)
    issues += _apply(tree, changes, kind)
    # After the changes, which may choose the backend that takes these defaults.
    with_account(tree, defaults)
    # ``changed`` gives no environment: a job that was launched before must not follow from this machine.
    if environ is not None:
        options = options_class(tree.value.get("backend") or {})
        if options is not None and options.runs_here:
            from sm_llm.spec.loading.local_gpus import with_local_gpus

            with_local_gpus(tree, environ)
        _with_hub_addresses(tree)
    # Before the validation, whose issues show the values that they refuse.
    concealed = conceal(tree)
    spec, type_issues = validate(kind, tree)
    # A concealed value has lost its type, which is not an issue of its own.
    type_issues = at_new_paths(type_issues, concealed)
    further = _further_issues(spec, tree, [*type_issues, *concealed])
    issues += [*field_issues, *concealed, *type_issues]
    if spec is None or issues:
        raise SpecError([*issues, *further])
    origins = {".".join(path): origin for path, origin in tree.origins.items() if path}
    loaded = Loaded(spec, origins, spec_digest(spec), defaults)
    # Every field has its type, so that a plan can search for further issues before all are reported.
    if further:
        raise InvalidSpec(further, loaded)
    return loaded


def _apply(tree: Tree, changes: Sequence[tuple[Path, Tree]], kind: type[JobSpec] | type[WorkflowSpec]) -> list[Issue]:
    """Put changes into a tree, in order; an issue for each that has no place there.

    A change of ``data.format`` alone takes the place of the source's values of another format, and its origin names
    them; what other changes set stays, and is refused where it does not fit.
    """
    # Classes are chosen first: in whatever order the changes are given, their values meet the new class.
    left_out = {path: tree.retag(path, value.value, kind) for path, value in dict(changes).items()}
    issues = []
    for path, value in changes:
        if (issue := inside_a_list(tree, path)) is not None:
            issues.append(replace(issue, origin=value.origin(())))
        else:
            tree.put(path, value, kind)
    for path, names in left_out.items():
        if names:
            where = tree.origin(path)
            tree.origins[path] = f"{where} (leaves out {', '.join(names)})" if where else where
    return issues


def read_source(source: SpecSource) -> Tree:
    """The tree of a source, unchecked. Raises ``SpecError`` if it is not there or is not a mapping."""
    given: Any = source
    if not isinstance(given, JobSpec | WorkflowSpec | Mapping | str | os.PathLike):
        remedy = "Give the name of a recipe, a YAML file, a mapping, a JobSpec or a WorkflowSpec"
        found = type(given).__name__
        raise SpecError([Issue("specification-of-unknown-type", "specification", "cannot be read", found, remedy)])
    if isinstance(source, JobSpec | WorkflowSpec | Mapping):
        tree = from_python(source, "Python")
    else:
        file, label = _find(source)
        tree = from_yaml(_read(file), label)
    if not isinstance(tree.value, dict):
        raise SpecError(
            [
                Issue(
                    "specification-not-a-mapping",
                    str(source),
                    "a specification is a mapping of keys to values",
                    tree.value,
                )
            ]
        )
    return tree


def _find(source: str | FilePath) -> tuple[FilePath, str]:
    recipes = recipe_files()
    # A recipe comes before a file of the same name; ./NAME is the file.
    if isinstance(source, str) and source in recipes:
        return recipes[source], f"recipe {source}"
    file = FilePath(source).expanduser()
    # A pipe is read as well; an empty name would be the working directory.
    if str(source) and file.exists() and not file.is_dir():
        return file, str(source)
    remedy = did_you_mean(str(source), recipes) or f"Recipes: {', '.join(recipes)}"
    problem = "is a folder" if str(source) and file.is_dir() else "neither a recipe nor a file"
    raise SpecError([Issue("specification-not-found", str(source) or "''", problem, remedy=remedy)])


def _read(file: FilePath) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError([Issue("specification-unreadable", str(file), f"cannot be read: {reason}")]) from None


def _with_defaults(tree: Tree, defaults: Defaults) -> Tree:
    if defaults.values.storage is not None and "storage" not in tree.value:
        tree.value["storage"] = defaults.values.storage
        tree.origins[("storage",)] = defaults.origins["storage"]
    for name, value in defaults.values.storage_options.model_dump(exclude_none=True).items():
        own = tree.value.setdefault("storage_options", {})
        # The tree is not checked yet: what is not a mapping is left to the validation.
        if isinstance(own, dict) and name not in own:
            own[name] = value
            tree.origins["storage_options", name] = defaults.origins[f"storage_options.{name}"]
    return tree


def _further_issues(spec: JobSpec | WorkflowSpec | None, tree: Tree, issues: list[Issue]) -> list[Issue]:
    """Cross-field issues, but none in a block with a field that is wrong itself: they may only follow from it."""
    if spec is None:
        return []
    found = in_other_blocks(check(spec), issues)
    return [replace(issue, origin=tree.origin(_path(issue.path))) for issue in found]


def _with_hub_addresses(tree: Tree) -> None:
    """Write ``org/name`` of a tokenizer or of weights, if no folder here, as the hub's address, like ``model.path``."""
    steps = tree.value.get("steps")
    holders: list[Path] = [("steps", str(name)) for name in steps] if isinstance(steps, Mapping) else [()]
    below: list[Path] = [("task", "tokenizer"), ("task", "start", "pretrained")]
    for path in [(*holder, *it) for holder in holders for it in below]:
        name = tree.get(path)
        if not isinstance(name, str) or is_reference(name):
            continue
        # Where its first part is a folder here, a path was meant: if it is not there, the checks report it.
        if _HUB_ID.fullmatch(name) and not FilePath(name).parent.is_dir():
            tree.replace(path, f"hf://{name}")


def _path(dotted: str) -> Path:
    return tuple(dotted.split("."))


def recipe_files() -> dict[str, FilePath]:
    """Name -> YAML file of every recipe, by name."""
    folder = FilePath(str(files("sm_llm")), "recipes")  # no package: nothing is imported from it
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_summary(path: FilePath) -> str:
    """The first comment line of a recipe: what it does."""
    with path.open(encoding="utf-8") as stream:
        return stream.readline().lstrip("# ").strip()
