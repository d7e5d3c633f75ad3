"""Reading YAML without its traps, and remembering the line of every value.

Plain scalars follow YAML 1.2: ``no``, ``off`` and ``2024-01-01`` are text, ``1e-4`` is a number, ``010`` is ten.
Underscores may group digits (``1_000_000``). Size, depth and number of values are bounded, aliases counted as what they
stand for, so that no text takes longer than a moment.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.tree import Path, Size, Tree, from_python

if TYPE_CHECKING:
    from pathlib import Path as FilePath

_CORE = "tag:yaml.org,2002:"
_YAML_1_1: Any = yaml.SafeLoader("")
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")

_SMALLER = "Write what the job needs and no more: a specification has a few hundred values"
LONGEST_TEXT = 1_000_000
"""Characters of a YAML text."""
# Digits of a whole number; what is longer is text.
_LONGEST_NUMBER = 1000

_Scalar = tuple[str, str, str, Callable[[str], Any]]
# Tag, pattern, possible first characters, conversion; in the order in which they are tried.
_SCALARS: tuple[_Scalar, ...] = (
    ("null", r"(?:~|null|Null|NULL|)$", "~nN", lambda text: None),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF", lambda text: text.lower() == "true"),
    ("int", r"[-+]?[0-9][0-9_]*$", "-+0123456789", lambda text: _whole(text.replace("_", ""), 10)),
    ("int", r"0x[0-9a-fA-F]+$", "0", lambda text: _whole(text, 16)),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
        lambda text: float(text.replace("_", "")),
    ),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+.", lambda text: float(text.replace(".", ""))),
)


class _TooLarge(yaml.MarkedYAMLError):
    """A text with more in it than any specification has."""

    def __init__(self, problem: str, mark: yaml.Mark | None = None) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _Loader(yaml.SafeLoader):
    """Composes nodes, resolving plain scalars by ``_SCALARS`` only."""

    # Empty, so that none of the library's resolvers of YAML 1.1 is inherited.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._size = Size()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """As the library, but not without end: it calls itself for every level."""
        if problem := self._size.enter():
            raise _TooLarge(problem, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        try:
            return super().compose_node(parent, index)
        finally:
            self._size.leave()


for _tag, _pattern, _first, _ in _SCALARS:
    # The library chooses resolvers by the first character, and an empty scalar has none.
    _Loader.add_implicit_resolver(_CORE + _tag, re.compile(_pattern), [*_first, *([""] if _tag == "null" else [])])


def from_yaml(text: str, name: str) -> Tree:
    """Parse a YAML file; origins are ``name:line``.

    Raises ``SpecError`` for text that is not one YAML document or too large for a specification, for duplicate keys and
    for tags outside YAML's core.
    """
    builder = _Builder(lambda line: f"{name}:{line}")
    try:
        if (node := _compose(text)) is not None:
            builder.tree.value = builder.build(node, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or error
        text = str(problem) if isinstance(error, _TooLarge) else f"not valid YAML: {problem}"
        raise SpecError(
            [Issue("yaml-invalid", where, text, remedy=_SMALLER if isinstance(error, _TooLarge) else "")]
        ) from None
    if builder.issues:
        raise SpecError(builder.issues)
    return builder.tree


def read_text(file: FilePath) -> str:
    """The text of a YAML file, but little more than ``from_yaml`` takes. Raises ``OSError``, ``UnicodeDecodeError``."""
    with file.open(encoding="utf-8") as stream:
        # One character more than is taken, so that a longer file is refused and not cut.
        return stream.read(LONGEST_TEXT + 1)


def _compose(text: str) -> yaml.Node | None:
    if len(text) > LONGEST_TEXT:
        raise _TooLarge(f"is longer than {LONGEST_TEXT:,} characters")
    return yaml.compose(text, Loader=_Loader)


def _whole(digits: str, base: int) -> int | str:
    """A whole number; the text itself if no number of a specification is that long."""
    return int(digits, base) if len(digits) <= _LONGEST_NUMBER else digits


def from_typed(text: str, origin: str) -> Tree:
    """The value of one override: a YAML scalar, list or mapping, or else the text as it stands.

    Unquoted text is kept to the character: ``Item #1`` is not cut at what would be a comment in a file, and
    ``Name: x`` is text where text is wanted. JSON, which the SageMaker SDK writes, means what it means as JSON, also
    where YAML would read it otherwise. Raises ``SpecError`` for what is too large.
    """
    tree = _typed(text, origin)
    if text[:1] in ("{", "[", '"') and (exact := _json(text)) is not None and exact != tree.value:
        # By way of YAML, so that the tree has the origins and texts of every other value.
        return _typed(to_yaml(exact), origin)
    return tree


def _json(text: str) -> Any:
    """The value of a JSON document; None for what is none, or names a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _typed(text: str, origin: str) -> Tree:
    builder = _Builder(lambda line: origin)
    try:
        node = _compose(text)
        quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
        if node is None or (node.tag == f"{_CORE}str" and not quoted):
            return Tree(text, {(): origin})
        builder.tree.value = builder.build(node, ())
    except _TooLarge as error:
        raise SpecError(
            [Issue("yaml-value-too-large", "", str(error.problem), remedy=_SMALLER, origin=origin)]
        ) from None
    # Text that only resembles YAML, such as a prompt with braces.
    except yaml.YAMLError:
        return Tree(text, {(): origin})
    if builder.issues:
        return Tree(text, {(): origin})
    if not quoted:
        # Where text is wanted, an unquoted value is read again as it was typed.
        builder.tree.texts[()] = text
    return builder.tree


def to_typed(value: Any) -> str:
    """What to type as the value of an override that means ``value``: text as it stands where that is read as text."""
    plain = from_python(value, "").value
    if not isinstance(plain, str):
        return to_yaml(plain)
    try:
        is_itself = from_typed(plain, "").value == plain
    except SpecError:
        is_itself = False
    return plain if is_itself else to_yaml(plain)


def to_yaml(value: Any) -> str:
    """One line of YAML that ``from_yaml`` and ``from_typed`` read back as the same plain value.

    YAML 1.1, which PyYAML's own loader speaks, reads it so, too: ``no`` is quoted, and a float has a point.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(str(key))}: {to_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_yaml, value)) + "]"
    if isinstance(value, str):
        return str(value) if _PLAIN.fullmatch(value) and _resolves_to_text(value) else _quoted(value)
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    # YAML 1.1 takes 1e-05 for text, and 1.0e-05 for a number.
    digits, exponent, power = json.dumps(value).partition("e")
    return f"{digits}{'' if '.' in digits else '.0'}{exponent}{power}"


def _resolves_to_text(value: str) -> bool:
    # "..." is the end of a YAML document.
    is_text = not any(re.match(pattern, value) for _, pattern, _, _ in _SCALARS)
    return is_text and _YAML_1_1.resolve(yaml.ScalarNode, value, (True, False)) == f"{_CORE}str" and value != "..."


def _quoted(text: str) -> str:
    """In double quotes; whatever YAML would fold, refuse or not print is escaped."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _characters(node: yaml.Node) -> int:
    """Of a scalar, or of the keys of a mapping."""
    if isinstance(node, yaml.MappingNode):
        return sum(len(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
    return len(node.value) if isinstance(node, yaml.ScalarNode) else 0


def _is_merge(key: yaml.Node) -> bool:
    """Whether a key merges other mappings in; a quoted one is a key like any other."""
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None


class _Builder:
    """Turns nodes into plain values, filling a tree's origins and texts."""

    def __init__(self, label: Callable[[int], str]) -> None:
        self.tree = Tree()
        self.issues: list[Issue] = []
        self._label = label
        self._open: list[yaml.Node] = []
        self._size = Size()

    def build(self, node: yaml.Node, path: Path) -> Any:
        """The value of a node at ``path``."""
        self.tree.origins[path] = self._where(node)
        # An alias inside of what its anchor names: it would be built without end.
        if node in self._open:
            return self._issue("yaml-refers-to-itself", node, path, "refers to itself")
        if problem := self._size.enter(_characters(node)):  # an alias counts as all that it stands for
            raise _TooLarge(problem, node.start_mark)
        self._open.append(node)
        try:
            if isinstance(node, yaml.CollectionNode) and node.tag not in (f"{_CORE}map", f"{_CORE}seq"):
                return self._refuse_tag(node, path)
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, str(index))) for index, item in enumerate(node.value)]
            return self._scalar(node, path) if isinstance(node, yaml.ScalarNode) else None
        finally:
            self._open.pop()
            self._size.leave()

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        built: dict[str, Any] = {}
        own: dict[str, int] = {}
        # Merged mappings first, so that the mapping's own keys replace theirs wherever the merge stands.
        for key_node, value_node in sorted(node.value, key=lambda pair: not _is_merge(pair[0])):
            if not isinstance(key_node, yaml.ScalarNode):
                self._issue(
                    "yaml-key-not-text",
                    key_node,
                    path,
                    "a key must be plain text; quote a value that starts with a brace",
                )
                continue
            key = str(key_node.value)
            if _is_merge(key_node):
                built = {**self._merged(value_node, path), **built}
                continue
            if key in own:
                self._issue("yaml-key-repeated", key_node, (*path, key), f"given twice, first in line {own[key]}")
            own[key] = key_node.start_mark.line + 1
            built[key] = self.build(value_node, (*path, key))
        return built

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values = [self.build(part, path) for part in reversed(parts)]  # the first of several wins
        return {key: value for merged in values if isinstance(merged, dict) for key, value in merged.items()}

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, kind = str(node.value), node.tag.removeprefix(_CORE)
        if node.style is None:
            self.tree.texts[path] = text
        if kind == "str":
            return text
        for name, pattern, _, convert in _SCALARS:
            if name == kind and re.match(pattern, text):
                return convert(text)
        return self._refuse_tag(node, path)

    def _where(self, node: yaml.Node) -> str:
        return self._label(node.start_mark.line + 1)

    def _refuse_tag(self, node: yaml.Node, path: Path) -> None:
        self._issue("yaml-tag-unsupported", node, path, f"the YAML tag {node.tag} is not supported")

    def _issue(self, code: str, node: yaml.Node, path: Path, problem: str) -> None:
        self.issues.append(Issue(code, ".".join(path), problem, origin=self._where(node)))
