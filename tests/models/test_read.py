"""Finding a config: folders, files and the hub (a local double of it, and none at all)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from sm_llm.errors import SpecError
from sm_llm.models.config import read_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = {"model_type": "llama", "hidden_size": 8}
ASK = """
import json, sys
from sm_llm.errors import SpecError
from sm_llm.models.config import read_config
answers = {}
for name in sys.argv[1:]:
    try:
        answers[name] = read_config(name)
    except SpecError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


def test_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_config(tmp_path) == read_config(str(tmp_path / "config.json")) == CONFIG


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read as JSON"), ("[1]", "holds no JSON object"), ("\xff", "cannot be read as JSON")],
)
def test_broken_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError, match=rf"task\.model\.path: {message}.*config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 48, "hidden_size": 96}', r"cannot be read as JSON: hidden_size is given twice. Keep one"),
        ('\ufeff{"hidden_size": 48}', r"it begins with a byte order mark. Save it as UTF-8 without one"),
        ('{"hidden_size": ' + "1" * 6000 + "}", r"it holds a number of 6,000 digits"),
    ],
    ids=["twice", "mark", "digits"],
)
def test_what_is_no_unambiguous_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=message):
        read_config(tmp_path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"task\.start\.pretrained: the folder holds no config\.json"):
        read_config(tmp_path, where="task.start.pretrained")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "runs/a/final", "", "..", "org/..", "a/b/"])
def test_what_cannot_be_a_hub_id_is_a_missing_folder(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"no such folder or file|holds no config|nor a hub id"):
        read_config(name)


class _Hub(BaseHTTPRequestHandler):
    """What the hub answers for config.json of four models."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for an acknowledgement of the headers

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        name = "/".join(self.path.split("/")[1:3])
        status, headers, body = {
            "org/open": (200, {"ETag": '"abc"', "X-Repo-Commit": "c" * 40}, json.dumps(CONFIG).encode()),
            "org/gated": (403, {"X-Error-Code": "GatedRepo"}, b""),
            "org/empty": (404, {"X-Error-Code": "EntryNotFound"}, b""),
        }.get(name, (404, {"X-Error-Code": "RepoNotFound"}, b""))
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(hub: Path, *names: str, **environment: str) -> dict[str, object]:
    """``read_config`` of hub ids in a fresh process: the hub library reads its settings when it is imported."""
    settings = {**os.environ, "HF_HOME": str(hub), **environment}
    command = [sys.executable, "-c", ASK, *names]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True, cwd=hub)
    answers: dict[str, object] = json.loads(done.stdout)
    return answers


def test_hub(tmp_path: Path, hub: str) -> None:
    names = ["org/open", "org/gated", "org/empty", "org/absent"]
    answers = ask(tmp_path, *names, HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    assert answers["org/open"] == CONFIG
    assert "gated model (got 'org/gated'). Accept its licence at https://huggingface.co/org/gated" in str(
        answers["org/gated"]
    )
    assert "has no config.json (got 'org/empty')" in str(answers["org/empty"])
    assert "neither a folder here nor a model on the hub (got 'org/absent')" in str(answers["org/absent"])

    offline = ask(tmp_path, "org/open", "org/other", HF_HUB_OFFLINE="1")
    assert offline["org/open"] == CONFIG
    assert "the hub cannot be reached (got 'org/other'). Give a local folder" in str(offline["org/other"])


@pytest.mark.integration
def test_hub_that_refuses_connections(tmp_path: Path) -> None:
    answers = ask(tmp_path, "org/open", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert "the hub cannot be reached" in str(answers["org/open"])
