"""Walks every verb of the command line and every function in Python without some packages.

``python missing_packages.py RUN FOLDER PACKAGE...``: an import hook refuses the packages; each call is forked.
Prints one JSON object: call -> [exit code, standard error].
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Refusing(MetaPathFinder):
    """Modules that are not there."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


ROLE = "backend.role=arn:aws:iam::123456789012:role/R"
SINKS = ("tensorboard: {}", "mlflow: {}", "wandb: {project: x}")
CLOUD = ["llama-2-7b-fsdp", ROLE, "storage=s3://bucket/runs"]
EXECUTION = "arn:aws:sagemaker:us-east-1:123456789012:pipeline/p/execution/abcdefghijkl"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/sagemaker-x:1"


def commands(run: str, folder: Path, *, starts: bool) -> list[list[str]]:
    """Every verb, where it needs nothing beyond this machine; those that start a job only where it cannot begin."""
    reading = ["status", "attempts", "logs", "metrics", "plot", "checkpoints", "attach", "wait", "stop", "shell"]
    found = [[verb, run] for verb in (*reading, "finish", "resume", *(["branch", "rerun"] if starts else []))]
    found += [["fit", "smoke", "--dry-run"], ["plan", "tiny-local"], ["show", "smoke"], ["recipes"], ["init", "smoke"]]
    found += [["plan", "smoke", f"task.logging.sinks={{{name}}}"] for name in SINKS]
    found += [["plan", "smoke", "task.data={format: stream, dataset: 'hf://datasets/org/name', seq_length: 64}"]]
    found += [["ls"], ["doctor", "--storage", str(folder)]]
    if starts:
        found += [["fit", "smoke", "--no-wait"], ["doctor", "--resume-proof", "smoke", "--steps", "6"]]
        found += [["prepare", str(folder / "text.txt"), "--seq-length", "16", "--no-wait"]]
    return found


def aws_commands(folder: Path) -> list[list[str]]:
    """What reaches AWS: only walked without boto3, for else it would be asked."""
    run = "s3://bucket/runs/smoke-1"
    reading = [
        [verb, run] for verb in ("status", "logs", "metrics", "plot", "attach", "stop", "resume", "branch", "rerun")
    ]
    jobs = [["fit", "smoke", "storage=s3://bucket/runs"], ["plan", "smoke", "storage=s3://bucket/runs"]]
    jobs += [
        ["fit", *CLOUD],
        ["plan", *CLOUD],
        ["fit", *CLOUD, "--dry-run"],
        ["plan", "smoke", "inputs.x=s3://bucket/x"],
    ]
    copies = [
        ["sync", "s3://bucket/x", str(folder / "x")],
        ["sync", str(folder), "s3://bucket/x"],
        ["ls", "s3://bucket/runs"],
    ]
    copies += [["fetch", "hf://org/name", "s3://bucket/x"], ["doctor", "--storage", "s3://bucket/x"]]
    copies += [["prepare", "s3://bucket/text", "--seq-length", "16"], ["attach", "sagemaker://us-east-1/job"]]
    group = [["pipeline", verb, EXECUTION] for verb in ("status", "logs", "stop")]
    group += [["pipeline", "start", "p"], ["pipeline", "render", *CLOUD], ["pipeline", "upsert", *CLOUD]]
    group += [["image", "login", IMAGE], ["image", "push", IMAGE], ["image", "wheelhouse", "cpu", "s3://bucket/x"]]
    return [*reading, *jobs, *copies, *group]


def calls(run: str, folder: Path, *, aws: bool, starts: bool) -> dict[str, Callable[[], Any]]:
    """The same in Python."""
    import sm_llm

    found: dict[str, Callable[[], Any]] = {
        "plan": lambda: sm_llm.plan("tiny-local"),
        "Run.plot": lambda: sm_llm.attach(run).plot(),
        "Run.status": lambda: sm_llm.attach(run).status(),
        "Run.metrics": lambda: sm_llm.attach(run).metrics(),
        "estimator": lambda: sm_llm.estimator(*CLOUD) if aws or "sagemaker" in sys.argv[3:] else None,
    }
    if starts:
        text = str(folder / "text.txt")
        found["launch"] = lambda: sm_llm.launch("smoke", "name=python")
        found["prepare"] = lambda: sm_llm.prepare(text, seq_length=16, wait=False, name="python")
    if aws:
        found |= {
            "ls": lambda: sm_llm.ls("s3://bucket/runs"),
            "attach": lambda: sm_llm.attach("s3://bucket/runs/x"),
            "sync": lambda: sm_llm.sync(folder, "s3://bucket/x"),
            "fetch": lambda: sm_llm.fetch("hf://org/name", "s3://bucket/x"),
            "pipelines.definition": lambda: sm_llm.pipelines.definition(*CLOUD),
            "pipelines.start": lambda: sm_llm.pipelines.start("p"),
            "distribution": lambda: sm_llm.distribution(*CLOUD),
        }
    return found


def forked(action: Callable[[], Any]) -> tuple[int, str]:
    """Exit code and standard error of ``action`` in a process of its own; 99 is a traceback."""
    receive, send = os.pipe()
    if (pid := os.fork()) == 0:
        code, text = 0, io.StringIO()
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
            try:
                action()
            except SystemExit as leaving:
                code = int(leaving.code or 0)
            except BaseException as error:
                from sm_llm.errors import SmLlmError

                code = 1 if isinstance(error, SmLlmError) else 99
                text.write(f"error: {type(error).__name__ if code == 99 else ''}{error}\n")
        os.write(send, json.dumps([code, text.getvalue()[-4000:]]).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    code, words = json.loads(answer)
    return code, words


def command_line(argv: list[str]) -> Callable[[], Any]:
    def run() -> None:
        from sm_llm.cli import main

        sys.argv = ["sm-llm", *argv]
        main()

    return run


if __name__ == "__main__":
    run, location, *packages = sys.argv[1:]
    sys.meta_path.insert(0, Refusing(set(packages)))
    # Once, and not in every fork.
    from sm_llm.launcher.planner import plan

    plan("smoke")

    aws, starts, folder = "boto3" in packages, "torch" in packages, Path(location)
    walked = [*commands(run, folder, starts=starts), *(aws_commands(folder) if aws else [])]
    found = {"sm-llm " + " ".join(argv): forked(command_line(argv)) for argv in walked}
    found |= {f"Python {name}": forked(it) for name, it in calls(run, folder, aws=aws, starts=starts).items()}
    print(json.dumps(found))
