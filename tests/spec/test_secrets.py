"""Secrets are referred to; whatever looks like one elsewhere is refused, and never shown."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.job import WorkflowSpec, spec_digest
from sm_llm.spec.loading.load import load
from sm_llm.spec.references import workflow_job

TOKEN = "hf_" + "qW7" * 12
DATA = {"format": "synthetic", "seq_length": 8}
JOB: dict[str, Any] = {
    "name": "job",
    "task": {"kind": "train", "model": {"preset": "tiny"}, "data": DATA, "max_steps": 1},
}


def refusal(source: dict[str, Any], *overrides: str, **fields: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(source, overrides, fields)
    assert TOKEN not in str(caught.value)
    assert TOKEN not in repr(caught.value.issues)
    return caught.value


@pytest.mark.parametrize(
    "reference",
    [
        "env:MY_TOKEN",
        "file:/run/secrets/token",
        "file:~/.cache/token",
        "secretsmanager:arn:aws:secretsmanager:eu-west-1:123456789012:secret:hub-token-AbCdEf",
        "ssm:/team/hub-token",
        "k8s:hub/token",
    ],
)
def test_references_are_taken_as_they_are(reference: str) -> None:
    assert load(JOB, [f"secrets.HF_TOKEN={reference}"]).spec.secrets == {"HF_TOKEN": reference}


@pytest.mark.parametrize("value", ["hunter2hunter2", TOKEN, "file:relative/path", "vault:x", 12345678, ["hunter2x"]])
def test_anything_else_is_refused_and_not_shown(value: Any) -> None:
    error = refusal({**JOB, "secrets": {"HF_TOKEN": value}})
    assert {fault.path.removesuffix(".0") for fault in error.issues} == {"secrets.HF_TOKEN"}
    assert "expected env:NAME" in str(error)
    assert str(value) not in str(error)


def test_a_mapping_in_place_of_a_reference_shows_nothing_either() -> None:
    assert "hunter2hunter2" not in str(refusal({**JOB, "secrets": {"HF_TOKEN": {"value": "hunter2hunter2"}}}))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("environment.ANYTHING", {**JOB, "environment": {"ANYTHING": TOKEN}}),
        ("hf_token", {**JOB, "hf_token": TOKEN}),
        ("task.hyperparameters.hf_token", {**JOB, "task": {**JOB["task"], "hyperparameters": {"hf_token": TOKEN}}}),
        ("task.model.config.x", {**JOB, "task": {**JOB["task"], "model": {"preset": "tiny", "config": {"x": TOKEN}}}}),
        ("task.max_steps", {**JOB, "task": {**JOB["task"], "max_steps": TOKEN}}),
        ("name", {**JOB, "name": TOKEN}),
    ],
)
def test_HP21_a_token_anywhere_is_refused_and_shown_nowhere(path: str, source: dict[str, Any]) -> None:
    error = refusal(source)
    assert path in [fault.path for fault in error.issues]
    assert "secrets." in str(error)


SCRIPT: dict[str, Any] = {"name": "job", "task": {"kind": "script", "entry": "main.py", "source": "src"}}


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"db_password": "planted1"}, "task.args.db_password"),
        ({"api-key": "planted1"}, "task.args.api-key"),
        (["--db-password=planted1"], "task.args.0"),
        (["--lr", "1", "--hub_token", "planted1"], "task.args.3"),
        (["-x", "--api_key", "planted1"], "task.args.2"),
    ],
)
def test_s08_a_password_among_the_arguments_of_a_program_is_refused_and_not_shown(args: Any, path: str) -> None:
    for source, prefix in (
        ({**SCRIPT, "task": {**SCRIPT["task"], "args": args}}, ""),
        ({"name": "w", "steps": {"a": {"task": {**SCRIPT["task"], "args": args}}}}, "steps.a."),
    ):
        error = refusal(source)
        assert f"{prefix}{path}" in [it.path for it in error.issues]
        assert "planted1" not in str(error)


@pytest.mark.parametrize(
    "args",
    [
        {"audio_token": "<|audio_1|>", "use_auth_token": True, "max_tokens": 128, "tokenizer": "gpt2-xl-1558"},
        ["--pad_token", "<pad0001>", "--token", "$HF_TOKEN_1", "--secret", "/run/secrets/a1", "--passes", "abcdefg1"],
        ["--token", "--next=abcdefgh1", "password", "abcdefgh1"],
    ],
)
def test_s08_arguments_that_are_no_passwords_stay(args: Any) -> None:
    assert load({**SCRIPT, "task": {**SCRIPT["task"], "args": args}}).spec


def test_HP21_a_token_in_an_override_or_a_python_field_is_refused_too() -> None:
    assert "(override)" in str(refusal(JOB, f"environment.HF={TOKEN}"))
    assert "(Python argument)" in str(refusal(JOB, environment={"HF": TOKEN}))
    refusal(JOB, f"environment.HF:{TOKEN}")
    refusal(JOB, f"{TOKEN}=1")


def test_HP21_a_variable_whose_name_states_secret_is_refused_whatever_its_shape() -> None:
    error = refusal({**JOB, "environment": {"WANDB_API_KEY": "0123456789abcdef", "TOKENIZERS_PARALLELISM": "false"}})
    assert [fault.path for fault in error.issues] == ["environment.WANDB_API_KEY"]
    assert "secrets.WANDB_API_KEY=env:WANDB_API_KEY" in str(error)
    assert "0123456789abcdef" not in str(error)


def test_HP21_a_token_in_a_file_is_named_by_its_line(tmp_path: Any) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"name: job\nenvironment:\n  HF: {TOKEN}\ntask: {JOB['task']}\n".replace("'", '"'))
    with pytest.raises(SpecError, match=r"job\.yaml:3") as caught:
        load(file)
    assert TOKEN not in str(caught.value)


def test_a_name_is_a_variable_and_set_once() -> None:
    assert "not a name" in str(refusal({**JOB, "secrets": {"a-b": "env:A"}}))
    assert "keep one" in str(refusal({**JOB, "secrets": {"A": "env:A"}, "environment": {"A": "1"}}))


def test_steps_inherit_secrets_and_the_digest_ignores_where_they_are_kept() -> None:
    steps = {"a": {"task": JOB["task"], "secrets": {"B": "env:STEP"}}}
    flow = load({"name": "w", "steps": steps, "secrets": {"A": "env:A", "B": "env:B"}}).spec
    assert isinstance(flow, WorkflowSpec)
    assert workflow_job(flow, "a").secrets == {"A": "env:A", "B": "env:STEP"}
    assert spec_digest(flow) == spec_digest(load({"name": "w", "steps": {"a": {"task": JOB["task"]}}}).spec)
    refusal({"name": "w", "steps": {"a": {"task": JOB["task"], "secrets": {"B": TOKEN}}}})


@pytest.mark.parametrize(
    "override",
    [
        "environment.DB_PASSWORD=planted", "environment.PGPASS=planted", "environment.MY_PWD=planted",
        "environment.AUTH=planted", "environment.GH_PAT=planted", "environment.WANDB_KEY=planted",
        "environment.DB=postgres://u:planted@h/d", "environment.Z=redis://:planted@h",
        "environment.SLACK=https://hooks.slack.com/services/T0/B0/planted", "environment.WEBHOOK_URL=planted",
        "environment.URL=https://h/?token=planted", "environment.SMTP_PASS=planted", "environment.SENTRY_DSN=planted",
        "task.logging.sinks.mlflow.tracking_uri=http://u:planted@h",
    ],
)  # fmt: skip
def test_s09b_names_and_shapes_of_secrets_are_refused_and_not_shown(override: str) -> None:
    error = refusal(JOB, override)
    assert "planted" not in str(error)
    assert override.split("=")[0] in [fault.path for fault in error.issues]


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATHS", "COMPASS", "MONKEY", "AUTHOR", "PATIENCE"])
def test_names_that_only_sound_like_secrets_are_accepted(name: str) -> None:
    assert load(JOB, [f"environment.{name}=value"]).spec.environment == {name: "value"}
