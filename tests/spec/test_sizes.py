"""Specifications of any size end in an error by name, never in a hang or a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError, SmLlmError, SpecError
from sm_llm.launcher.planner import plan
from sm_llm.models.config import normalise
from sm_llm.models.families.table import family
from sm_llm.models.presets import preset
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.defaults import read_defaults
from sm_llm.spec.loading.load import load
from sm_llm.spec.loading.yaml_text import LONGEST_TEXT, from_typed, from_yaml
from sm_llm.spec.schema import members
from sm_llm.spec.tree import DEEPEST, MOST_VALUES, Tree, from_python

if TYPE_CHECKING:
    from collections.abc import Iterator

DEEP = "[" * 3000 + "]" * 3000


def bomb(levels: int = 9, width: int = 9) -> str:
    """Aliases of aliases: a few lines that stand for 9**9 values."""
    lines = [f"a0: &a0 [{','.join(['lol'] * width)}]"]
    lines += [f"a{it}: &a{it} [{','.join([f'*a{it - 1}'] * width)}]" for it in range(1, levels)]
    return "\n".join([*lines, "name: x"])


def message(source: Any, *overrides: str, **fields: Any) -> str:
    with pytest.raises(SpecError) as caught:
        load(source, overrides, fields)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    file = folder / "job.yaml"
    file.write_text(text)
    return file


def test_f08_aliases_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    file = write(tmp_path, bomb())
    assert f"{file}:1: holds more than {MOST_VALUES:,} values" in message(file)
    merged = "a: &a {x: 1}\n" + "\n".join(
        f"b{it}: &b{it} {{<<: [{', '.join([f'*b{it - 1}' if it else '*a'] * 9)}]}}" for it in range(9)
    )
    assert "holds more than" in message(write(tmp_path, merged))


def test_f09_deep_nesting_is_refused_by_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, f"name: x\ntask: {DEEP}")
    assert f"{file}:2: is nested more than {DEEPEST} levels deep" in message(file)
    for text in (
        "a: " + "{b: " * 3000,
        "- " * 3000,
        "? " * 3000 + "a",
        "\n".join(" " * it + "a:" for it in range(900)),
    ):
        assert "is nested more than" in message(write(tmp_path, text))
    aliases = "a0: &a0 [1]\n" + "\n".join(f"a{it}: &a{it} [*a{it - 1}]" for it in range(1, 100))
    assert "is nested more than" in message(write(tmp_path, aliases))


def test_a_text_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    assert f"is longer than {LONGEST_TEXT:,} characters" in message(write(tmp_path, "# x\n" * LONGEST_TEXT))
    assert "is longer than" in message(Path("/dev/zero"))
    assert "holds more than" in message(write(tmp_path, "[" + "1," * 100_000 + "]"))


def test_overrides_and_python_values_are_bounded_alike() -> None:
    assert "task (override): is nested more than" in message("smoke", f"task={DEEP}")
    assert "task (override): is nested more than" in message("smoke", f"task={'[' * 3000}")
    assert "environment (override): holds more than" in message(
        "smoke", f"environment=[{bomb().split(chr(10))[0][4:]}, &b [1], {'*b,' * 9000}]"
    )
    deep: Any = 1
    for _ in range(3000):
        deep = [deep]
    assert "task.0.0.0 (Python argument): is nested more than" in message("smoke", task=deep)
    endless: dict[str, Any] = {}
    endless["task"] = endless
    assert "is nested more than" in message(endless)
    assert "is a number of 400,001 bits" in message("smoke", **{"compute.instance_count": 1 << 400_000})


def test_the_defaults_of_a_user_are_bounded_alike(tmp_path: Path) -> None:
    for text, reported in ((bomb(), "holds more than"), (f"vpc: {DEEP}", ":1: is nested more than")):
        with pytest.raises(SpecError, match=reported) as caught:
            read_defaults({}, write(tmp_path, text))
        assert str(tmp_path) in str(caught.value)


def test_numbers_longer_than_any_are_text(tmp_path: Path) -> None:
    digits = "9" * 10_000
    assert from_yaml(f"a: {digits}\nb: 0x{digits}", "x").value == {"a": digits, "b": f"0x{digits}"}
    assert from_typed(digits, "x").value == digits
    found = message(write(tmp_path, f"name: x\ncompute: {{instance_count: {digits}}}\ntask: {{kind: train}}"))
    assert "compute.instance_count (" in found
    assert "job.yaml:2): expected a whole number" in found


def test_f09_a_number_of_machines_has_a_bound(tmp_path: Path) -> None:
    assert "compute.instance_count (override): must be at most 10,000" in message(
        "smoke", f"compute.instance_count={10**17}"
    )
    assert "compute.instance_count (override): must be less than 2**63" in message(
        "smoke", f"compute.instance_count={10**23}"
    )
    task = "task: {kind: train, data: {format: synthetic, seq_length: 8}, max_steps: 1}"
    found = message(write(tmp_path, f"name: x\ncompute:\n  instance_count: {10**23}\n{task}"))
    assert f"job.yaml:3): must be less than 2**63 (9,223,372,036,854,775,808) (got {10**23})" in found


def numbers(kind: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every field of a number below a block, of all classes that may stand there."""
    for name, field in kind.model_fields.items():
        for member in members(field.annotation):
            if hasattr(member, "model_fields"):
                yield from numbers(member, (*path, name))
            elif member in (int, float):
                yield ".".join((*path, name))


def test_a_plan_ends_for_every_number_in_every_field() -> None:
    config = preset("tiny").config
    paths = {*numbers(JobSpec), *(f"task.model.config.{name}" for name, value in config.items() if type(value) is int)}
    assert len(paths) > 100
    ended = 0
    for path in sorted(paths):
        for value in (10**17, 10**400):
            try:
                plan("llama-2-7b-fsdp", f"{path}={value}")
            except SmLlmError as error:
                ended += path in str(error)
    assert ended > 100


def test_a_config_of_any_size_is_counted_or_refused() -> None:
    tiny = preset("tiny").config
    for name in family(tiny).fields:
        for value in (10**9, 10**17, 10**400):
            try:
                config = normalise({**tiny, name: value})
            except SmLlmError:
                continue
            family(config).parameter_count(config)
    for path in ("rope_theta", "num_hidden_layers"):
        with pytest.raises((SpecError, PlanError)):
            plan("smoke", f"task.model.config.{path}={10**400}")


def test_an_override_of_many_values_is_merged_at_once() -> None:
    """Not in the square of their number."""
    many = {f"k{it}": str(it) for it in range(9_000)}
    tree = Tree({"environment": {"own": "1"}}, {(): "x", ("environment",): "x", ("environment", "own"): "x"})
    tree.put(("environment",), from_python(many, "y"), JobSpec)
    assert tree.value["environment"] == {"own": "1", **many}
    assert tree.origin(("environment", "k8999")) == "y"
    assert tree.origin(("environment", "own")) == "x"
