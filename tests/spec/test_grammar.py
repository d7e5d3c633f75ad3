"""One grammar of changes for jobs, workflows and their steps, and values that keep where they were typed."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.contract.hyperparameters import of_arguments, overrides
from sm_llm.errors import SpecError
from sm_llm.spec.loading.load import load
from sm_llm.spec.loading.overrides import CommandLine, is_override, texts, without_step


def workflow_value(overrides: list[Any], path: str) -> Any:
    value: Any = load("tiny-local", overrides).spec.model_dump()
    for key in path.split("."):
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("task.max_steps=7", "steps.train.task.max_steps"),
        ("steps.train.task.max_steps=7", "steps.train.task.max_steps"),
        ("task.model.config.num_hidden_layers=7", "steps.train.task.model.config.num_hidden_layers"),
        ("task.parallelism.tensor_parallel_degree=1", "steps.train.task.parallelism.tensor_parallel_degree"),
        ("task.train_tokenizer.vocab_size=777", "steps.prepare.task.train_tokenizer.vocab_size"),
        ({"task.max_steps": 7}, "steps.train.task.max_steps"),
        ({"task": {"max_steps": 7}}, ""),
    ],
)
def test_a_path_of_the_only_step_that_has_it_needs_no_step(override: Any, path: str) -> None:
    if not path:
        with pytest.raises(SpecError, match=r"task \(Python argument\): several steps have it: prepare, train"):
            load("tiny-local", [override])
        return
    wanted = 777 if "vocab" in path else 1 if "degree" in path else 7
    assert workflow_value([override], path) == wanted


def test_a_path_of_several_steps_or_of_none_names_what_to_write() -> None:
    with pytest.raises(SpecError) as raised:
        load("tiny-local", ["task.tokenizer=x", "task.max_step=3"])
    several, none = raised.value.issues
    assert str(several) == (
        "task.tokenizer (override): several steps have it: prepare, train. "
        "Write steps.prepare.task.tokenizer or steps.train.task.tokenizer"
    )
    assert str(none) == "task.max_step (override): unknown key: no step has it. Did you mean task.max_steps?"
    assert workflow_value(["steps.train.task.tokenizer=x"], "steps.train.task.tokenizer") == "x"


def test_a_step_that_is_a_run_of_its_own_is_changed_by_its_path_in_the_workflow() -> None:
    typed = [CommandLine("steps.train.task.max_steps=3"), "task.seed=1", {"steps.train.task.micro_batch_size": 2}]
    own = without_step(typed, "train")
    assert own == ["task.max_steps=3", "task.seed=1", {"task.micro_batch_size": 2}]
    assert isinstance(own[0], CommandLine)
    assert texts(own, {"task.eps": 1}) == [
        "task.max_steps=3", "task.seed=1", "task.micro_batch_size=2", "task.eps=1"
    ]  # fmt: skip


def test_what_was_typed_in_a_shell_reports_it() -> None:
    loaded = load("smoke", [CommandLine("task.max_steps=3"), "task.seed=1"], {"task.micro_batch_size": 1})
    origins = [loaded.origins[f"task.{name}"] for name in ("max_steps", "seed", "micro_batch_size")]
    assert origins == ["command line", "override", "Python argument"]
    with pytest.raises(SpecError, match=r"task\.max_step \(command line\): unknown key"):
        load("smoke", [CommandLine("task.max_step=3")])


def test_an_override_that_is_neither_text_nor_a_mapping_is_refused_in_words() -> None:
    with pytest.raises(SpecError, match="an override is text or a mapping, not of type int"):
        load("smoke", [3])  # type: ignore[list-item]
    assert load("smoke", [{"task": {"max_steps": 3}}]).spec.task.max_steps == 3  # type: ignore[union-attr]


def test_words_that_change_a_job_are_reported_from_places() -> None:
    assert all(map(is_override, ["task.text_field=body", "backend.name=sagemaker", "secrets.A=env:A", "name=x"]))
    assert not any(map(is_override, ["texts/", "a.jsonl", "folder=1/x", "s3://b/k=v"]))


LENGTHS = {"max_steps": 9, "max_tokens": 9, "max_epochs": 1.0}


@pytest.mark.parametrize("held", LENGTHS)
@pytest.mark.parametrize("typed", LENGTHS)
def test_the_suggested_null_works_whichever_length_was_typed(held: str, typed: str) -> None:
    if held == typed:
        return
    base = [f"task.{name}={LENGTHS[name] if name == held else 'null'}" for name in LENGTHS]
    wanted = f"task.{typed}={LENGTHS[typed]}"
    with pytest.raises(SpecError) as raised:
        load("smoke", [*base, wanted])
    (fault,) = raised.value.issues
    ways = {
        kept: change for change, kept in (way.split(" keeps ") for way in fault.remedy.split("e.g. ")[1].split(", "))
    }
    task = load("smoke", [*base, wanted, *ways[typed].split()]).spec.task  # type: ignore[union-attr]
    assert getattr(task, typed) == LENGTHS[typed]
    assert getattr(task, held) is None


SCRIPT = {"name": "x", "task": {"kind": "script", "entry": "-m x"}}


@pytest.mark.parametrize("args", [["a", "b"], []])
@pytest.mark.parametrize("change", ["task.args.0=x", {"task.args.0": "x"}, "task.args.0.1=x"])
def test_S12_09_an_entry_of_a_list_is_not_changed_alone(args: list[str], change: Any) -> None:
    with pytest.raises(
        SpecError, match=r"task\.args is a list, whose entries cannot be .*Write the whole list: task\.args"
    ):
        load({**SCRIPT, "task": {**SCRIPT["task"], "args": args}}, [change])  # type: ignore[dict-item]


def test_S12_09_a_number_is_not_a_name_of_an_argument() -> None:
    with pytest.raises(SpecError, match=r"task\.args\.0 .*a number is the place of a word in a list"):
        load(SCRIPT, ["task.args.0=x"])
    kept = load({**SCRIPT, "task": {**SCRIPT["task"], "args": {"a": [1]}}}, ["task.args.b=2"]).spec  # type: ignore[dict-item]
    assert kept.task.args == {"a": [1], "b": 2}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "typed",
    [
        ["task.max_steps=5", "task.max_steps=6"],
        ["task.max_steps=5", "steps.train.task.max_steps=6"],
        ["task.optim.schedule=linear", "task.optim={schedule: cosine}"],
        ["task.start=scratch", "task.start.pretrained=x"],
        ["task.start.pretrained=x", "task.start=scratch"],
    ],
)
def test_12e_6_a_key_that_is_typed_twice_with_two_values_is_refused(typed: list[str]) -> None:
    with pytest.raises(SpecError) as raised:
        load("tiny-local", [CommandLine(it) for it in typed])
    assert [it.code for it in raised.value.issues] == ["value-given-twice"]
    assert "given twice, with different values" in str(raised.value)
    assert "(command line)" in str(raised.value)


def test_12e_6_what_agrees_or_lies_beside_is_not() -> None:
    same = ["task.max_steps=5", "task.max_steps=5", "task.optim={schedule: linear}", "task.optim.eps=1e-6"]
    load("tiny-local", [CommandLine(it) for it in same])
    sinks = ["task.logging.sinks.tensorboard={}", "task.logging.sinks.tensorboard.folder=x"]
    load("tiny-local", [CommandLine(it) for it in sinks])
    assert workflow_value(["task.max_steps=5", "task.max_steps=6"], "steps.train.task.max_steps") == 6, "in Python"


def test_12e_6_so_are_keys_of_one_mapping_and_hyperparameters() -> None:
    for given in ({"task.max_steps": 5, "steps": {"train": {"task": {"max_steps": 6}}}},):
        with pytest.raises(SpecError, match="given twice"):
            load("tiny-local", [given])
        with pytest.raises(SpecError, match="given twice"):
            load("tiny-local", (), given)
    with pytest.raises(SpecError, match="given twice"):
        load("smoke", overrides({"task.optim": "{eps: 1e-6}", "task.optim.eps": "1e-7"}))
    with pytest.raises(SpecError, match="is given twice: 5 and 6"):
        of_arguments(["--task.max_steps", "5", "--task.max_steps=6"])


@pytest.mark.parametrize("key", [3, None, b"name", ("task", "seed"), pytest.param(10**5000, id="long")])
def test_a_key_that_is_no_text_is_refused_in_words(key: Any) -> None:
    with pytest.raises(SpecError, match="a field is named by a dotted path"):
        load("tiny-local", [{key: 4}])
    with pytest.raises(SpecError, match=r"task\.optim \(Python argument\): has the key .*, and keys are text"):
        load("smoke", [{"task": {"optim": {key: 4, str(type(key)): 5}}}])


@pytest.mark.parametrize(
    ("typed", "words"),
    [("--lr 3", "[--lr, 3]"), ("--name 'a b'", '[--name, "a b"]'), ("it's", '["it\'s"]'), ("-v", "[-v]")],
)
def test_E17_a_text_in_place_of_arguments_is_taken_apart_as_a_shell_does(typed: str, words: str) -> None:
    script = {"name": "own", "task": {"kind": "script", "entry": "a.py"}}
    with pytest.raises(SpecError) as raised:
        load(script, [{"task.args": typed}])
    (issue,) = raised.value.issues
    assert issue.remedy == f"Write {words}"
    assert load(script, [f"task.args={words}"]).spec.task.args  # type: ignore[union-attr]
