"""Changes to a specification: ``key.path=value`` with a YAML value, and the same paths with Python values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.job import JobSpec, StepSpec
from sm_llm.spec.loading.yaml_text import from_typed, to_typed
from sm_llm.spec.schema import dotted_paths, knows
from sm_llm.spec.tree import DEEPEST, SHOWN_KEY, Path, Tree, from_python, shown_key
from sm_llm.spec.validation.fields import closest, meant, nearest
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.spec.base import SpecModel

OVERRIDE_ORIGIN = "override"
FIELD_ORIGIN = "Python argument"

Override = str | Mapping[str, Any]
"""A change: ``key.path=value`` with a YAML value, or a mapping of dotted or nested keys to Python values."""


class CommandLine(str):
    """An override that was typed in a shell: the origin of its values records that."""

    __slots__ = ()
    origin = "command line"


class Hyperparameter(CommandLine):
    """An override that a job was started with as a hyperparameter."""

    __slots__ = ()
    origin = "hyperparameter"


class TypedFields(dict[str, Any]):
    """A mapping as override whose values were typed in a shell, as options of a verb."""

    origin = CommandLine.origin


def parse_overrides(overrides: Sequence[Any]) -> tuple[list[tuple[Path, Tree]], list[Issue]]:
    """Paths and values of overrides, in order, and an issue for each that is not one."""
    parsed, issues = [], []
    for text in overrides:
        if isinstance(text, Mapping):
            fields, wrong = parse_fields(text, text.origin if isinstance(text, TypedFields) else FIELD_ORIGIN)
            parsed += fields
            issues += wrong
            continue
        if not isinstance(text, str):
            remedy = "Write 'task.max_steps=100' or {'task.max_steps': 100}"
            problem = f"an override is text or a mapping, not of type {type(text).__name__}"
            issues.append(Issue("override-type-invalid", repr(text), problem, remedy=remedy))
            continue
        # The first equals sign: a value may hold others, as S3 keys and arguments do.
        key, equals, value = text.partition("=")
        path = _path(key)
        # Refused before it reaches a tree, where each part of the path becomes a level.
        if equals and path and len(path) > DEEPEST:
            remedy = "Write the path of a field, for example task.max_steps=100"
            issues.append(
                Issue("override-too-deep", f"{key[:SHOWN_KEY]}…", f"names more than {DEEPEST} levels", remedy=remedy)
            )
            continue
        # A word with hyphens in front is an option of the program that was misspelt.
        if not (equals and path and not key.startswith("-")):
            issues.append(
                Issue(
                    "override-malformed",
                    key or text or "override",
                    "an override is written key.path=value",
                    text,
                    _example(text),
                )
            )
            continue
        try:
            origin = text.origin if isinstance(text, CommandLine) else OVERRIDE_ORIGIN
            parsed.append((path, from_typed(value, origin)))
        except SpecError as error:
            issues += [replace(issue, path=key) for issue in error.issues]
    return parsed, issues


def parse_fields(fields: Mapping[str, Any], origin: str = FIELD_ORIGIN) -> tuple[list[tuple[Path, Tree]], list[Issue]]:
    """Paths and values of Python fields: ``{"task.max_steps": 10}`` or ``{"task": {"max_steps": 10}}``."""
    parsed, issues = [], []
    for key, value in fields.items():
        if (path := _path(key) if isinstance(key, str) else None) and len(path) > DEEPEST:
            issues.append(Issue("field-too-deep", f"{key[:SHOWN_KEY]}…", f"names more than {DEEPEST} levels"))
        elif path:
            try:
                parsed.append((path, from_python(value, origin)))
            except SpecError as error:
                issues += [replace(issue, path=f"{key}.{issue.path}".rstrip(".")) for issue in error.issues]
        else:
            shown = key if isinstance(key, str) else shown_key(key)
            issues.append(
                Issue("field-name-invalid", shown, "a field is named by a dotted path such as task.max_steps")
            )
    return parsed, issues


def is_override(text: str) -> bool:
    """Whether a word among others changes a job: ``key.path=value``, where the key is a job's."""
    key, equals, _ = text.partition("=")
    return bool(equals) and key.partition(".")[0] in JobSpec.model_fields


def texts(overrides: Sequence[Override], fields: Mapping[str, Any]) -> list[str]:
    """Changes as a record lists them, and as they can be typed again."""
    given = [*(it for it in overrides if isinstance(it, Mapping)), fields]
    typed = (f"{key}={to_typed(value)}" for it in given for key, value in it.items())
    return [*(str(it) for it in overrides if isinstance(it, str)), *typed]


def without_step(overrides: Sequence[Override], step: str) -> list[Override]:
    """Changes to a job that was a step of a workflow: ``steps.<step>.task.x=1`` is its own ``task.x=1``."""
    prefix = f"steps.{step}."

    def own(override: Override) -> Override:
        if isinstance(override, str):
            # Keeps ``CommandLine``, and with it the origin of the value.
            return type(override)(override.removeprefix(prefix))
        return {key.removeprefix(prefix): value for key, value in override.items()}

    return [own(it) for it in overrides]


def resolved(kind: type[SpecModel], path: Path, whole: Mapping[str, Any]) -> tuple[Path, Issue | None]:
    """The whole path of a change to ``whole``, a job or workflow that is unchecked, and an issue if it has none.

    In a workflow ``task.x`` is that of the only step whose task has an x. Where several steps have it, or none, the
    path stays and the issue names what to write.
    """
    steps = whole.get("steps")
    if path[0] == "steps" and isinstance(steps, Mapping) and len(path) > 2 and path[1] not in steps:
        # It would begin a step that has this one field, and the message would be about all that it lacks.
        names = [str(name) for name in steps]
        close = [f"steps.{it}" for it in closest(path[1], names)]
        remedy = f"Did you mean {close[0]}?" if close else f"Steps: {', '.join(names)}"
        return path, Issue("override-step-unknown", ".".join(path), "there is no such step", path[1], remedy)
    if path[0] in kind.model_fields:
        return path, None
    key = ".".join(path)
    # Suggested only where the rest of the path names a field of the job.
    if kind is JobSpec and path[0] == "steps" and knows(JobSpec, whole, path[2:]) and len(path) > 2:
        return path, Issue(
            "override-of-steps-in-a-job",
            key,
            "this is a single job, which has no steps",
            remedy=f"Write {'.'.join(path[2:])}",
        )
    if path[0] not in StepSpec.model_fields or not isinstance(steps, Mapping):
        return path, Issue("override-key-unknown", key, "unknown key", remedy=nearest(kind, Tree(whole), path))
    having = _having(steps, path)
    if len(having) == 1:
        return ("steps", having[0], *path), None
    if having:
        remedy = f"Write {' or '.join(f'steps.{name}.{key}' for name in having)}"
        return path, Issue("override-ambiguous", key, f"several steps have it: {', '.join(having)}", remedy=remedy)
    remedy = _nearest_in_steps(steps, path)
    return path, Issue("override-key-in-no-step", key, "unknown key: no step has it", remedy=remedy)


def _having(steps: Mapping[str, Any], path: Path) -> list[str]:
    """The steps that have the field ``path``."""
    return [str(name) for name, step in steps.items() if knows(StepSpec, step, path)]


def _nearest_in_steps(steps: Mapping[str, Any], path: Path) -> str:
    """``nearest`` for a path without its step; where several steps have what it names, their own paths."""
    holders = _having(steps, path[:-1]) or list(steps)
    found = [it for name in holders for it in meant(StepSpec, Tree(dict(steps[name])), path)]
    whole = [".".join(it) for it in dict.fromkeys(found)]
    if not whole:
        known = sorted({".".join(it) for step in steps.values() for it in dotted_paths(StepSpec, step)})
        whole = closest(".".join(path), known)
    typed = []
    for text in whole:
        having = _having(steps, tuple(text.split(".")))
        typed += [text] if len(having) == 1 else [f"steps.{name}.{text}" for name in having]
    return f"Did you mean {' or '.join(typed[:3])}?" if typed else ""


def _path(key: str) -> Path | None:
    parts = tuple(key.strip().split("."))
    return parts if all(parts) else None


def given_twice(changes: Sequence[tuple[Path, Tree]]) -> list[Issue]:
    """Values that one source, the command line or a mapping in Python, gives twice and differently: only the last of
    them would count.

    Texts in Python may be laid over one another: a script adds its own behind those that it was given.
    """
    seen: dict[tuple[str, Path], Any] = {}
    above: dict[tuple[str, Path], Path] = {}
    issues: dict[Path, Issue] = {}
    for path, tree in changes:
        origin = tree.origin(())
        for leaf, value in () if origin == OVERRIDE_ORIGIN else _leaves(path, tree.value):
            ends = (leaf[:end] for end in range(1, len(leaf) + 1))
            at = next((it for it in ends if (origin, it) in seen), above.get((origin, leaf)))
            # An empty block asks for its defaults, over which values below it may be given.
            if at is not None and seen[origin, at] != value and not (at != leaf and seen[origin, at] == {}):
                beside = "" if at == leaf else f", once as {'.'.join(at)}"
                problem = f"is given twice, with different values{beside}"
                issues[leaf] = Issue("value-given-twice", ".".join(leaf), problem, remedy="Keep one", origin=origin)
            seen[origin, leaf] = value
            above |= {(origin, leaf[:end]): leaf for end in range(1, len(leaf))}
    return list(issues.values())


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    else:
        yield path, value


def inside_a_list(tree: Tree, path: Path) -> Issue | None:
    """An issue for a change to one entry of a list, which has no names: it would replace the list by a mapping."""
    at = next((end for end in range(1, len(path)) if isinstance(tree.get(path[:end]), list)), None)
    if at is None:
        return None
    where = ".".join(path[:at])
    remedy = f"Write the whole list: {where}=[...]"
    return Issue(
        "override-inside-a-list",
        ".".join(path),
        f"{where} is a list, whose entries cannot be changed one by one",
        remedy=remedy,
    )


def _example(text: str) -> str:
    key, equals, _ = text.partition("=")
    if key.startswith("-"):
        return "Options of the program go by their own names (--help lists them)"
    if text.lstrip().startswith("{"):
        return _from_mapping(text)
    # A word that begins no path, such as a name or another file, is not made into one.
    begins_path = not equals and key.partition(".")[0] in {*JobSpec.model_fields, "steps"}
    return f"Write {key}=VALUE" if begins_path else "For example task.max_steps=100"


def _from_mapping(text: str) -> str:
    """What to type in place of a mapping that was typed as it is written in Python or JSON."""
    try:
        value = from_typed(text, OVERRIDE_ORIGIN).value
    except SpecError:
        value = None
    given = {} if not isinstance(value, Mapping) else {key: it for key, it in value.items() if it is not None}
    changes = quoted(*(f"{key}={to_typed(it)}" for key, it in given.items()))
    return f"Write {changes}" if changes else "For example task.max_steps=100"
