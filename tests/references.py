"""Writes the pages of ``docs/reference`` from the code: ``python -m tests.references``.

``specification.md`` holds every field of a specification, ``cli.md`` every verb of the command line, ``issues.md`` the
codes of what can be wrong. A field, verb, argument or option without a description is an error that names it. A test
compares the pages with what this makes.
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer
from pydantic_core import PydanticUndefined

from sm_llm.cli import app
from sm_llm.spec import field_classes as classes
from sm_llm.spec.backends.table import BACKENDS
from sm_llm.spec.base import SpecModel
from sm_llm.spec.comparison.leaves import declared
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.yaml_text import to_yaml
from sm_llm.spec.reference.docs import class_doc, field_docs
from sm_llm.spec.schema import child_blocks, constant, describe, members, tag
from tests.issue_codes import Constructed, codes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.spec.field_classes import Declared

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/reference"
NOTICE = "<!-- written by python -m tests.references; do not edit -->"


class Undocumented(Exception):
    """A part of the public surface has no description."""


def pages() -> dict[str, str]:
    """File name -> text."""
    commands = typer.main.get_command(app)
    return {"specification.md": specification(), "cli.md": command_line(commands), "issues.md": issues()}


# Codes of issues

_TITLES = {"local": "This machine", "sagemaker": "SageMaker"}
"""Backends whose part of the page has another title than their name."""
_PARTS = {
    "spec/": "Specification",
    "models/": "Model and weights",
    "contract/": "Continuation and changes of a job",
    "launcher/backends/sagemaker/pipelines/": "SageMaker Pipelines",
    "launcher/backends/sagemaker/sdk/": "Objects of the SageMaker SDK",
    **{f"launcher/backends/{name}/": _TITLES.get(name, name.title()) for name in BACKENDS},
    "launcher/": "Plan, programs and images",
    "convert/": "Conversion",
    "": "Other",
}
"""Where an issue is made -> its part of the page; the first prefix that fits."""


def issues() -> str:
    """A table of codes per part of the package."""
    lines = [
        "# Codes of issues",
        "",
        NOTICE,
        "",
        "What is wrong with a specification, a plan or a conversion has a code, which stays when its text gets better:",
        "`error.issues` in Python, and of a verb with `--json`. A warning stops nothing: `plan.issues` in Python,",
        "`issues` of `sm-llm plan --json`. `…` stands for what only a run knows.",
    ]
    parts: dict[str, dict[str, Constructed]] = {}
    for it in codes():
        part = next(name for prefix, name in _PARTS.items() if it.module.startswith(prefix))
        parts.setdefault(part, {}).setdefault(it.code, it)
    for name in dict.fromkeys(_PARTS.values()):
        found = parts.get(name, {})
        lines += ["", f"## {name}", "", "| code | where | what | what to do |", "|---|---|---|---|"] if found else []
        for code, it in found.items():
            kind = " (warning)" if it.severity == "warning" else ""
            lines.append(f"| `{code}`{kind} | {_cell(it.path)} | {_cell(it.message)} | {_cell(it.remedy)} |")
    return "\n".join(lines) + "\n"


# The specification


def specification(roots: Sequence[type[SpecModel]] = (JobSpec, WorkflowSpec)) -> str:
    """A table per block, in the order in which a reader of a job meets them."""
    lines = [
        "# Fields of a specification",
        "",
        NOTICE,
        "",
        "A job is a `JobSpec`, several that feed one another are a `WorkflowSpec`. The last column is the class of a",
        "field for continuation: what another value of it changes, and so which checkpoints can still be continued",
        "([resume.md](../resume.md)).",
        "",
        "| class | another value changes |",
        "|---|---|",
        *(f"| {name} | {_cell(text)} |" for name, text in field_classes().items()),
    ]
    seen: dict[Any, str] = {}
    for root in roots:
        lines += _block(root, "", None, seen)
    return "\n".join(lines) + "\n"


def field_classes() -> dict[str, str]:
    """The classes of ``FieldClass`` and the string under each in the source."""
    tree = ast.parse(inspect.getsource(classes.FieldClass))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, after in pairwise(body):
        if isinstance(statement, ast.Assign) and isinstance(after, ast.Expr):
            docs[ast.literal_eval(statement.value)] = " ".join(ast.literal_eval(after.value).split())
    return docs


def _block(
    kind: type[SpecModel], path: str, inherited: Declared | None, seen: dict[Any, str], chosen: str = ""
) -> Iterator[str]:
    """The section of one block and those of the blocks inside it that no section shows yet."""
    text = class_doc(kind)
    if not text:
        raise Undocumented(f"{kind.__name__} has no docstring")
    title = f"`{path}{chosen}`: {kind.__name__}" if path else kind.__name__
    seen[kind, inherited] = title
    yield from ["", f"## {title}", "", _markdown(text), ""]
    yield from ["| field | type | default | meaning | bounds | class |", "|---|---|---|---|---|---|"]
    docs, inner = field_docs(kind), []
    for name, field in kind.model_fields.items():
        here = f"{path}.{name}" if path else name
        if not docs.get(name):
            raise Undocumented(f"{kind.__name__}.{name} has no description: write a string under the field")
        own = declared(field) or kind.fields_are or inherited
        inner += [(it, *_location(here, field.annotation, it), own) for it in child_blocks(field.annotation)]
        row = [f"`{here}`", _type(field.annotation), _default(field), _markdown(docs[name]), _bounds(field)]
        yield f"| {' | '.join(map(_cell, [*row, own.field_class if own else '']))} |"
    for block, location, choice, own in inner:
        if (block, own) not in seen:
            yield from _block(block, location, own, seen, choice)
        else:
            yield from ["", f"`{location}{choice}`: the fields of {_link(seen[block, own])}."]


def _location(path: str, annotation: Any, block: type[SpecModel]) -> tuple[str, str]:
    """Where a block stands, below a key of one's own in a mapping, and the tag that chooses it in a union."""
    if any(block in child_blocks(it) and block is not it for it in members(annotation) if _origin(it) in (dict, list)):
        path += ".NAME" if any(_origin(it) is dict for it in members(annotation)) else "[]"
    key = tag(annotation)
    return path, f" ({key}: {constant(block, key)})" if key else ""


def _origin(annotation: Any) -> Any:
    return getattr(annotation, "__origin__", None)


def _link(title: str) -> str:
    anchor = "".join(c for c in title.lower() if c.isalnum() or c in " -_").replace(" ", "-")
    return f"[{title.replace('`', '')}](#{anchor})"


def _type(annotation: Any) -> str:
    blocks = child_blocks(annotation)
    if not blocks:
        return describe(annotation)
    names = " or ".join(it.__name__ for it in blocks)
    if any(_origin(it) is dict for it in members(annotation)):
        names = f"a mapping of {names}"
    elif any(_origin(it) is list for it in members(annotation)):
        names = f"a list of {names}"
    plain = [describe(it) for it in members(annotation) if not child_blocks(it)]
    null = ["null"] if type(None) in get_args(annotation) else []
    return " or ".join([*plain, names, *null])


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, SpecModel):
        return f"{type(default).__name__}"
    return f"`{to_yaml(default).strip()}`"


def _bounds(field: Any) -> str:
    """The limits of a value and of a length, as the type declares them."""
    signs = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
    lengths = {"min_length": "at least {} long", "max_length": "at most {} long", "pattern": "matches `{}`"}
    found = []
    for mark in field.metadata:
        for name, text in {**signs, **lengths}.items():
            if (value := getattr(mark, name, None)) is not None:
                found.append(text.format(_number(value) if name in signs else value))
    return ", ".join(found)


def _number(value: float) -> str:
    """``2^31``, ``10^12`` and the like, where that is shorter."""
    for base in (10, 2):
        for power in range(4, 64):
            for minus in (0, 1):
                if value == base**power - minus and value >= 10_000:
                    return f"{base}^{power}" + (" - 1" if minus else "")
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


# The command line


def command_line(group: Any) -> str:
    """Each verb with its usage, text, arguments and options. Commands are click's, or Typer's own copies of them."""
    lines = [
        "# Verbs of the command line",
        "",
        NOTICE,
        "",
        "Exit codes and the grammar of overrides: [cli.md](../cli.md).",
    ]
    for path, command in _commands(group, "sm-llm"):
        lines += _verb(path, command)
    return "\n".join(lines) + "\n"


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def _verb(path: str, command: Any) -> Iterator[str]:
    text = inspect.cleandoc(command.help or "")
    if not text:
        raise Undocumented(f"{path} has no help text")
    usage = " ".join(["[OPTIONS]", *(_name(it) for it in command.params if not _is_option(it))])
    yield from ["", f"## {path}", "", "```text", f"{path} {usage}", "```", ""]
    for paragraph in text.split("\n\n"):
        verbatim = paragraph.removeprefix("\b\n")
        yield from ["```text", verbatim, "```", ""] if verbatim != paragraph else [paragraph, ""]
    yield from ["| argument or option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        meaning = getattr(parameter, "help", None)
        if not meaning:
            raise Undocumented(f"{path}: {_name(parameter)} has no help text")
        yield f"| {_cell(f'`{_name(parameter)}`')} | {_cell(_shown_default(parameter))} | {_cell(meaning)} |"


def _is_option(parameter: Any) -> bool:
    return parameter.opts[0].startswith("-")


def _name(parameter: Any) -> str:
    """The option with its alternatives, or the argument as the usage line shows it."""
    if _is_option(parameter):
        return ", ".join([*parameter.opts, *parameter.secondary_opts])
    return parameter.metavar or parameter.name.upper()


def _shown_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    is_unset = default is None or default is False or callable(default) or default == []
    return "" if is_unset or "UNSET" in repr(default) else f"`{default}`"


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER.relative_to(ROOT) / name)
