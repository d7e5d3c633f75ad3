"""A run, a specification and file names that somebody else wrote: no verb passes their control sequences on."""

from __future__ import annotations

import json
import shlex
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.build_submission import new_record
from sm_llm.launcher.planner import plan
from sm_llm.spec.loading.load import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

cli_app = import_module("sm_llm.cli.app")  # the package shows the application by this name
TITLE = "\x1b]0;TITLE\x1b\\"
EVIL = f"x{TITLE}\x1b[2J\x1b]52;c;eA==\x07\u202e\x9b31m[bold]m[/bold]"
SPEC = {
    "name": "evil",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 16, "rows": 64},
        "max_steps": 8,
    },
}
EVENTS: list[dict[str, Any]] = [
    {"kind": "attempt_started", "world_size": 1, "device": EVIL, "total_steps": 5, "versions": {}},
    {"kind": "notice", "level": "warning", "message": EVIL},
    {"kind": "tracker_opened", "tracker": EVIL, "id": "i", "uri": EVIL},
    {"kind": "publication_late", "step": 1, "age_seconds": 1, "reason": EVIL},
    {"kind": "progress", "phase": EVIL, "done": 1, "total": 2, "unit": EVIL},
    {"kind": "start_chosen", "source": EVIL, "step": 0, "uri": EVIL},
    {"kind": "sample", "prompt": EVIL, "text": EVIL, "step": 1},
]


@pytest.fixture
def evil_run(tmp_path: Path) -> Path:
    storage = tmp_path / "runs"
    found = load({**SPEC, "storage": str(storage)})
    (it,) = plan({**SPEC, "storage": str(storage)})
    summary = {**it.to_json(), "warnings": [EVIL], "settings": {"data": EVIL}, "facts": {"devices": EVIL}}
    record = new_record("evil", found.spec, found.digest, {}, [summary], created=time.time())
    text = record.model_dump(mode="json")
    text["versions"] = {"numpy": EVIL}
    text["attempts"] = [
        {
            "number": 1, "native_id": "1", "host": EVIL, "started": 1e9, "ended": 1e9 + 5, "state": "failed",
            "reason": EVIL, "rank": 0,
        }
    ]  # fmt: skip
    text["trackers"], text["changes"], text["outcome"] = {EVIL: EVIL}, {"1": [f"x={EVIL}"]}, "failed"
    root = storage / "evil"
    for folder in ("events", "logs/attempt-1", "ckpt/commits"):
        (root / folder).mkdir(parents=True)
    (root / "run.json").write_text(json.dumps(text))
    lines = [json.dumps({"time": 1e9, "attempt": 1, **event}) for event in EVENTS]
    (root / "events" / "attempt-1-rank0.jsonl").write_text("\n".join(lines) + "\n")
    (root / "logs" / "attempt-1" / "node-0.log").write_bytes(f"log {EVIL}\r\n".encode() + b"\xff\n")
    (root / "ckpt" / "commits" / "step-00000003.json").write_text(json.dumps({"version": EVIL}))
    return root


@pytest.fixture
def sm_llm(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Callable[..., tuple[bytes, bytes]]:
    """Runs a command line as its program does; returns what reached both streams."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[bytes, bytes]:
        monkeypatch.setattr(sys, "argv", ["sm-llm", *argv])
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", sys.stdout)
            patch.setattr(sys, "stderr", sys.stderr)
            with pytest.raises(SystemExit):
                cli_app.main()
        return capfdbinary.readouterr()

    return run


def assert_clean(*shown: bytes) -> None:
    text = b"".join(shown).decode()
    assert text, "it says something"
    assert not [it for it in "\x1b\x9b\x07\u202e\r" if it in text], repr(text)


OF_A_RUN = (
    ["ls", "RUNS"], ["status", "RUN"], ["attempts", "RUN"], ["logs", "RUN"], ["logs", "RUN", "--tail", "5"],
    ["logs", "RUN", "--json"], ["metrics", "RUN"], ["checkpoints", "RUN"], ["attach", "RUN"], ["wait", "RUN"],
    ["stop", "RUN"], ["resume", "RUN"], ["finish", "RUN"], ["branch", "RUN"], ["status", "RUN", "--json"],
    ["attempts", "RUN", "--json"], ["ls", "RUNS", "--json"], ["checkpoints", "RUN", "--json"], ["shell", "RUN"],
)  # fmt: skip


@pytest.mark.parametrize("argv", OF_A_RUN, ids=" ".join)
def test_s14_no_verb_passes_on_what_a_record_an_event_or_a_log_holds(
    sm_llm: Any, evil_run: Path, argv: list[str]
) -> None:
    locations = {"RUN": str(evil_run), "RUNS": str(evil_run.parent)}
    assert_clean(*sm_llm(*(locations.get(it, it) for it in argv)))


WITH_NAMES = (
    ["status", EVIL], ["fit", EVIL], ["plan", EVIL], ["show", EVIL], ["init", EVIL], ["ls", EVIL], ["fetch", EVIL, "d"],
    ["sync", EVIL, "d"], ["prepare", EVIL, "--seq-length", "16"], ["doctor", "--storage", f"s3://{EVIL}/x"],
    ["plan", "smoke", f"task.{EVIL}=1"], ["plan", "smoke", f"task.max_steps={EVIL}"], [EVIL], [f"--{EVIL}"],
    ["fetch", f"hf://a/{EVIL}", "d"], ["pipeline", "render", EVIL], ["pipeline", "start", "x", EVIL],
    ["pipeline", "status", EVIL], ["image", "build", EVIL], ["image", "login", EVIL], ["logs", "--grep", f"({EVIL}"],
)  # fmt: skip


@pytest.mark.parametrize("argv", WITH_NAMES, ids=lambda it: " ".join(it).encode("unicode_escape").decode()[:40])
def test_s14_no_verb_passes_on_the_names_that_it_is_given(sm_llm: Any, argv: list[str]) -> None:
    assert_clean(*sm_llm(*argv))


def test_s14_no_verb_passes_on_what_a_specification_holds(sm_llm: Any, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    shown = json.dumps(EVIL)  # a YAML text as well
    file.write_text(
        f"name: evil\ntask: {{kind: script, entry: main.py, source: {shown}, args: [{shown}]}}\n"
        f"environment: {{A: {shown}}}\nstorage: ./runs\n"
    )
    for verb in ("show", "plan", "fit"):
        assert_clean(*sm_llm(verb, str(file)))
    file.write_text(f"name: evil\ntask:\n  kind: {shown}\n  {shown}: {shown}\n")
    for verb in ("show", "plan"):
        assert_clean(*sm_llm(verb, str(file)))


def test_s14_names_of_files_are_printed_clean(sm_llm: Any, tmp_path: Path) -> None:
    source = tmp_path / f"src{TITLE.replace('/', '')}"
    source.mkdir()
    (source / f"a{TITLE}.txt").write_text("x")
    (source / f"c{TITLE}.gz.part").symlink_to("nowhere")
    assert_clean(*sm_llm("sync", str(source), str(tmp_path / f"dst{TITLE}")))


def test_s14_raw_logs_are_the_bytes_that_were_written(sm_llm: Any, evil_run: Path) -> None:
    written = (evil_run / "logs" / "attempt-1" / "node-0.log").read_bytes()
    assert sm_llm("logs", str(evil_run), "--raw")[0] == written
    assert sm_llm("logs", str(evil_run), "--raw", "--tail", "9")[0] == written


def test_s14_a_warning_and_a_traceback_are_printed_clean(sm_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        import logging

        logging.getLogger("sm_llm.test").warning("%s", EVIL)
        print(EVIL, file=sys.stderr)
        raise SystemExit(EVIL)

    monkeypatch.setattr(cli_app, "app", broken)
    out, err = sm_llm("ls")
    assert b"\x1b" not in out + err


def test_a_name_with_dollars_is_drawn_as_it_is(tmp_path: Path) -> None:
    from sm_llm.launcher.display.plot import draw

    row = {"step": 1, "loss": 1.0, "learning_rate": 0.1}
    draw([row], "run $\\no_such_command{$ x").savefig(tmp_path / "plot.png")  # type: ignore[list-item]


@pytest.mark.parametrize("verb", ["resume", "branch"])
def test_s19_a_run_in_a_folder_with_any_name_is_named_so_that_it_can_be_pasted(
    sm_llm: Any, evil_run: Path, verb: str, tmp_path: Path
) -> None:
    location = tmp_path / 'sp ace; $(touch INJECTED) `id` "q" \'x'
    evil_run.parent.rename(location)
    out, err = sm_llm(verb, str(location / "evil"))
    _, found, pasted = (out + err).decode().partition("sm-llm rerun ")
    assert found, "a command is printed"
    assert shlex.split(pasted) == [str(location / "evil")]
