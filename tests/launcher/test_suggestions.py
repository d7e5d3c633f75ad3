"""Every command and every change that the product's own texts suggest can be typed as it is printed."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from sm_llm import cli
from sm_llm.errors import CheckpointError, PlanError, SpecError, SubmitError
from sm_llm.launcher.backends.local import backend as local
from sm_llm.launcher.backends.sagemaker.sdk.sdk_inputs import input_issues
from sm_llm.launcher.planner import plan
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.load import load, recipe_files
from sm_llm.spec.machines.machine import Machine
from sm_llm.spec.schema import blocks, knows, tag_values
from sm_llm.spec.training import SyntheticData
from tests.fixtures.typed import assert_accepted, commands_in

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = sorted((Path(cli.__file__).parents[1]).rglob("*.py"))
_COMMAND = re.compile(r"sm-llm ([a-z|]+)((?: [^`'\",;()\n]*)?)")
_CHANGE = re.compile(r"\b((?:steps\.\w+\.)?(?:task|compute|backend|storage_options)(?:\.\w+)+)=(?!=)")


@cache
def texts(*, printed_only: bool = False) -> list[tuple[str, str]]:
    """Every text of the sources with its place; what is filled in is X. ``printed_only``: without documentation."""
    return [text for file in SOURCES for text in _texts(file, printed_only=printed_only)]


def _texts(file: Path, *, printed_only: bool) -> Iterator[tuple[str, str]]:
    tree = ast.parse(file.read_text())
    bare = {id(it.value) for it in ast.walk(tree) if isinstance(it, ast.Expr)} if printed_only else set()
    if printed_only:  # of an f-string the whole
        bare |= {id(it) for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for it in text.values}
    for node in ast.walk(tree):
        if id(node) in bare:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [str(it.value) if isinstance(it, ast.Constant) else "X" for it in node.values]
            yield f"{file.name}:{node.lineno}", "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"{file.name}:{node.lineno}", node.value


def commands() -> dict[str, Any]:
    """Every verb, groups with a space, and the click command that runs it."""
    whole = typer.main.get_command(cli.app)
    found: dict[str, Any] = {}
    for name, command in whole.commands.items():  # type: ignore[attr-defined]
        found[name] = command
        found |= {f"{name} {verb}": it for verb, it in getattr(command, "commands", {}).items()}
    return found


def test_every_suggested_command_has_its_verb_and_options() -> None:
    known, wrong, seen = commands(), [], 0
    for location, text in texts():
        for verb, rest in _COMMAND.findall(text):
            seen += 1
            words = [it.rstrip(".:") for it in rest.split()]
            is_group = bool(getattr(known.get(verb), "commands", None))
            name = f"{verb} {words[0]}" if words and is_group and not words[0].startswith("-") else verb
            if name not in known:
                wrong.append(f"{location}: there is no verb {name!r} in {text[:90]!r}")
                continue
            options = {it for parameter in known[name].params for it in (*parameter.opts, *parameter.secondary_opts)}
            lacking = {word for word in words if word.startswith("-")} - options - {"--help", "-h", "-"}
            wrong += [f"{location}: {name} has no {option}" for option in lacking]
    assert not wrong
    assert seen > 60, "they are found at all"


def test_E17_no_printed_command_names_a_placeholder_for_what_is_known() -> None:
    wrong = []
    for location, text in texts(printed_only=True):
        for verb, rest in _COMMAND.findall(text):
            bare = {it.strip(".:,") for it in rest.split()} & {"RUN", "JOB", "FILE", "STEP", "SPEC", "NAME"}
            wrong += [f"{location}: sm-llm {verb}{rest}"] if bare else []
            if verb in ("fit", "plan") and not [it for it in rest.split() if not it.startswith("-")]:
                wrong.append(f"{location}: sm-llm {verb}{rest} has no specification")
    assert not wrong


def test_E17_a_printed_change_is_key_value() -> None:
    wrong = [
        f"{location}: {text[:90]}"
        for location, text in texts(printed_only=True)
        if re.search(r"\b(?:State|Set|Write) task(?:\.\w+)+: ", text)
    ]
    assert not wrong


def is_known(path: str) -> bool:
    parts = path.removeprefix("steps.").split(".")
    parts = parts[1:] if path.startswith("steps.") else parts
    kinds = tag_values(JobSpec.model_fields["task"].annotation)
    backends = tag_values(JobSpec.model_fields["backend"].annotation)
    jobs = [{"task": {"kind": kind}, "backend": {"name": name}} for kind in kinds for name in backends]
    return any(knows(JobSpec, job, parts) for job in jobs) or knows(WorkflowSpec, {}, parts)


def test_every_suggested_change_is_of_a_field() -> None:
    found = [(location, path) for location, text in texts() for path in _CHANGE.findall(text)]
    # In docstrings task.x, and backend.KEY, stand for any field, and X for what is filled in.
    wrong = [
        f"{location}: {path}"
        for location, path in found
        if not path.endswith((".x", ".X", ".KEY")) and not is_known(path)
    ]
    assert not wrong
    assert len(found) > 10
    assert blocks(JobSpec.model_fields["task"].annotation)
    assert not is_known("task.max_epoch")


def test_the_suggested_number_of_processes_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.LocalBackend, "machine", Machine(8, ("0", "1")), raising=False)
    backend = local.LocalBackend(Machine(8, ("0", "1")))
    (it,) = plan("smoke", "environment.CUDA_VISIBLE_DEVICES=''", "compute.processes_per_instance=5")
    (fault,) = backend.plan_checks(replace(it, job=it.job.model_copy(update={"environment": {}}))).issues
    changes = dict(it.split("=", 1) for it in re.findall(r"[a-z_]+\.[\w.]+=[^\s,)]+", fault.remedy))
    for path, value in changes.items():
        typed = f"{path}={value}"
        assert plan("smoke", "environment.CUDA_VISIBLE_DEVICES=''", typed), typed
    assert changes["compute.processes_per_instance"] == "2"


@pytest.mark.parametrize("length", [{"max_steps": 8}, {"max_epochs": 0.5}, {"max_tokens": 128}])
def test_a_completed_run_suggests_a_branch_that_can_be_typed(length: dict[str, float], fakes: Any) -> None:
    from tests.launcher.conftest import SYNTHETIC

    fakes.use("put(1)\nput(None)")
    run = fakes.launch(task={**SYNTHETIC["task"], "max_steps": None, **length})
    fakes.end(run)
    with pytest.raises(SubmitError, match="is completed") as raised:
        run.resume()
    (uri, typed) = re.findall(r"sm-llm branch (\S+) (\S+)$", str(raised.value))[0]
    assert uri == run.uri
    try:
        (name,) = length
        assert getattr(plan(run.record.spec, typed)[0].job.task, name) == 2 * length[name]
    except PlanError as error:
        pytest.fail(str(error))


def test_F6_a_refused_resume_repeats_the_changes_that_were_asked_for(
    fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.use("sys.exit(1)")
    run = fakes.launch()
    fakes.end(run)
    for verb in (run.resume, run.branch):
        with pytest.raises(CheckpointError, match="no usable checkpoint") as raised:
            verb("task.not_finite.policy=skip", **{"task.optim.eps": 1e-6})
        (command,) = commands_in(str(raised.value))
        assert command == ["rerun", run.uri, "task.not_finite.policy=skip", "task.optim.eps=1.0e-06"]
    assert_accepted(command, monkeypatch)


CLOUD = (
    "backend.name=sagemaker",
    "backend.role=arn:aws:iam::111122223333:role/sm",
    "backend.region=us-west-2",
    "storage=s3://bucket/runs",
)
OTHER = "inputs.mine=s3://bucket/rows"


def synthetic_recipes() -> list[str]:
    specs = {name: load(name, ["storage=s3://bucket/runs"], environ={}).spec for name in recipe_files()}
    tasks = {name: it.task for name, it in specs.items() if isinstance(it, JobSpec)}
    return [name for name, task in tasks.items() if isinstance(getattr(task, "data", None), SyntheticData)]


def typed(text: str) -> list[str]:
    """The changes in a text, as a shell would split them."""
    return re.findall(r"(?:task|inputs)\.[\w.]+=[^\s,;)]+", text)


@pytest.mark.parametrize("recipe", synthetic_recipes())
def test_E17_the_remedies_for_random_tokens_work_on_every_recipe_of_them(recipe: str) -> None:
    machine = ["backend.max_run_seconds=86400"]
    machine += ["compute.instance_type=ml.p5.48xlarge"] if recipe == "smoke" else []
    spec = load(recipe, [*CLOUD, *machine], environ={}).spec
    assert isinstance(spec, JobSpec)
    if "nxd" not in recipe:  # which this version plans, and does not run
        (found,) = plan(recipe, *CLOUD, *machine)
        (warning,) = [it for it in found.warnings if "RANDOM TOKENS" in it]
        given = [it for it in typed(warning) if "format=synthetic" not in it]
        assert plan(recipe, *CLOUD, *machine, *given)[0].job.task.data.train == "s3://bucket/rows"
    with pytest.raises(SpecError) as raised:
        load(recipe, [*CLOUD, *machine, OTHER], environ={})
    (fault,) = raised.value.issues
    (channel,) = input_issues(spec, {"mine": "s3://bucket/rows"}, has_network=False)
    for changes in ([OTHER, *typed(fault.remedy)], typed(channel.remedy)):
        changed = load(recipe, [*CLOUD, *machine, *changes], environ={})
        assert changed.spec.task.data.train == "inputs.mine"  # type: ignore[union-attr]
        assert changed.spec.task.data.seq_length == spec.task.data.seq_length, "shared keys stay"  # type: ignore[union-attr]
        left_out = [name for name in ("rows", "validation_rows") if name in spec.task.data.model_fields_set]  # type: ignore[union-attr]
        note = f" (leaves out {', '.join(left_out)})" if left_out else ""
        assert changed.origins["task.data.format"] == f"override{note}"
