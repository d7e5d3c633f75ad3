"""Hyperparameters: one grammar through every way into the container, and nothing unknown gets by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.contract.hyperparameters import applied, overrides, read_hyperparameters, spelt
from sm_llm.contract.job_file import JobFile
from sm_llm.errors import SpecError
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.load import load
from sm_llm.spec.loading.yaml_text import from_typed
from tests.fixtures.sampling import number

if TYPE_CHECKING:
    from pathlib import Path

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))
AWKWARD = [
    "a b", "it's", '"q"', "$HOME", "a;b", "*", "line\nbreak", "", " x ", "1", "1e-4", "true", "null", "~", "#x", "a: b",
    "[1", "x,y", "😀", "\x7f", "\u2028", "\\n", "é", "%s", "-1", "--flag", "\t", "é\u0000",
]  # fmt: skip


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, all the way down; 1, 1.0 and True are three things, and so are 0.0 and -0.0."""
    return repr(left) == repr(right)


@given(VALUES)
@settings(max_examples=number(60, whole=300))
def test_HP07_any_value_survives_in_either_spelling(value: Any) -> None:
    """As the SageMaker SDK writes it, and as we do."""
    assert same(from_typed(json.dumps(value), "here").value, value)
    assert same(from_typed(spelt(value), "here").value, value)


@pytest.mark.parametrize("value", [*AWKWARD, ["a", "b"], [1, 2], {"k": "x,y"}, False, 0], ids=repr)
def test_HP01_awkward_values_are_the_same_value_in_both_spellings(value: Any) -> None:
    assert same(from_typed(json.dumps(value), "here").value, value)
    assert same(from_typed(spelt(value), "here").value, value)


@pytest.mark.parametrize("value", ["some text", "7E-5", "a,b"])
def test_HP17_a_pipelines_bare_text_is_text_where_text_is_wanted(value: str) -> None:
    job = job_file().changed([f"environment.X={value}"])
    assert job.spec.environment["X"] == value


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", 32), ("attention_dropout", 0.1), ("tie_word_embeddings", True)]
)
def test_f03_a_tuners_choices_below_a_models_config_keep_their_types(field: str, value: Any) -> None:
    """The SDK sends the text of a value's text, and a config takes any value until the model's checks."""
    text = json.dumps(str(value))
    changed, _ = applied(job_file(), {f"task.model.config.{field}": text})
    assert same(changed.spec.task.model.config[field], value)  # type: ignore[union-attr]


def job_file() -> JobFile:
    spec = load(
        {
            "name": "test",
            "task": {
                "kind": "train",
                "model": {"preset": "tiny"},
                "data": {"format": "synthetic", "seq_length": 32, "rows": 96},
                "max_steps": 20,
            },
        }
    ).spec
    assert isinstance(spec, JobSpec)
    return JobFile(run_id="run", attempt=1, run_uri="/runs/run", spec=spec, spec_digest="old")


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "hyperparameters.json"
    path.write_text(json.dumps(values))
    return path


def test_the_platforms_own_hyperparameters_are_no_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "sagemaker_program": '"train.py"',
            "sagemaker_container_log_level": "20",
            "mp_parameters": '{"tensor_parallel_degree": 2}',
            "_tuning_objective_metric": "loss",
            "sm_llm_run": "s3://bucket/run",
            "task.max_steps": "7",
        },
    )
    assert overrides(read_hyperparameters(path, [], {})) == ["task.max_steps=7"]


def test_the_toolkits_argv_is_not_believed_but_anybody_elses_is(tmp_path: Path) -> None:
    path = write(tmp_path, {"task.logging.sample_prompt": '"a b"'})
    argv = ["--task.logging.sample_prompt", "a", "--task.max_steps", "9"]
    known = read_hyperparameters(path, argv, {"SM_TRAINING_ENV": "{}"})
    assert known == {"task.logging.sample_prompt": '"a b"'}
    assert read_hyperparameters(path, ["--task.max_steps=9"], {})["task.max_steps"] == "9"


@pytest.mark.parametrize(
    "environ",
    [
        {"SM_HPS": '{"task.max_steps": 5, "task.logging.sample_prompt": "1"}'},
        {"SM_HP_TASK.MAX_STEPS": "5", "SM_HP_TASK.LOGGING.SAMPLE_PROMPT": '"1"'},
    ],
)
def test_without_the_file_variables_report(tmp_path: Path, environ: dict[str, str]) -> None:
    found = read_hyperparameters(tmp_path / "none", [], environ)
    job = job_file().changed(overrides(found))
    assert job.spec.task.max_steps == 5  # type: ignore[union-attr]
    assert job.spec.task.logging.sample_prompt == "1"  # type: ignore[union-attr]


@pytest.mark.parametrize("argv", [["--flag"], ["positional"], ["--a", "--b"], ["=x"]], ids=str)
def test_arguments_that_are_no_overrides_are_refused(tmp_path: Path, argv: list[str]) -> None:
    with pytest.raises(SpecError, match="is not an override"):
        read_hyperparameters(tmp_path / "none", argv, {})


def test_an_override_changes_the_spec_and_its_digest() -> None:
    job = job_file().changed(["task.optim.learning_rate=0.002", "task.max_steps=7"])
    again = load(job.spec)
    assert job.spec.task.max_steps == 7  # type: ignore[union-attr]
    assert job.spec_digest == again.digest != "old"
    assert job_file().changed([]).spec_digest == "old"


def test_DL31_a_misspelt_override_is_an_error_that_names_the_nearest_key() -> None:
    with pytest.raises(SpecError, match=r"task\.max_stepz.*unknown key.*task\.max_steps"):
        job_file().changed(["task.max_stepz=7"])


def test_what_follows_from_an_override_is_checked_again() -> None:
    with pytest.raises(SpecError, match="exactly one of max_steps"):
        job_file().changed(["task.max_tokens=7"])


@pytest.mark.parametrize("name", ["name", "storage", "backend.name", "inputs.data"])
def test_what_is_settled_at_launch_cannot_change_in_the_container(name: str) -> None:
    with pytest.raises(SpecError, match="settled once a job has been started"):
        job_file().changed([f"{name}=x"])


def test_a_file_that_is_not_an_object_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "hyperparameters.json"
    path.write_text("[1]")
    with pytest.raises(SpecError, match="not a JSON object"):
        read_hyperparameters(path, [], {})
