"""The lists of checkers: every checker is in one, and nothing decides by the text of an issue."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sm_llm"
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
    "ESTIMATOR_CHECKERS": f"{SDK}/sdk_checks.py",
    "FIELD_CHECKERS": f"{SDK}/sdk_checks.py",
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
    "launcher/backends/kubeflow/submit.py": "our own manifests against the schema, before they are sent",
    "launcher/backends/kubeflow/workflows.py": "the manifests of a workflow against the schema, before they are sent",
    "launcher/backends/sagemaker/pipelines/pipeline_definition.py": "the step that registers, by a checker of jobs",
    "launcher/backends/sagemaker/pipelines/pipeline_variables.py": "names and paths are parsed",
    "launcher/backends/sagemaker/request/settings.py": "the SDK's files of defaults are parsed",
    "launcher/backends/sagemaker/sdk/estimators.py": "the gate of tasks without a worker",
    "launcher/continuation.py": "a checkpoint in the store, when a run begins",
    "launcher/lifecycle.py": "changes of a run that exists",
    "launcher/planner.py": "the issues of all phases, and of a file that cannot be read",
    "launcher/planning/input_locations.py": "places in S3, when a run begins",
    "launcher/planning/model_facts.py": "a config that another phase reports by a checker",
    "launcher/planning/plan.py": "the gate of what cannot run",
}
"""Modules of the launcher that raise issues which no list of checkers has found, each with the reason."""
WITH_ISSUES = {"SpecError", "PlanError", "ConversionError", "ConversionRefused", "InvalidSpec"}


@cache
def trees() -> dict[str, ast.Module]:
    """Module -> its syntax tree."""
    return {
        it.relative_to(PACKAGE).as_posix(): ast.parse(it.read_text(encoding="utf-8"))
        for it in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def lists() -> list[tuple[str, str, list[str]]]:
    """Module, name and members of every list."""
    found = []
    for module, tree in trees().items():
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
    for module, tree in trees().items():
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
    calls = (it for tree in trees().values() for it in ast.walk(tree) if isinstance(it, ast.Call) and it.args)
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
    for module, tree in trees().items():
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


def readings(tree: ast.AST) -> Iterator[int]:
    """Lines that compare, search or cut the text of an issue, or of an error that carries issues."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    errors = {node for handler in ast.walk(tree) for node in names_of_errors(handler)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Attribute) and node.attr == "message" and ast.unparse(node.value) != "self"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str" and node.args:
            is_text = node.args[0] in errors or ast.unparse(node.args[0]) == "issue"
        outer = parents.get(node)
        is_cut = isinstance(outer, ast.Attribute) and isinstance(parents.get(outer), ast.Call)
        is_matched = isinstance(outer, ast.Call) and ast.unparse(outer.func).startswith("re.")
        if is_text and (isinstance(outer, ast.Compare) or is_cut or is_matched):
            yield node.lineno  # type: ignore[attr-defined]


def names_of_errors(handler: ast.AST) -> Iterator[ast.Name]:
    """Where the body of an ``except`` names an error that carries issues."""
    if isinstance(handler, ast.ExceptHandler) and handler.type is not None:
        kinds = {it.id for it in ast.walk(handler.type) if isinstance(it, ast.Name)}
        if kinds & WITH_ISSUES:
            yield from (it for it in ast.walk(handler) if isinstance(it, ast.Name) and it.id == handler.name)


def test_nothing_reads_the_text_of_an_issue() -> None:
    found = []
    for module, tree in trees().items():
        found += [f"{module}:{line}" for line in readings(tree)]
    assert found == []


def test_readings_are_seen() -> None:
    for line in (
        "issue.message.startswith('hf://')", "'a' in it.message", "it.message == 'a'", "re.match('a', issue.message)",
        "str(issue).endswith('a')",
    ):  # fmt: skip
        assert list(readings(ast.parse(line))) == [1], line
    assert list(readings(ast.parse("try:\n    f()\nexcept SpecError as error:\n    g('a' in str(error))"))) == [4]
    assert list(readings(ast.parse("try:\n    f()\nexcept OSError as error:\n    g('a' in str(error))"))) == []
    assert list(readings(ast.parse("f(f'{issue.message} (step a)', self.message.lower())"))) == []
