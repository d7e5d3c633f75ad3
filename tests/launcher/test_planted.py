"""Secrets of every shape are planted, everything is run, and everything that was written, shown or sent is searched."""

from __future__ import annotations

import base64
import json
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
import yaml
from typer.testing import CliRunner

from sm_llm import cli
from sm_llm.redaction import HIDDEN
from tests.fixtures import fault_proxy as proxying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fixtures.preloaded import Preloaded

pytestmark = pytest.mark.integration

PLAIN = "plant/ed+1 plain?&value"
LINES = ("planted2-first-line", "planted2-second-line", "planted2-third-line")
INNER = "planted3-inner-value"
IN_ADDRESS = "planted4-in-address"
IN_DIFF = "planted5-in-diff"
IN_ENDPOINT = "planted6-in-endpoint"
FORMS = (PLAIN, *LINES, INNER, IN_ADDRESS, IN_DIFF, IN_ENDPOINT)
NEEDLES = [
    form
    for value in FORMS
    for form in (
        value,
        quote(value, safe=""),
        json.dumps(value)[1:-1],
        base64.b64encode(value.encode()).decode().rstrip("="),
        base64.urlsafe_b64encode(value.encode()).decode().rstrip("="),
    )
]
PROGRAM = """
import base64, json, logging, os, subprocess, sys, urllib.parse
import sm_llm
plain, lines, inside = (os.environ[it] for it in ("PLAIN", "LINES", "INSIDE"))
print("plain", plain, flush=True)
sys.stderr.write("error " + plain + "\\n")
logging.warning("logged %s", plain)
print("repr", repr(plain), "json", json.dumps({"a": plain}), "quoted", urllib.parse.quote(plain, safe=""))
print("base64", base64.b64encode(plain.encode()).decode(), base64.urlsafe_b64encode(plain.encode()).decode())
print("inside other text", base64.b64encode(b"user:" + plain.encode() + b"@host").decode())
print("lines as they are:\\n" + lines)
print("lines as one", repr(lines))
print("inside", json.loads(inside)["nested"][0]["password"], inside)
print("address", os.environ["MLFLOW_TRACKING_URI"], "http://user:planted4-in-address@host/?token=planted4-in-address")
os.write(1, b"raw " + plain.encode() + b"\\n")
os.system('echo "shell $PLAIN"')
subprocess.run([sys.executable, "-c", "import os; print('child', os.environ['PLAIN'], os.environ['LINES'])"])
sm_llm.log(1, loss=1.0)
raise RuntimeError("failed with " + plain + " and " + lines + " at " + os.environ["MLFLOW_TRACKING_URI"])
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder under git with a program, a changed settings file and the planted values around it."""
    folder = tmp_path / "work"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "main.py").write_text(PROGRAM)
    (folder / "settings.yaml").write_text("db_password: unchanged\n")
    (folder / ".env").write_text("A=unchanged\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q", "."], ["add", "-f", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True)
    (folder / "settings.yaml").write_text(f"db_password: {IN_DIFF}\n")
    (folder / ".env").write_text(f"A={IN_DIFF}\n")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lines").write_text("\n".join(LINES) + "\n")
    (outside / "inside").write_text(json.dumps({"user": "x", "nested": [{"password": INNER}]}))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MINE", PLAIN)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{IN_ADDRESS}@127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What clients of the proxy have sent: lines, headers and bodies of all requests."""
    found: list[bytes] = []
    original = proxying._Handler._body

    def body(self: Any) -> bytes:
        whole = original(self)
        found.append(f"{self.command} {self.path}\n{self.headers}".encode() + whole)
        return whole

    monkeypatch.setattr(proxying._Handler, "_body", body)
    return found


def specification(folder: Path, storage: str, options: dict[str, Any]) -> Path:
    outside = folder.parent / "outside"
    spec = {
        "name": "planted",
        "task": {"kind": "script", "entry": "main.py", "source": "./src"},
        "storage": storage,
        "storage_options": options,
        "secrets": {"PLAIN": "env:MINE", "LINES": f"file:{outside}/lines", "INSIDE": f"file:{outside}/inside"},
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def run_everything(file: Path, storage: str) -> str:
    """All that the verbs print for a job that fails."""
    printed = []

    def verb(*argv: str) -> str:
        done = CliRunner().invoke(cli.app, list(argv))
        printed.append(f"{argv}\n{done.output}\n{done.exception}")
        return done.output

    verb("plan", str(file))
    verb("show", str(file))
    verb("fit", str(file), "--dry-run")
    verb("fit", str(file))
    (row,) = json.loads(verb("ls", storage, "--json"))
    assert row["state"] == "failed", row
    uri = row["uri"]
    for name in ("status", "attempts", "logs", "metrics", "checkpoints"):
        verb(name, uri)
        verb(name, uri, "--json")
    verb("ls", storage)
    verb("doctor", "--storage", storage)
    verb("rerun", uri, "--dry-run")
    lines = verb("logs", uri)
    for word in ("plain", "repr", "base64", "raw", "shell", "child", "address", "inside"):
        assert any(line.startswith(word) and HIDDEN in line for line in lines.splitlines()), (word, lines)
    return "\n".join(printed)


def found_in(texts: Iterator[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """(where, what) of everything planted that is found."""
    return [(where, needle) for where, text in texts for needle in NEEDLES if needle.encode() in text]


def files_below(*folders: Path) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.name != "main.py":  # the program itself
                yield str(path), path.read_bytes()


@pytest.mark.timeout(600)
def test_s07_s08_s09_nothing_planted_is_written_or_shown_by_a_run_on_this_machine(
    fakes: Any, checkout: Path, tmp_path: Path, preloaded: Preloaded, capfd: pytest.CaptureFixture[str]
) -> None:
    file = specification(checkout, "./runs", {})
    printed = run_everything(file, "./runs")
    out, err = capfd.readouterr()
    shown = [("the terminal", (printed + out + err).encode())]
    files = list(files_below(checkout / "runs", tmp_path / "cache"))
    assert len(files) > 8
    assert found_in(iter([*files, *shown])) == []


@pytest.mark.timeout(600)
def test_s07_s08_s09_nothing_planted_is_written_shown_or_sent_by_a_run_in_S3(
    s3_fakes: Any,
    checkout: Path,
    tmp_path: Path,
    bucket: str,
    s3_server: Any,
    fault_proxy: Any,
    sent: list[bytes],
    preloaded: Preloaded,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SM_LLM_ENDPOINT_URL", fault_proxy.endpoint)
    storage = f"s3://{bucket}/runs"
    file = specification(checkout, storage, {"endpoint_url": fault_proxy.endpoint})
    printed = run_everything(file, storage)
    out, err = capfd.readouterr()
    keys = [it["Key"] for it in s3_server.client.list_objects_v2(Bucket=bucket)["Contents"]]
    objects = [(key, s3_server.client.get_object(Bucket=bucket, Key=key)["Body"].read()) for key in keys]
    assert any(key.endswith("run.json") for key in keys)
    assert any("/logs/" in key for key in keys)
    assert any(b'"kind": "failed"' in body for _, body in objects)
    assert len(sent) > 20
    requests = [(f"request {number}", text) for number, text in enumerate(sent) if b"main.py" not in text]
    shown = [("the terminal", (printed + out + err).encode())]
    programs = [it for it in objects if not it[0].endswith("main.py")]
    assert found_in(iter([*programs, *requests, *shown, *files_below(tmp_path / "cache")])) == []


def test_s09b_no_verb_shows_the_credentials_of_an_endpoint(
    checkout: Path, aws_environment: None, monkeypatch: pytest.MonkeyPatch, retry_clock: Any
) -> None:
    endpoint = f"http://user:{IN_ENDPOINT}@127.0.0.1:9"
    for name in ("SM_LLM_ENDPOINT_URL", "HF_ENDPOINT", "HTTPS_PROXY", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, endpoint)
    printed = []
    invoke: Callable[..., Any] = CliRunner().invoke
    for argv in (
        ["plan", "smoke", "storage=s3://bkt/runs"],
        ["show", "smoke"],
        ["ls", "s3://bkt/runs"],
        ["status", "s3://bkt/runs/x"],
        ["sync", "s3://bkt/x", "./y", "--endpoint-url", endpoint],
        ["doctor", "--storage", "s3://bkt/runs"],
    ):
        done = invoke(cli.app, argv)
        printed.append(f"{argv[0]} {done.exit_code} {done.output} {done.exception}")
    assert found_in(iter([("the terminal", "\n".join(printed).encode())])) == []
    assert sum(HIDDEN in text for text in printed) >= 4, printed
