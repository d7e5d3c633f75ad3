"""The lists of checkers: every checker is in one, and nothing decides by the text of an issue."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.syntax import absolute, by_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SDK = "launcher/backends/sagemaker/sdk"
PIPELINES = "launcher/backends/sagemaker/pipelines"
PHASES = {
    "SHARED_CHECKERS": "spec/validation/check.py",
    "WORKFLOW_CHECKERS": "spec/validation/check.py",
    "JOB_CHECKERS": "spec/validation/check.py",
    "TRAINING_CHECKERS": "spec/validation/check.py",
    "SINGLE_JOB_CHECKERS": "spec/validation/check.py",
    "MODEL_CHECKERS": "launcher/planning/checks.py",
    "DATA_CHECKERS": "launcher/planning/checks.py",
    "LOCATION_CHECKERS": "launcher/planning/input_locations.py",
    "CONTINUATION_CHECKERS": "launcher/continuation.py",
    "CHANGE_CHECKERS": "launcher/continuation.py",
    "PROGRAM_CHECKERS": "launcher/backends/cluster_program.py",
    "ESTIMATOR_CHECKERS": f"{SDK}/sdk_checks.py",
    "FIELD_CHECKERS": f"{SDK}/sdk_checks.py",
    "KNOWN_VALUE_CHECKERS": f"{SDK}/sdk_checks.py",
    "JOB_ARGUMENT_CHECKERS": f"{SDK}/sdk_checks.py",
    "ATTRIBUTE_CHECKERS": f"{SDK}/sdk_checks.py",
    "FIT_CHECKERS": f"{SDK}/sdk_checks.py",
    "STEP_CHECKERS": f"{SDK}/sdk_checks.py",
    "RESULT_CHECKERS": f"{SDK}/sdk_checks.py",
    "PIPELINE_SESSION_CHECKERS": f"{SDK}/sdk_checks.py",
    "TUNER_CHECKERS": f"{SDK}/sdk_checks.py",
    "TRIAL_CHECKERS": f"{SDK}/sdk_checks.py",
    "WRITTEN_PIPELINE_CHECKERS": f"{SDK}/sdk_pipelines.py",
    "PIPELINE_CHECKERS": f"{PIPELINES}/pipeline_definition.py",
    "DEFINITION_CHECKERS": f"{PIPELINES}/pipeline_definition.py",
    "VALUE_CHECKERS": f"{PIPELINES}/pipeline_values.py",
}
"""List -> its module; each backend has lists of its own, BACKEND_CHECKERS and REQUEST_CHECKERS."""
OF_BACKENDS = ("BACKEND_CHECKERS", "REQUEST_CHECKERS")
OUTSIDE = {
    "cli/pipeline.py": "arguments of the command line are parsed",
    "launcher/backend.py": "the gate of workflows, which is one issue",
    "launcher/backends/sagemaker/pipelines/pipeline_definition.py": "the step that registers, by a checker of jobs",
    "launcher/backends/sagemaker/pipelines/pipeline_variables.py": "names and paths are parsed",
    "launcher/backends/sagemaker/request/settings.py": "the SDK's files of defaults are parsed",
    "launcher/backends/sagemaker/sdk/estimators.py": "the gate of tasks without a worker",
    "launcher/planner.py": "the issues of all phases, and of a file that cannot be read",
    "launcher/planning/model_facts.py": "a config that another phase reports by a checker",
    "launcher/planning/plan.py": "the gate of what cannot run",
}
"""Modules of the launcher that raise issues which no list of checkers has found, each with the reason."""
BESIDE_LISTS = {
    "launcher/backend.py": "the gate of workflows, which is one issue",
    "launcher/backends/local/backend.py": "what this machine lacks, for the gate",
    "launcher/backends/sagemaker/pipelines/pipeline_definition.py": "the step that registers, by a checker of jobs",
    "launcher/backends/sagemaker/pipelines/pipeline_variables.py": "names and paths are parsed",
    "launcher/backends/sagemaker/pipelines/run_address.py": "asks whether the service would refuse a text",
    "launcher/backends/sagemaker/plan_checks.py": "decisions that cannot be made, which check_decisions reports",
    "launcher/backends/sagemaker/request/settings.py": "the SDK's files of defaults are parsed",
    "launcher/backends/sagemaker/sdk/estimators.py": "the gate of tasks without a worker",
    "launcher/backends/sagemaker/sdk/sdk_ranges.py": "asks whether a value of a range would be refused",
    "launcher/images/image_build.py": "the address of an image, which a command line prints",
    "launcher/lifecycle.py": "paths of overrides that were parsed before",
    "launcher/planner.py": "the issues of all phases, and of a file that cannot be read",
    "launcher/planning/model_facts.py": "a config that another phase reports by a checker",
    "launcher/planning/source_tree.py": "notes of a listing, which checks of programs report",
}
"""Modules of the launcher that ask helpers for issues outside of checkers, each with the reason."""
WITH_ISSUES = {"SpecError", "PlanError", "ConversionError", "ConversionRefused", "InvalidSpec"}


@cache
def lists() -> list[tuple[str, str, list[str]]]:
    """Module, name and members of every list."""
    found = []
    for module, tree in by_path().items():
        for statement in tree.body:
            if isinstance(statement, ast.AnnAssign) and "Checker[" in ast.unparse(statement.annotation):
                assert isinstance(statement.target, ast.Name)
                assert isinstance(statement.value, ast.Tuple)
                members = [ast.unparse(it).rpartition(".")[2] for it in statement.value.elts]
                found.append((module, statement.target.id, members))
    return found


def checkers_in(tree: ast.AST) -> Iterator[str]:
    """Names of all functions, wherever they stand, that are called check_... and give issues."""
    for it in ast.walk(tree):
        is_check = isinstance(it, ast.FunctionDef) and it.name.startswith("check_") and it.returns is not None
        if is_check and re.search(r"\bIssue\b", ast.unparse(it.returns)):  # type: ignore[attr-defined]
            yield it.name  # type: ignore[attr-defined]


def checkers() -> Iterator[tuple[str, str]]:
    """Module and name of every checker of the package, in whichever folder."""
    for module, tree in by_path().items():
        yield from ((module, name) for name in checkers_in(tree))


def test_every_checker_is_in_exactly_one_list() -> None:
    listed = Counter((Path(module).parent.as_posix(), member) for module, _, found in lists() for member in found)
    known = [(Path(module).parent.as_posix(), name) for module, name in checkers()]
    assert len(known) > 50
    assert [it for it in known if listed[it] != 1] == [], "not in a list, or in two"
    assert [it for it in listed if it not in known] == [], "listed, but not named check_..., or not a checker"


def test_every_list_is_one_phase_in_its_place() -> None:
    found = [(name, module) for module, name, _ in lists()]
    assert {it for it in found if it[0] not in OF_BACKENDS} == set(PHASES.items())
    assert {module.partition("backends/")[0] for name, module in found if name in OF_BACKENDS} == {"launcher/"}


def test_a_checker_is_seen_wherever_it_stands() -> None:
    source = (
        "def check_a(job: JobSpec) -> Iterator[Issue]: ...\nclass A:\n    def check_b(self, x: X) -> list[Issue]: ...\n"
        "def f():\n    def check_c(x: X) -> Issue | None: ...\ndef check_d() -> None: ...\n"
        "def check_e() -> Iterator[ClusterCheck]: ...\n"
    )
    assert sorted(checkers_in(ast.parse(source))) == ["check_a", "check_b", "check_c"]


def test_every_list_is_run() -> None:
    calls = (it for tree in by_path().values() for it in ast.walk(tree) if isinstance(it, ast.Call) and it.args)
    ran = {ast.unparse(it.args[0]) for it in calls if ast.unparse(it.func) == "run"}
    assert [name for _, name, _ in lists() if name not in ran] == []


def is_listed(found: ast.expr) -> bool:
    """Whether issues are written out where they are raised, or come from lists of checkers."""
    if isinstance(found, ast.List):
        return all(is_listed(it.value) if isinstance(it, ast.Starred) else is_one(it) for it in found.elts)
    return isinstance(found, ast.Call) and ast.unparse(found.func) == "run"


def is_one(element: ast.expr) -> bool:
    """Whether an element is a single issue: made there, or a variable."""
    return isinstance(element, ast.Name) or (isinstance(element, ast.Call) and ast.unparse(element.func) == "Issue")


def raised_elsewhere(tree: ast.AST) -> Iterator[int]:
    """Lines that refuse issues which helpers have gathered, and not a list of checkers."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("refuse", "PlanError", "SpecError")
        if is_call and node.args and not is_listed(node.args[0]):  # type: ignore[attr-defined]
            yield node.lineno  # type: ignore[attr-defined]


def test_the_launcher_refuses_what_lists_of_checkers_find() -> None:
    found = {}
    for module, tree in by_path().items():
        if module.startswith(("launcher/", "cli/")) and (lines := list(raised_elsewhere(tree))):
            found[module] = lines
    assert {path: lines for path, lines in found.items() if path not in OUTSIDE} == {}, "make it a checker of a list"
    assert [path for path in OUTSIDE if path not in found] == []


def test_issues_that_helpers_gather_are_seen() -> None:
    source = (
        "refuse(session_issues(x))\nrefuse([*run(A, a), *more_issues(b)])\nraise PlanError(issues)\n"
        "raise PlanError(list(find(x)))\nrefuse(run(A, a))\nrefuse([*run(A, a), *run(B, b)])\n"
        "raise PlanError([Issue('a', 'b', 'c'), issue])\n"
    )
    assert list(raised_elsewhere(ast.parse(source))) == [1, 2, 3, 4]


GIVES_ISSUES = re.compile(r"\bIssue\b")
RUNNER = "spec/validation/runner.py"
"""Runs the lists, and sorts what they find: whoever calls it may do so."""


def gives_issues(function: ast.AST) -> bool:
    """Whether a function returns issues, by its annotation; all of ours have one (mypy)."""
    is_function = isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.returns is not None
    return is_function and GIVES_ISSUES.search(ast.unparse(function.returns)) is not None  # type: ignore[attr-defined]


@cache
def helpers() -> frozenset[tuple[str, str]]:
    """Module and name of every function that returns issues, but for those of the runner."""
    found = [(path, it.name) for path, tree in by_path().items() for it in ast.walk(tree) if gives_issues(it)]  # type: ignore[attr-defined]
    return frozenset(it for it in found if it[0] != RUNNER)


def known_helpers(path: str, tree: ast.AST, known: Iterable[tuple[str, str]]) -> set[str]:
    """What a module calls the functions that return issues: its own and those it imports, under other names, too."""
    found = {name for module, name in known if module == path}
    dotted = {(f"sm_llm.{module.removesuffix('.py').replace('/', '.')}", name) for module, name in known}
    module = f"sm_llm.{path.removesuffix('.py').replace('/', '.')}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = absolute(node, module)
            found |= {it.asname or it.name for it in node.names if (source, it.name) in dotted}
    return found


def gathered_elsewhere(tree: ast.AST, helpers: set[str]) -> Iterator[int]:
    """Lines that call a helper for its issues in a function that returns none itself, and so no checker's."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, gives = waiting.pop()
        gives = gives or gives_issues(node)
        if isinstance(node, ast.Call) and not gives:
            name, method = getattr(node.func, "id", ""), getattr(node.func, "attr", "")
            if name in helpers or method in helpers or method.endswith("issues"):
                yield node.lineno
        waiting += [(it, gives) for it in ast.iter_child_nodes(node)]


def test_helpers_gather_issues_for_checkers_alone() -> None:
    found = {}
    for path, tree in by_path().items():
        if path.startswith(("launcher/", "cli/")):
            lines = sorted(gathered_elsewhere(tree, known_helpers(path, tree, helpers())))
            found |= {path: lines} if lines else {}
    assert {path: lines for path, lines in found.items() if path not in BESIDE_LISTS} == {}, "make it a checker"
    assert [path for path in BESIDE_LISTS if path not in found] == []


def test_helpers_outside_of_checkers_are_seen() -> None:
    source = (
        "def check_a(x) -> Iterator[Issue]:\n    yield from more(x)\n"
        "def fit(x) -> None:\n    found = [*more(x)]\n    return x.place_issues()\n"
        "def more(x) -> list[Issue]:\n    return [*other(x)]\nother(1)\n"
    )
    assert sorted(gathered_elsewhere(ast.parse(source), {"more", "other"})) == [4, 5, 8]
    renamed = ast.parse("from sm_llm.a.b import f as g\nfrom .b import f as h\nfrom sm_llm.a.c import f as i")
    assert known_helpers("a/x.py", renamed, {("a/b.py", "f"), ("a/x.py", "k")}) == {"g", "h", "k"}


CUTS = ("lower", "upper", "casefold", "strip", "replace", "format")
"""Methods that give a text again: what is done with that counts."""


class Readings(ast.NodeVisitor):
    """Lines of one function, or of what stands outside of functions, that decide by the text of an issue.

    Such a text is ``.message`` and ``.remedy`` of anything, an issue or an error with issues as a text (``str``, an
    f-string), and any variable that holds one. It may be shown or put into another text, not compared or searched.
    """

    def __init__(self, scope: ast.AST, helpers: set[str]) -> None:
        self.helpers = helpers
        self.issues: set[str] = {"issue"}
        self.texts: set[str] = set()
        self.lines: set[int] = set()
        before = -1
        while before != len(self.issues) + len(self.texts):  # until no variable is new
            before = len(self.issues) + len(self.texts)
            self.visit(scope)

    def is_issues(self, node: ast.AST) -> bool:
        """Whether an expression gives issues: several, or one."""
        if isinstance(node, ast.Attribute):
            return node.attr in ("issues", "unsupported")
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            is_wrapped = name in ("list", "tuple", "sorted", "iter", "next", "filter", "reversed", "chain", "enumerate")
            return name in self.helpers or name == "Issue" or (is_wrapped and any(map(self.is_issues, node.args)))
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.is_issues(node.value)
        if isinstance(node, ast.List | ast.Tuple):
            return any(map(self.is_issues, node.elts))
        return isinstance(node, ast.Name) and node.id in self.issues

    def is_text(self, node: ast.AST) -> bool:
        """Whether an expression is the text of an issue, or holds it."""
        if isinstance(node, ast.Attribute):
            return node.attr in ("message", "remedy") and ast.unparse(node.value) != "self"
        if isinstance(node, ast.JoinedStr | ast.FormattedValue | ast.BinOp):
            return any(self.is_text(it) or self.is_issues(it) for it in ast.iter_child_nodes(node))
        if isinstance(node, ast.Call):
            if getattr(node.func, "id", "") in ("str", "repr", "format"):
                return any(self.is_issues(it) or self.is_text(it) for it in node.args)
            return getattr(node.func, "attr", "") in CUTS and self.is_text(node.func.value)  # type: ignore[attr-defined]
        return isinstance(node, ast.Name) and node.id in self.texts

    def bind(self, target: ast.AST, value: ast.AST) -> None:
        for it in ast.walk(target):
            if isinstance(it, ast.Name):
                self.issues |= {it.id} if self.is_issues(value) else set()
                self.texts |= {it.id} if self.is_text(value) else set()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.bind(target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation is not None and GIVES_ISSUES.search(ast.unparse(node.annotation)):
            self.issues.add(node.arg)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        kinds = {it.id for it in ast.walk(node.type) if isinstance(it, ast.Name)} if node.type is not None else set()
        if kinds & WITH_ISSUES and node.name:
            self.issues.add(node.name)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(map(self.is_text, (node.left, *node.comparators))):
            self.lines.add(node.lineno)
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        if self.is_text(node.subject):
            self.lines.add(node.lineno)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self.is_text(node.value):
            self.lines.add(node.lineno)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute):
            is_cut = self.is_text(function.value) and function.attr not in CUTS
            is_matched = getattr(function.value, "id", "") in ("re", "fnmatch") or function.attr in PATTERN_METHODS
            if is_cut or (is_matched and any(map(self.is_text, node.args))):
                self.lines.add(node.lineno)
        self.generic_visit(node)


PATTERN_METHODS = ("match", "fullmatch", "search", "findall", "finditer")


def readings(tree: ast.AST, helpers: set[str] = frozenset()) -> list[int]:  # type: ignore[assignment]
    """Lines that compare, search or cut the text of an issue, or of an error that carries issues.

    Each outermost function is read by itself, since another one's variables of the same name may hold anything.
    """
    scopes: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With):
            waiting += list(ast.iter_child_nodes(node))
        else:
            scopes.append(node)
    return sorted({line for scope in scopes for line in Readings(scope, helpers).lines})


def test_nothing_reads_the_text_of_an_issue() -> None:
    found = []
    for path, tree in by_path().items():
        # The class itself, which makes the text of its parts.
        if path != "errors.py":
            found += [f"{path}:{line}" for line in readings(tree, known_helpers(path, tree, helpers()))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "issue.message.startswith('hf://')",
        "'a' in it.message",
        "it.message == 'a'",
        "re.match('a', issue.message)",
        "str(issue).endswith('a')",
        "m = issue.message; 'hub' in m",
        "m = issue.message; n = m.lower(); n == 'a'",
        "'hub' in f'{issue}'",
        "text = f'{issue.path}: {issue.message}'; text.find('a')",
        "any('hub' in str(i) for i in error.issues)",
        "[i for i in plan.unsupported if 'a' in f'{i}']",
        "found = list(plan.issues); first = found[0]; PATTERN.search(str(first))",
        "i = next(iter(error.issues)); 'a' in repr(i)",
        "f(x for x in error.issues if (m := x.message) and m[:3] == 'hub')",
        "found = helper(job); [x for x in found if 'a' in str(x)]",
        "'remove' in issue.remedy",
        "issue.message[0]",
        "def f(i: Issue): return 'a' in str(i)",
        "def f(them: list[Issue]): return [x for x in them if str(x) > 'a']",
        "match issue.message:\n    case 'a':\n        pass",
        "match str(issue):\n    case 'a':\n        pass",
    ],
)
def test_readings_are_seen(source: str) -> None:
    # One statement after another shares its variables only inside a function.
    inside = source if source.startswith("def ") else "def g():\n" + "".join(f"    {it}\n" for it in source.split("\n"))
    assert len(readings(ast.parse(inside), {"helper"})) == 1


def test_texts_that_are_shown_are_no_readings() -> None:
    assert readings(ast.parse("try:\n    f()\nexcept SpecError as error:\n    g('a' in str(error))")) == [4]
    for source in (
        "try:\n    f()\nexcept OSError as error:\n    g('a' in str(error))",
        "f(f'{issue.message} (step a)', self.message.lower())",
        "def f(i: Issue): return replace(i, message=f'{i.message}; more')",
        "def f(i: Issue): return [i.path == 'a', i.code in ('b',), i.value < 1]",
        "def f(i: Issue): say(str(i).strip())",
    ):
        assert readings(ast.parse(source)) == [], source
