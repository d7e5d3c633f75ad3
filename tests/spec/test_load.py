"""Loading: every form of a specification, merge order, origins, and all faults at once."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.errors import SpecError
from sm_llm.spec.job import JobSpec, WorkflowSpec, spec_digest
from sm_llm.spec.loading.load import Loaded, load
from sm_llm.spec.loading.overrides import parse_overrides
from sm_llm.spec.loading.yaml_text import to_yaml
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.training import ModelSpec, SyntheticData
from sm_llm.spec.tree import Tree
from tests.fixtures.sampling import number

JOB: dict[str, Any] = {
    "name": "small",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 8},
        "max_steps": 3,
    },
}
YAML = """\
name: small
task:
  kind: train
  model: {preset: tiny}
  data:
    format: synthetic
    seq_length: 8
  max_steps: 3
"""


@pytest.fixture
def load_clean(tmp_path: Path) -> Any:
    """``load`` with an empty environment and no user configuration."""

    def run(source: Any, *overrides: str, environ: dict[str, str] | None = None, **fields: Any) -> Loaded:
        return load(source, overrides, fields, environ={"XDG_CONFIG_HOME": str(tmp_path / "config"), **(environ or {})})

    return run


def faults(run: Any, *args: Any, **fields: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        run(*args, **fields)
    return [str(fault) for fault in caught.value.issues]


def test_yaml_mapping_object_and_recipe_are_equal(load_clean: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(YAML)
    task = TrainTask(model=ModelSpec(preset="tiny"), data=SyntheticData(seq_length=8), max_steps=3)
    forms = [load_clean(source) for source in (str(file), file, JOB, JobSpec(name="small", task=task))]
    assert all(form.spec == forms[0].spec for form in forms)
    assert {form.digest for form in forms} == {spec_digest(forms[0].spec)}
    assert isinstance(load_clean("tiny-local").spec, WorkflowSpec)


def test_loading_changes_nothing_it_was_given(load_clean: Any) -> None:
    before = copy.deepcopy(JOB)
    load_clean(JOB, "task.max_steps=9", "name=123", "environment.A=1")
    assert before == JOB


def test_later_ones_win_and_every_value_knows_its_origin(load_clean: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(YAML)
    loaded = load_clean(
        file, "task.seed=1", "task.deterministic=true", environ={"SM_LLM_STORAGE": "/from/env"}, **{"task.seed": 2}
    )
    assert loaded.spec.task.seed == 2
    assert loaded.spec.storage == "/from/env"
    assert loaded.origins["task.seed"] == "Python argument"
    assert loaded.origins["task.deterministic"] == "override"
    assert loaded.origins["task.data.seq_length"] == f"{file}:7"
    assert loaded.origins["storage"] == "environment SM_LLM_STORAGE"
    assert "task.optim.learning_rate" not in loaded.origins


def test_a_storage_in_the_file_beats_the_users_default(load_clean: Any) -> None:
    assert load_clean({**JOB, "storage": "/mine"}, environ={"SM_LLM_STORAGE": "/env"}).spec.storage == "/mine"
    assert load_clean(JOB, "storage=/o", environ={"SM_LLM_STORAGE": "/env"}).spec.storage == "/o"


def test_an_object_with_its_storage_unset_takes_the_users_default(load_clean: Any) -> None:
    spec = JobSpec.model_validate(JOB)
    assert load_clean(spec, environ={"SM_LLM_STORAGE": "/env"}).spec.storage == "/env"
    assert load_clean(spec.model_copy(update={"storage": "./runs"}), environ={"SM_LLM_STORAGE": "/e"}).spec.storage


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("task.optim.learning_rate=1e-4", 1e-4),
        ("task.optim.learning_rate=1", 1.0),
        ("task.max_steps=1e2", 100),
        ("task.max_steps=1_000", 1000),
        ("task.optim.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("task.optim.max_grad_norm=null", None),
        ("task.logging.sample_prompt=off", "off"),
        ("task.logging.sample_prompt=007", "007"),
        ("task.logging.sample_prompt='true'", "true"),
        ("task.logging.sample_prompt='[a, b]'", "[a, b]"),
        ("task.logging.sample_prompt=Name: x", "Name: x"),
        ("task.logging.sample_prompt=[a, b", "[a, b"),
        ("task.logging.sample_prompt='null'", "null"),
        ("task.logging.sample_prompt=a=b", "a=b"),
        ("task.logging.sample_prompt=", ""),
        ("task.model.config.rope_theta=1e6", 1e6),
        ("task.model.config.note=yes", "yes"),
        ("task.deterministic=true", True),
        ("environment.OMP_NUM_THREADS=1", "1"),
        ("environment.VERSION=1.10", "1.10"),
        ("environment.FLAG=true", "true"),
        ("storage=2026", "2026"),
    ],
)
def test_an_override_gets_the_type_that_is_wanted(load_clean: Any, override: str, value: Any) -> None:
    found: Any = load_clean(JOB, override).spec
    for key in override.partition("=")[0].split("."):
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_HP05_false_stays_false(load_clean: Any) -> None:
    spec = load_clean(JOB, "task.data.shuffle=false", "environment.A=False", "environment.B=").spec
    assert spec.task.data.shuffle is False
    assert spec.environment == {"A": "False", "B": ""}
    assert load_clean(JOB, **{"task.data.shuffle": False}).spec.task.data.shuffle is False
    assert "expected true or false" in faults(load_clean, JOB, "task.data.shuffle=0")[0]


# Surrogates cannot be encoded in a request, and no argument of a program has a NUL: both are refused.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(max_examples=number(25, whole=500))
@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
        max_size=4,
    )
)
def test_yaml_override_and_python_field_are_lossless_and_equal(values: dict[str, Any]) -> None:
    typed = load(JOB, [f"task.model.config.{key}={to_yaml(value)}" for key, value in values.items()], environ={})
    given_ = load(JOB, (), {"task.model.config": values}, environ={})
    assert typed.spec.task.model.config == given_.spec.task.model.config == values  # type: ignore[union-attr]
    assert typed.digest == given_.digest


def test_a_mapping_merges_and_another_kind_replaces(load_clean: Any) -> None:
    merged = load_clean(JOB, task={"optim": {"learning_rate": 0.5}, "data": {"rows": 7}}).spec.task
    assert (merged.optim.learning_rate, merged.data.rows, merged.data.seq_length) == (0.5, 7, 8)
    replaced = load_clean(JOB, "task.data={format: rows, train: /r, seq_length: 4}").spec.task.data
    assert (replaced.format, replaced.seq_length) == ("rows", 4)
    assert load_clean({**JOB, "environment": {"A": "1"}}, "environment={}").spec.environment == {}


def test_a_workflow_is_overridden_step_by_step(load_clean: Any) -> None:
    spec = load_clean("tiny-local", "steps.train.task.max_steps=5", **{"steps.prepare.task.seed": 3}).spec
    assert spec.steps["train"].task.max_steps == 5
    assert spec.steps["prepare"].task.seed == 3


def test_all_faults_come_at_once_with_path_value_and_remedy(load_clean: Any) -> None:
    found = faults(
        load_clean,
        {**JOB, "name": "bad_name", "storage": "gs://bucket/x"},
        "task.optim.lerning_rate=1",
        "task.max_steps=many",
        "task.precision.compute=fp23",
        "task.start={q: 1}",
        "task.optim.betas=[0.1]",
        "just-text",
        "task.optim.eps=0",
    )
    assert found == [
        "just-text: an override is written key.path=value (got 'just-text'). For example task.max_steps=100",
        "task.max_steps (override): expected a whole number or null (got 'many')",
        "task.optim.betas (override): expected a list of 2 (each item a number) (got [0.1])",
        "task.optim.eps (override): must be greater than 0 (got 0)",
        "task.optim.lerning_rate (override): unknown key (got 1). Did you mean task.optim.learning_rate?",
        "task.precision.compute (override): expected one of auto, bf16, fp32, fp8 (got 'fp23'). Did you mean fp32?",
        "task.start (override): expected one of auto, scratch or a mapping with pretrained or "
        "a mapping with checkpoint, allow_other_data (got {'q': 1})",
        "name (Python): a name has letters, digits and hyphens only, none at its ends (got 'bad_name'). Try bad-name",
        "storage (Python): gs:// is not supported (got 'gs://bucket/x'). Give a folder, or one of file://, s3://",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("task.max_steps=true", "expected a whole number or null (got True)"),
        ("task.max_steps=2.5", "expected a whole number or null (got 2.5)"),
        ("task.max_steps='3'", "expected a whole number or null (got '3')"),
        ("task.max_steps=0", "must be at least 1"),
        ("task.optim.learning_rate=.inf", "must be finite"),
        ("task.optim.learning_rate='1e-4'", "expected a number"),
        ("task.data.format=row", "choose rows or json_rows or synthetic or stream (got 'row'). Did you mean rows?"),
        ("task.kind=trian", "precompile or script (got 'trian'). Did you mean train?"),
        ("task=3", "expected a mapping with kind: train | prepare | fetch"),
        ("backend=sagemaker", "Write backend.name=sagemaker"),
        ("task.data=synthetic", "Write task.data.format=synthetic"),
        ("task.data=null", "expected a mapping with format:"),
        ("name=null", "expected text"),
        ("name.first=x", "expected text"),
        ("name=ünï cödé", "Try uni-code"),
        ("task.max_steps", "Write task.max_steps=VALUE"),
        ("", "For example task.max_steps=100"),
        ("task.seed.x=1", "expected a whole number"),
        ("learning_rate=1", "Did you mean task.optim.learning_rate?"),
        ("task.data.train=x", "It belongs to task.data.format: rows"),
        ("a..b=1", "an override is written key.path=value"),
        ("--seed=1", "--help"),
        ("task.environment.A=1", "Did you mean environment?"),
        ("task.optim.betas={a: 1, a: 2}", "(got '{a: 1, a: 2}'). Check its brackets and quotes, and that it gives no"),
        ("task.optim.betas=[0.9, 0.95", "(got '[0.9, 0.95'). Check its brackets"),
    ],
)
def test_a_wrong_override_is_explained(load_clean: Any, override: str, expected: str) -> None:
    found = faults(load_clean, JOB, override)
    assert expected in found[0]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ({"environment": {"A": "x\0"}}, "environment.A"),
        ({"environment.A": "a\udcff"}, "environment.A"),
        ('environment.A="\\ud800"', "environment.A"),
        ('storage="/tmp/a\\0b"', "storage"),
        ({"task.logging.sinks": {"tensorboard": {"folder": "/a\0b"}}}, "task.logging.sinks.tensorboard.folder"),
        ({"inputs": {"a\udcff": "/x"}}, "inputs.a\udcff"),
        ({"task.optim.betas": [0.9, "\0"]}, "task.optim.betas.1"),
    ],
)  # fmt: skip
def test_text_that_nothing_can_hold_is_refused_wherever_it_is(load_clean: Any, override: Any, path: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_clean(JOB, override)
    found = [it for it in caught.value.issues if it.path == path]
    assert [it.code for it in found] in (["text-holds-nul"], ["text-not-unicode"]), caught.value.issues


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("storage=[x]", "[x]"),
        ("storage={a: b}", "{a: b}"),
        ("name=true", "true"),
        ("task.tokenizer={a: b}", "{a: b}"),
        ("task.tokenizer=False", "False"),
        ("inputs.x=[a, b]", "[a, b]"),
        ('environment.A={"a": 1}', '{"a": 1}'),
        ("task.data.train=[a]", "[a]"),
    ],
)
def test_a_list_a_mapping_or_a_flag_is_not_a_text_until_it_is_quoted(
    load_clean: Any, override: str, value: str
) -> None:
    job = {**JOB, "task": {**JOB["task"], "data": {"format": "rows", "train": "/x", "seq_length": 8}}}
    (found,) = (it for it in faults(load_clean, job, override) if "If text is meant" in it)
    assert f"quote it: {json.dumps(value)} (in a shell: " in found
    path = override.partition("=")[0]
    (typed,) = shlex.split(found.partition("(in a shell: ")[2].rstrip(")"))
    assert parse_overrides([typed])[0][0] == (tuple(path.split(".")), Tree(value, {(): "override"}))


@pytest.mark.parametrize("line", ["name: true", "storage: [x]", "storage: {a: b}", "storage: True"])
def test_the_same_in_a_file(load_clean: Any, tmp_path: Path, line: str) -> None:
    key = line.partition(":")[0]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({it: JOB[it] for it in JOB if it != key}) + line + "\n")
    (found,) = faults(load_clean, tmp_path / "job.yaml")
    assert f"{key} ({tmp_path / 'job.yaml'}:" in found
    assert "expected text (got " in found


def test_no_part_of_a_secret_is_shown_where_its_type_is_wrong(load_clean: Any) -> None:
    for override in ("environment.API_KEY=[hunter22hunter]", "environment.API_KEY={a: hunter22hunter}",
                     "secrets.A=[hunter22hunter]", "environment={API_KEY: hunter22hunter}"):  # fmt: skip
        assert "hunter22" not in str(faults(load_clean, JOB, override)), override


def test_a_bound_is_a_number_that_can_be_typed(load_clean: Any) -> None:
    (found,) = faults(load_clean, JOB, "task.data.seq_length=99999999")
    assert "must be at most 16,777,216 (got 99999999)" in found


def test_an_empty_name_and_a_folder_are_no_specification(load_clean: Any, tmp_path: Path) -> None:
    assert faults(load_clean, "")[0].startswith("'': neither a recipe nor a file. Recipes: ")
    assert faults(load_clean, str(tmp_path))[0].startswith(f"{tmp_path}: is a folder. Recipes: ")


def test_DL31_an_unknown_override_is_an_error_with_the_nearest_key(load_clean: Any) -> None:
    assert "Did you mean task.max_epochs?" in faults(load_clean, JOB, "task.num_epochs=3")[0]
    assert "Did you mean steps.train.task.max_steps?" in faults(load_clean, "tiny-local", "max_steps=3")[0]


def test_missing_keys_state_what_is_expected(load_clean: Any) -> None:
    found = faults(load_clean, {"task": {"kind": "train"}})
    assert found[0].startswith("name: missing; expected text") or found[0].startswith("name (Python): missing")
    assert "expected a mapping with format: rows | json_rows | synthetic | stream" in found[1]


def test_python_values_are_not_guessed_at(load_clean: Any) -> None:
    assert 'Write "1"' in faults(load_clean, JOB, environment={"A": 1})[0]
    assert "expected a whole number" in faults(load_clean, JOB, **{"task.max_steps": "3"})[0]
    assert load_clean(JOB, storage=Path("/there")).spec.storage == "/there"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("tiny-locl", "Did you mean tiny-local?"),
        ("no/such/job.yaml", "neither a recipe nor a file. Recipes: "),
        (Path(), "is a folder. Recipes: "),
    ],
)
def test_a_source_that_is_not_there_is_reported(load_clean: Any, source: Any, expected: str) -> None:
    assert expected in faults(load_clean, source)[0]


def test_a_file_that_is_not_a_mapping_is_refused(load_clean: Any, tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- a\n")
    assert "a specification is a mapping" in faults(load_clean, file)[0]
    file.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in faults(load_clean, file)[0]
    file.write_text("")
    assert "name" in faults(load_clean, file)[0]


def test_a_block_with_all_its_fields_commented_out_is_its_defaults(load_clean: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(YAML + "  optim:\n    # eps: 1\n  validation:\n  tokenizer:\n")
    assert load_clean(file).spec == load_clean(JOB).spec
    file.write_text(YAML.replace("  model: {preset: tiny}", "  model: null"))
    assert "expected a mapping with preset, path, config (got None)" in faults(load_clean, file)[0]


def test_a_fault_in_a_file_names_its_line(load_clean: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(YAML + "  optim:\n    learning_rat: 1\n")
    assert faults(load_clean, file) == [
        f"task.optim.learning_rat ({file}:10): unknown key (got 1). Did you mean task.optim.learning_rate?"
    ]


def test_the_digest_knows_meaning_not_name_or_place(load_clean: Any) -> None:
    digest = load_clean(JOB).digest
    assert load_clean(JOB, "name=other", "storage=/else").digest == digest
    assert load_clean(JOB, "task.optim.learning_rate=3e-4").digest == digest
    assert load_clean(JOB, "task.seed=1").digest != digest
    assert load_clean(JOB, "environment.A=1").digest != digest
    assert JobSpec.model_validate_json(load_clean(JOB).spec.model_dump_json()) == load_clean(JOB).spec


def test_null_takes_an_entry_out_of_a_mapping_of_texts_and_is_refused_where_there_is_none(load_clean: Any) -> None:
    job = {**JOB, "environment": {"A": "1", "B": "2"}, "secrets": {"T": "env:T"}}
    left = load_clean(job, "environment.A=null", {"secrets": {"T": None}})
    assert (left.spec.environment, left.spec.secrets) == ({"B": "2"}, {})
    assert not [it for it in left.origins if it.startswith(("environment.A", "secrets.T"))]
    with pytest.raises(SpecError, match=r"environment\.C .*expected text"):
        load_clean(job, "environment.C=null")
    # null is a value there.
    script = {"name": "s", "task": {"kind": "script", "entry": "a.py", "args": {"x": 1}}}
    assert load_clean(script, "task.args.x=null").spec.task.args == {"x": None}


def test_E17_another_format_keeps_what_other_changes_state_and_what_nobody_knows(load_clean: Any) -> None:
    rows = ("task.data.rows=5", "task.data.format=rows", "task.data.train=/r")
    with pytest.raises(SpecError, match=r"task\.data\.rows"):
        load_clean(JOB, *rows)
    with pytest.raises(SpecError, match=r"task\.data\.rowz"):
        load_clean(JOB, "task.data.rowz=5", *rows[1:])
    changed = load_clean({**JOB, "task": {**JOB["task"], "data": {**JOB["task"]["data"], "rows": 9}}}, *rows[1:])
    assert changed.spec.task.data.seq_length == 8
    assert changed.origins["task.data.format"] == "override (leaves out rows)"
