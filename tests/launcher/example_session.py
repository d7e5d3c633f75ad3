"""Drives the example backend through the public verbs; prints what they answer as JSON. Argument: a folder."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import tests.launcher.example_backend  # noqa: F401 - its row is there before the specification's classes are made


def verb(*argv: str) -> tuple[int, str]:
    """Exit code and standard output of ``sm-llm``."""
    from sm_llm import cli

    sys.argv = ["sm-llm", *argv]
    shown = io.StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0), shown.getvalue()
    raise AssertionError("the command line always leaves with a code")


def main(folder: Path) -> dict[str, Any]:
    import sm_llm

    queue = folder / "queue"
    job: dict[str, Any] = {
        "name": "job",
        "task": {"kind": "script", "entry": "train.py", "source": str(folder)},
        "backend": {"name": "example", "queue": str(queue)},
        "storage": str(folder / "runs"),
        "compute": {"instance_count": 2},
    }
    (folder / "train.py").write_text("print(1)\n")
    file = folder / "job.yaml"
    file.write_text(json.dumps(job))
    found: dict[str, Any] = {"without a queue": verb("plan", str(file))}
    queue.mkdir()
    found["plan"] = json.loads(verb("plan", str(file), "--json")[1])[0]
    found["dry run"] = [it.to_json() for it in sm_llm.launch(job, dry_run=True)]
    run = sm_llm.launch(job)
    (location,) = queue.iterdir()
    found["pending"] = run.state.value
    (location / "state").write_text("running")
    (location / "log").write_text("one\ntwo\n")
    found["again"] = verb("fit", str(file), "--no-wait")
    found["by uri"] = sm_llm.attach(str(run.native_uri)).uri == run.uri
    found["by its own words"] = sm_llm.attach(f"queue:{location}").uri == run.uri
    found["status"] = json.loads(verb("status", run.uri, "--json")[1])
    found["logs"] = verb("logs", run.uri)[1].splitlines()
    (location / "state").write_text("COMPLETING")
    found["unknown"] = run.describe()
    found["shell"] = verb("shell", run.uri)
    found["stop"] = verb("stop", run.uri)
    found["stopped"] = run.state.value
    found["attempts"] = [it.state for it in run.attempts]
    steps = {"one": {"task": job["task"]}}
    flow = {name: it for name, it in job.items() if name != "task"} | {"steps": steps}
    try:
        sm_llm.launch(flow)
    except sm_llm.PlanError as error:
        found["workflow"] = str(error)
    found["runs"] = [it.run_id for it in sm_llm.ls(job["storage"])] == [run.id]
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
