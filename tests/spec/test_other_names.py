"""Keys by the names that other tools have for them: every one is answered with a field that can be typed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.load import read_source
from sm_llm.spec.loading.overrides import resolved
from sm_llm.spec.schema import dotted_paths, knows
from sm_llm.spec.tree import Tree
from sm_llm.spec.validation.fields import nearest
from sm_llm.spec.validation.other_names import OTHER_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = ({"name": "sagemaker"}, {"name": "local"}, {"name": "slurm"})
TASKS: tuple[dict[str, Any], ...] = (
    {"kind": "train", "data": {"format": "rows"}, "parallelism": {"strategy": "nxd"}, "start": {"checkpoint": "x"}},
    {"kind": "train", "data": {"format": "rows"}, "parallelism": {"strategy": "fsdp"}, "start": {"pretrained": "x"}},
    {"kind": "script", "entry": "x.py"},
)
JOBS = [{"name": "a", "backend": backend, "task": task} for task, backend in itertools.product(TASKS, BACKENDS)]


def suggested(remedy: str) -> list[str]:
    """The paths of a remedy."""
    return remedy.removeprefix("Did you mean ").partition("?")[0].split(" or ") if "Did you mean" in remedy else []


def pairs() -> Iterator[tuple[str, str]]:
    return ((end, name) for end, names in OTHER_NAMES.items() for name in names.split())


def test_every_name_stands_for_one_field_and_is_none_itself() -> None:
    names = [name for _, name in pairs()]
    assert len(names) == len(set(names)) > 150
    paths = {path for job in JOBS for path in dotted_paths(JobSpec, job)}
    ends = {".".join(path[-size:]) for path in paths for size in range(1, len(path) + 1)}
    assert set(OTHER_NAMES) <= ends


@pytest.mark.parametrize("end", OTHER_NAMES)
def test_a_field_is_suggested_for_its_other_names(end: str) -> None:
    job = next(it for it in JOBS if any(".".join(path).endswith(end) for path in dotted_paths(JobSpec, it)))
    block = end.split(".")[:-1]
    for name in OTHER_NAMES[end].split():
        _, issue = resolved(JobSpec, (name,), job)
        if issue is not None:  # ``weights`` alone; a few names are keys of the whole job
            found = suggested(issue.remedy)
            assert any(it.endswith(end) for it in found), f"{name}: {issue.remedy}"
            assert all(knows(JobSpec, job, it.split(".")) for it in found), found
        beside = (*(() if block[:1] in (["task"], ["compute"], ["backend"], []) else ("task",)), *block, name)
        if not knows(JobSpec, job, beside):
            remedy = nearest(JobSpec, Tree(job), beside)
            # A key of another class that may stand there is explained as that.
            is_of_another = remedy.startswith("It belongs to")
            assert is_of_another or any(it.endswith(end) for it in suggested(remedy)), (beside, remedy)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("backend.kind", "backend.name"),
        ("backend.type", "backend.name"),
        ("task.type", "task.kind"),
        ("task.data.kind", "task.data.format"),
        ("task.parallelism.name", "task.parallelism.strategy"),
        ("task.optim.type", "task.optim.name"),
        ("kind", "task.kind"),
        ("env.A", "environment.A"),
    ],
)
def test_a_word_for_a_choice_leads_to_the_key_that_chooses(typed: str, meant: str) -> None:
    job = JOBS[0]
    assert suggested(nearest(JobSpec, Tree(job), tuple(typed.split(".")))) == [meant]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("task.lr", ["task.optim.learning_rate"]),
        ("task.optim.lr", ["task.optim.learning_rate"]),
        ("task.data.kind", ["task.data.format"]),
        ("task.tokeniser", ["steps.prepare.task.tokenizer", "steps.train.task.tokenizer"]),
        ("lr", ["steps.train.task.optim.learning_rate"]),
        ("seq_len", ["steps.prepare.task.seq_length", "steps.train.task.data.seq_length"]),
        ("env.A", ["environment.A", "steps.prepare.environment.A", "steps.train.environment.A"]),
    ],
)
def test_in_a_workflow_what_is_suggested_can_be_typed(typed: str, meant: list[str]) -> None:
    whole = read_source("tiny-local").value
    _, issue = resolved(WorkflowSpec, tuple(typed.split(".")), whole)
    assert issue is not None
    assert suggested(issue.remedy) == meant
    for path in meant:
        assert resolved(WorkflowSpec, tuple(path.split(".")), whole)[1] is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("steps.train.storage", "storage"),
        ("steps.train.name", "name"),
        ("steps.train.task.lr", "steps.train.task.optim.learning_rate"),
        ("steps.train.env.A", "steps.train.environment.A"),
        ("steps.train.gpus", "steps.train.compute.processes_per_instance"),
    ],
)
def test_a_wrong_key_of_a_step_leads_to_the_nearest_field(typed: str, meant: str) -> None:
    whole = read_source("tiny-local").value
    found = suggested(nearest(WorkflowSpec, Tree(whole), tuple(typed.split("."))))
    assert found[0] == meant
    assert all(knows(WorkflowSpec, whole, it.split(".")) for it in found)


def test_a_field_of_another_backend_states_whose_it_is() -> None:
    remedy = nearest(JobSpec, Tree({"name": "a", "backend": {"name": "local"}, "task": TASKS[0]}), ("use_spot",))
    assert remedy == "Did you mean backend.spot? It belongs to backend.name: sagemaker; here it is local"
