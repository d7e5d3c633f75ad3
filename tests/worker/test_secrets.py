"""Secrets in the worker: where they come from, and that none of them is written anywhere."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import moto
import pytest
from worker_jobs import events, job_environment, job_file

from sm_llm.errors import RunFailed
from sm_llm.redaction import HIDDEN
from sm_llm.worker.inputs.secrets import resolve, secrets_at_hand
from sm_llm.worker.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VALUE = "planted-value-31415926"


def test_a_secret_comes_from_a_variable_a_file_or_a_mounted_secret(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "token").write_text(f"{VALUE}\r\n")
    references = {"A": "env:MINE", "B": f"file:{tmp_path}/hub/token", "C": "k8s:hub/token"}
    assert resolve(references, {"MINE": VALUE}, tmp_path) == {"A": VALUE, "B": VALUE, "C": VALUE}


def test_all_that_cannot_be_had_is_named_at_once_without_a_value(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    references = {
        "GOOD": "env:GOOD",
        "A": "env:NOT_SET",
        "B": f"file:{tmp_path}/nothing",
        "C": f"file:{tmp_path}/empty",
        "D": f"file:{tmp_path}/bytes",
        "E": "k8s:hub/token",
    }
    with pytest.raises(RunFailed) as caught:
        resolve(references, {"GOOD": VALUE}, tmp_path)
    text = str(caught.value)
    assert all(f"secrets.{name}: " in text for name in "ABCDE")
    assert "NOT_SET is not set where the worker runs" in text
    assert "No such file" in text
    assert "GOOD" not in text
    assert VALUE not in text


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """moto in place of AWS."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_DEFAULT_REGION", "eu-west-1"),
    ):
        monkeypatch.setenv(name, value)
    with moto.mock_aws():
        import boto3

        yield boto3


def test_a_secret_comes_from_secrets_manager_or_the_parameter_store(aws: Any) -> None:
    arn = aws.client("secretsmanager", "us-west-2").create_secret(Name="hub", SecretString=VALUE)["ARN"]
    aws.client("ssm").put_parameter(Name="/team/hub", Value=VALUE, Type="SecureString")
    found = resolve({"A": f"secretsmanager:{arn}", "B": "ssm:/team/hub"}, {})
    assert found == {"A": VALUE, "B": VALUE}, "the ARN's region, not the default one; decrypted"


def test_what_aws_refuses_is_named_with_the_permission_it_takes(aws: Any) -> None:
    arn = "arn:aws:secretsmanager:us-west-2:123456789012:secret:gone-AbCdEf"
    blob = aws.client("secretsmanager").create_secret(Name="blob", SecretBinary=b"\0")["ARN"]
    with pytest.raises(RunFailed) as caught:
        resolve({"A": f"secretsmanager:{arn}", "B": "ssm:/gone", "C": f"secretsmanager:{blob}"}, {})
    text = str(caught.value)
    assert "ResourceNotFoundException" in text
    assert "needs secretsmanager:GetSecretValue" in text
    assert "needs ssm:GetParameter" in text
    assert "holds bytes" in text


def test_a_secret_is_a_variable_while_the_job_runs_and_hidden_from_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", VALUE)
    monkeypatch.setenv("B", "before")
    with secrets_at_hand({"A": "env:MINE", "B": "env:MINE"}) as hidden:
        assert (os.environ["A"], os.environ["B"]) == (VALUE, VALUE)
        print("out", VALUE)
        print("err", VALUE, file=sys.stderr, flush=True)
        sys.stdout.writelines([VALUE])
        assert hidden(f"x{VALUE}x") == f"x{HIDDEN}x"
    assert (os.environ.get("A"), os.environ["B"]) == (None, "before")
    out, err = capsys.readouterr()
    assert (out, err) == (f"out {HIDDEN}\n{HIDDEN}", f"err {HIDDEN}\n")


def test_s08_a_value_that_is_too_short_to_be_hidden_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "abcd")
    warnings: list[str] = []
    with secrets_at_hand({"SHORT": "env:MINE"}, warn=warnings.append):
        pass
    (warning,) = warnings
    assert warning.startswith("secrets.SHORT: a value of 4 characters is not hidden")
    assert "abcd" not in warning


def test_s09_credentials_of_addresses_are_hidden_from_output_and_events_without_any_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(context: Any, job: Any) -> None:
        print("logging to http://user:planted@host/")
        context.notice("tracker http://user:planted@host/")
        raise ValueError("no answer from http://user:planted@host/")

    monkeypatch.setattr("sm_llm.worker.tasks.prepare.run", run)
    job = job_file({"kind": "prepare", "seq_length": 16, "sources": ["builtin:python-docs"]}, tmp_path / "run", 1)
    assert main("prepare", job_environment(job)) == 1
    assert "no answer from" in events(tmp_path / "run", "failed")[-1]["message"]
    assert not any(b"planted" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "planted" not in "".join(capsys.readouterr())


def test_a_failure_that_quotes_a_secret_is_reported_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(context: Any, job: Any) -> None:
        context.notice(f"using {os.environ['TOKEN_OF_JOB']}")
        raise ValueError(f"the server did not like {os.environ['TOKEN_OF_JOB']}")

    monkeypatch.setenv("MINE", VALUE)
    monkeypatch.setattr("sm_llm.worker.tasks.prepare.run", run)
    task = {"kind": "prepare", "seq_length": 16, "sources": ["builtin:python-docs"]}
    job = job_file(task, tmp_path / "run", 1)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"secrets": {"TOKEN_OF_JOB": "env:MINE"}})})
    assert main("prepare", job_environment(job)) == 1
    assert events(tmp_path / "run", "notice")[-1]["message"] == f"using {HIDDEN}"
    assert f"did not like {HIDDEN}" in events(tmp_path / "run", "failed")[-1]["message"]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(VALUE.encode() in body for body in written)
    assert VALUE not in "".join(capsys.readouterr())
