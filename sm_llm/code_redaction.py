"""What lines of programs and configurations give to names of secrets, kept out of a recorded diff."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sm_llm.redaction import HIDDEN, redact
from sm_llm.secret_names import is_secret_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = r"(?<![\w.])(?P<name>[A-Za-z_][\w.-]{0,120})"
_ASSIGNMENT = re.compile(_NAME + r"['\"]?\]?[ \t]*(?::=|=>|[?+!=]?=|==|:)(?!=)[ \t]*")
_ANNOTATION = re.compile(r"[A-Za-z_][\w.\[\], |]*=(?!=)[ \t]*")
_WORD = re.compile(_NAME)
_LITERAL = re.compile(r"[bfruBFRU]{0,2}(?:\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')")
_LITERALS = re.compile(rf"(?:{_LITERAL.pattern}[ \t]*)+")
# Behind a literal that is a key, whose name a reader needs.
_KEY = re.compile(r"[ \t]*(?:\]|=>|:(?!=))")
# Before a literal that names a variable.
_LOOKS_UP = re.compile(r"(?:getenv|get|pop|setdefault|require)\($")
# Values that are calls, attributes, references, types or small numbers: code that a reader of a diff needs.
_NO_SECRET = re.compile(
    r"[A-Za-z_]\w*(?:\.\w+)*[(\[]|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+[ \t]*(?:[,)\]#;]|$)|\$\{?\w+\}?(?:[ \t]|$)"
    r"|(?:None|True|False|null|str|int|bytes|object|-?[0-9]{1,4})\b[ \t]*(?:[,)\]#;|]|$)"
    r"|(?:env|file|ssm|secretsmanager|k8s):|(?:\"\"|'')(?![\"'])|\$\{\{"
)
_SAME_NAME = re.compile(r"(?P<value>[A-Za-z_]\w*)[ \t]*(?:[,)\]]|$)")
# A value that names where the real one is kept.
_REFERENCE = re.compile(r"\$\{?\w+\}?|\$\{\{?[^{}]*\}?\}")
_INSIDE_TAG = r"[^<>]{0,400}"
_KEYED = rf"<[\w:.-]{{1,80}}\s{_INSIDE_TAG}?\b(?:name|key|id)\s*=\s*[\"']{_NAME}[\"']"
_OF_ATTRIBUTE = r"\bvalue\s*=\s*[\"'](?P<value>[^\"'<>]+)"
_OF_ELEMENT = r"\s*(?:<!\[CDATA\[\s*)?(?P<value>[^<\s][^<]*)(?=</)"
# XML: an element of the name, or one whose attribute or neighbour has it; with the value as text or attribute.
_ELEMENTS = tuple(
    re.compile(it, re.IGNORECASE)
    for it in (
        rf"<(?:[\w-]{{1,80}}:)?{_NAME}(?:\s{_INSIDE_TAG})?(?<!/)>{_OF_ELEMENT}",
        rf"<(?:[\w-]{{1,80}}:)?{_NAME}\s{_INSIDE_TAG}?{_OF_ATTRIBUTE}",
        rf"{_KEYED}{_INSIDE_TAG}(?<!/)>(?:\s*<[\w:.-]{{1,80}}>)?{_OF_ELEMENT}",
        rf"{_KEYED}{_INSIDE_TAG}?{_OF_ATTRIBUTE}",
        rf"<[\w:.-]{{1,80}}\s{_INSIDE_TAG}?{_OF_ATTRIBUTE}[\"']{_INSIDE_TAG}?\b(?:name|key|id)\s*=\s*[\"']{_NAME}[\"']",
        rf"<(?:name|key)>\s*{_NAME}\s*</(?:name|key)>\s*<[\w:.-]{{1,80}}>{_OF_ELEMENT}",
    )
)
# Flags, variables of images and shells, words of a .netrc, pairs as in Kubernetes, two words alone on a line.
_NAMED_VALUES = (
    re.compile(r"--(?P<name>[A-Za-z][\w-]{0,120})[ \t]+(?!-)(?P<value>\"[^\"]*\"|'[^']*'|[^\s'\"]+)"),
    re.compile(r"\b(?:ENV|ARG|SET|set|setenv|setx)[ \t]+(?P<name>[A-Za-z_]\w{0,120})[ \t]+(?P<value>(?![=:])\S.*)"),
    re.compile(
        r"\b(?:machine\s+\S+|default\s+login\s+\S+|login\s+\S+)\s+(?:(?:login|account)\s+\S+\s+){0,2}"
        r"(?P<name>password)\s+(?P<value>\S+)"
    ),
    re.compile(
        rf"\b(?:name|key|variable)['\"]?[ \t]*[:=][ \t]*['\"]?{_NAME}['\"]?[ \t]*,?\s+['\"]?value['\"]?[ \t]*[:=]"
        r"[ \t]*['\"]?(?P<value>[^\s'\",}]{1,500})"
    ),
    re.compile(
        rf"^[ \t]*(?!(?:tokens?|pass|auth)[ \t]){_NAME}[ \t]+(?P<value>[^\s=:(){{}}\[\]]\S*)[ \t]*;?$",
        re.MULTILINE | re.IGNORECASE,
    ),
)
# What programs take for a password without naming it: curl, sshpass, logins to registries, MySQL, a .pgpass.
_PASSWORDS = (
    re.compile(
        r"\b(?:curl|wget|https?|xh)\b[^\n]{0,300}?[ \t](?:-u|--user|--auth|-a)[ \t=]*['\"]?[^\s:'\"/]{1,100}:"
        r"(?P<value>[^\s'\"]{1,300})"
    ),
    re.compile(
        r"\b(?:sshpass|(?:docker|podman|registry)[ \t]+login\b[^\n]{0,200}?)[ \t]+-p[ \t]*['\"]?"
        r"(?P<value>[^\s'\"]{1,300})"
    ),
    re.compile(r"\b(?:mysql\w*|mariadb)\b[^\n]{0,200}?[ \t]-p['\"]?(?P<value>[^\s'\"-][^\s'\"]{0,300})"),
    re.compile(
        r"^[ \t]*[\w.*-]{1,200}:(?:[0-9]{4,5}|\*):[\w*-]{1,80}:[\w*-]{1,80}:(?P<value>\S{1,200})$", re.MULTILINE
    ),
)
_OPEN_TAG = re.compile(rf"<(?:[\w-]{{1,80}}:)?{_NAME}(?:\s{_INSIDE_TAG})?(?<!/)>[ \t]*$")
_COLUMN = re.compile(r"[A-Za-z_][\w .()/-]{0,80}")
# Columns of data sets more often than of secrets.
_TEXT_COLUMNS = ("token", "tokens", "pass", "auth")
# What a value begins with whose lines follow: YAML's block scalars, a continued line.
_BLOCK = re.compile(r"(?:![\w!/-]*[ \t]+)?(?:[|>][+-]?[0-9]?[ \t]*$|\\$)")
# What is left of a line whose value follows, one to a line.
_OPEN = re.compile(r"[ \t]*(?:[(\[{]?|\\|![\w!/-]+)[ \t]*$")
# A line that is nothing but one value.
_ALONE = re.compile(r"[ \t]*(?:-[ \t]+)?(?P<value>[^\s'\"(){}\[\]:#]{6,}|['\"].*['\"])[ \t]*[,;)\]}+\\]*[ \t]*$")
# A line of a key whose header is not among the lines.
_ENCODED = re.compile(r"[ \t]*[A-Za-z0-9+/]{60,80}={0,2}[ \t]*$")
_TRIPLE = re.compile(r"[bfruBFRU]{0,2}(\"\"\"|''')")
# The first of two lines that give a value to a variable, as in Kubernetes.
_NAMED = re.compile(
    r"(?:\b(?:name|key|variable)['\"]?[ \t]*[:=][ \t]*['\"]?|<(?:name|key)>)(?P<name>[A-Za-z_][\w.-]{0,120})"
    r"(?:['\"]?[ \t]*,?|</(?:name|key)>[ \t]*)$"
)
_VALUE = re.compile(
    r"(?P<before>\bvalue['\"]?[ \t]*[:=][ \t]*|<(?:value|string)>)(?P<value>[^\s<][^<\n]*?)(?=$|</)", re.IGNORECASE
)
# Lines between the two.
_REACH = 3


def redact_assignments(text: str) -> str:
    """``redact``, and the values that lines of a program or configuration give to names such as ``db_password``.

    Hidden are a value up to the end of its line, a quoted one alone, every literal behind such a name in its line, and
    the lines that belong to the value; also lines of base64, which may be parts of a key. Calls, attributes, references
    and keys of mappings stay.
    """
    return redact("\n".join(_OpenText().shown(text.split("\n"))))


@dataclass
class _OpenText:
    """What the lines before one have left open."""

    inside: int | None = None
    """Columns before a value that continues while lines are indented deeper."""
    alone: bool = False
    """Of that value, only lines that are nothing but one value belong to it."""
    quotes: str = ""
    """The quotes that end a text of several lines."""
    table: _Table = field(default_factory=lambda: _Table())
    named: int = 0
    """Lines in which the value of a variable may follow, whose name is a secret's."""

    def shown(self, lines: list[str]) -> Iterator[str]:
        """The lines without values of secrets."""
        for line in lines:
            # The mark of a diff does not belong to a name; a flag has two of them.
            at = line[:1] in ("+", "-", " ") and line[:2] != "--"
            mark, body = line[:at], line[at:]
            yield mark + self._shown(body)

    def _shown(self, line: str) -> str:
        indent = len(line) - len(line.lstrip())
        # In this order: a line of a key, then what earlier lines left open, then what this line assigns by itself.
        if _ENCODED.match(line):
            return line[:indent] + HIDDEN
        if self.quotes:
            _, end, rest = line.partition(self.quotes)
            self.quotes = "" if end else self.quotes
            return f"{' ' * indent}{HIDDEN}{end}{rest}"
        if self.inside is not None and (indent > self.inside or not line.strip()):
            if not self.alone:
                return line[:indent] + (HIDDEN if line.strip() else "")
            if match := _ALONE.match(line):
                return line[: match.start("value")] + HIDDEN + line[match.end("value") :]
        self.inside = None
        line = _without(line, self.table.secrets(line))
        return self._without_values(self._without_named(line), indent)

    def _without_named(self, line: str) -> str:
        if match := _NAMED.search(line):
            self.named = _REACH if is_secret_name(match["name"]) else 0
        elif self.named:
            self.named -= 1
            return _VALUE.sub(lambda it: it["before"] + HIDDEN, line)
        return line

    def _without_values(self, line: str, indent: int) -> str:
        parts, at = [], 0
        for match in _ASSIGNMENT.finditer(line):
            # What begins before ``at`` lies inside a value that is hidden already.
            if match.start() < at or not is_secret_name(match["name"]):
                continue
            # In ``name: str = value`` the colon is followed by a type.
            annotated = _ANNOTATION.match(line, match.end()) if ":" in match[0] else None
            begin = annotated.end() if annotated else match.end()
            if end := self._end_of_value(line, begin, indent):
                parts += [line[at:begin], HIDDEN]
                at = end
        shown = _without_literals("".join([*parts, line[at:]]))
        if (tag := _OPEN_TAG.search(shown)) and is_secret_name(tag["name"]):
            self.inside, self.alone = indent, True
        return _without(shown, [it.span("value") for it in _named_values(shown)])

    def _end_of_value(self, line: str, begin: int, indent: int) -> int:
        """Where a value ends in its line, which may leave more of it to the next ones; 0 if it is none."""
        # Before the other literals: two of its three quotes would read as an empty text.
        if triple := _TRIPLE.match(line, begin):
            end = line.find(triple[1], triple.end())
            self.quotes = "" if end >= 0 else triple[1]
            return end + 3 if end >= 0 else len(line)
        if _BLOCK.match(line, begin):
            self.inside, self.alone = indent, False
            return len(line)
        if _OPEN.match(line, begin):
            self.inside, self.alone = indent, True
            return 0
        # ``password=password`` passes a variable on and shows nothing.
        same = _SAME_NAME.match(line, begin)
        if _NO_SECRET.match(line, begin) or (same and is_secret_name(same["value"])):
            return 0
        quoted = _LITERALS.match(line, begin)
        end = quoted.end() if quoted else len(line)
        if _OPEN.match(line, end) and line[end:].strip():
            self.inside, self.alone = indent, True
        return end


@dataclass
class _Table:
    """A table of separated values, read line by line: which cells are secrets by the name of their column."""

    separator: str = ""
    columns: int = 0
    secret: frozenset[int] = frozenset()

    def secrets(self, line: str) -> list[tuple[int, int]]:
        """Where the secrets of a line begin and end; none of a line that is no row of the table."""
        if self.secret:
            cells = _cells(line, self.separator)
            if len(cells) == self.columns:
                return [cells[it] for it in self.secret if cells[it][0] < cells[it][1]]
            self.secret = frozenset()
        # Without spaces before it, unlike arguments of a call, one line of which may look the same.
        for it in "\t,;|":
            if it in line and line[:1].strip():
                names = [name.strip(" \t\"'") for name in line.split(it)]
                if all(not name or _COLUMN.fullmatch(name) for name in names) and sum(map(bool, names)) > 1:
                    found = (at for at, name in enumerate(names) if is_secret_name(name))
                    self.secret = frozenset(at for at in found if names[at].lower() not in _TEXT_COLUMNS)
                    self.separator, self.columns = it, len(names)
                    return []
        return []


def _cells(line: str, separator: str) -> list[tuple[int, int]]:
    """Where the text of each cell begins and ends, without the quotes around it."""
    cells, at = [], 0
    cell = re.compile(rf"[ \t]*(?:\"(?P<quoted>(?:[^\"]|\"\")*)\"[^{separator}]*|(?P<plain>[^{separator}]*))")
    while match := cell.match(line, at):
        name = "quoted" if match["quoted"] is not None else "plain"
        begin, end = match.span(name)
        cells.append((begin, begin + len(line[begin:end].rstrip())))
        at = match.end() + 1
        if at > len(line):
            break
    return cells


def given_values(text: str) -> Iterator[tuple[str, str]]:
    """Names of secrets, and what ``text`` gives to them otherwise than by an assignment.

    In elements and attributes of XML, columns of a table, flags, words of a .netrc, and what programs take for a
    password without naming it.
    """
    for match in _named_values(text):
        yield match.groupdict().get("name") or "a password", match["value"].strip().removesuffix("]]>").strip(" \t'\"")
    table = _Table()
    for line in text.splitlines():
        yield from (("a column", line[begin:end]) for begin, end in table.secrets(line))


def _named_values(text: str) -> Iterator[re.Match[str]]:
    for pattern in (*(_ELEMENTS if "</" in text or "/>" in text else ()), *_NAMED_VALUES):
        yield from (it for it in pattern.finditer(text) if is_secret_name(it["name"]) and not _is_reference(it))
    for pattern in _PASSWORDS:
        yield from (it for it in pattern.finditer(text) if not _is_reference(it))


def _is_reference(match: re.Match[str]) -> bool:
    return match["value"] == HIDDEN or _REFERENCE.fullmatch(match["value"]) is not None


def _without(line: str, spans: list[tuple[int, int]]) -> str:
    parts, at = [], 0
    for begin, end in sorted(spans):
        if begin >= at:
            parts += [line[at:begin], HIDDEN]
        at = max(at, end)
    return "".join([*parts, line[at:]])


def _without_literals(line: str) -> str:
    """``line`` without the literals behind the first name of a secret: defaults, arguments, comparisons."""
    literals = list(_LITERAL.finditer(line))
    begins = [it.start() for it in literals]
    begin = next((it.end() for it in _WORD.finditer(line) if _is_named(it, literals, begins)), None)
    if begin is None:
        return line
    parts, at = [], 0
    for it in literals:
        value = it[0].lstrip("bfruBFRU")[1:-1]
        looks_up = _LOOKS_UP.search(line, max(0, it.start() - 20), it.start())
        if (
            it.start() >= begin
            and len(value) > 1
            and not (looks_up or _KEY.match(line, it.end()) or is_secret_name(value))
        ):
            parts += [line[at : it.start()], HIDDEN]
            at = it.end()
    return "".join([*parts, line[at:]])


def _is_named(word: re.Match[str], literals: list[re.Match[str]], begins: list[int]) -> bool:
    """Whether a word names a secret. Inside a literal (they start at ``begins``) it does only if it is all of it."""
    if not is_secret_name(word["name"]):
        return False
    before = bisect_left(begins, word.start()) - 1
    if before < 0 or literals[before].end() <= word.start():
        return True
    return literals[before][0].lstrip("bfruBFRU")[1:-1] == word["name"]
