"""The Typer application, the table of its verbs and its entry point."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from typing import Annotated, NoReturn

import typer

from sm_llm.errors import (
    CheckpointError,
    ConversionRefused,
    LaunchRefused,
    PlanError,
    RunNotFound,
    SmLlmError,
    SpecError,
    StorageRefused,
    UsageError,
)
from sm_llm.runs.run_states import EXIT_MEANINGS, USAGE_EXIT_CODE
from sm_llm.terminal import clean_streams, echo

# Errors of what was asked for; in this process all of them are raised before anything is started.
_REFUSALS = (
    SpecError, PlanError, LaunchRefused, RunNotFound, CheckpointError, ConversionRefused, StorageRefused, UsageError,
)  # fmt: skip

VERBS = {
    "fit": "sm_llm.launcher.api:launch",
    "plan": "sm_llm.launcher.planner:plan",
    "show": "sm_llm.spec.reference.show:show",
    "init": "sm_llm.spec.reference.template:commented",
    "prepare": "sm_llm.launcher.api:prepare",
    "recipes": "sm_llm.spec.loading.load:recipe_files",
    "ls": "sm_llm.launcher.find_runs:ls",
    "status": "sm_llm.launcher.run:Run.status",
    "attempts": "sm_llm.launcher.run:Run.attempts",
    "logs": "sm_llm.launcher.run:Run.logs",
    "metrics": "sm_llm.launcher.run:Run.metrics",
    "plot": "sm_llm.launcher.run:Run.plot",
    "checkpoints": "sm_llm.launcher.run:Run.checkpoints",
    "attach": "sm_llm.launcher.run:Run.watch",
    "wait": "sm_llm.launcher.run:Run.wait",
    "stop": "sm_llm.launcher.run:Run.stop",
    "shell": "sm_llm.launcher.tools.shell:shell",
    "nodes": "sm_llm.launcher.tools.clusters:nodes",
    "resume": "sm_llm.launcher.run:Run.resume",
    "finish": "sm_llm.launcher.run:Run.finish",
    "rerun": "sm_llm.launcher.run:Run.rerun",
    "branch": "sm_llm.launcher.run:Run.branch",
    "sync": "sm_llm.launcher.tools.sync_command:sync",
    "fetch": "sm_llm.storage.hub.hub_fetch:fetch",
    "convert": "sm_llm.convert.api:convert",
    "doctor": "sm_llm.storage.storage_probe:probe_storage",
}
"""Every verb and the Python function that does its work."""

_EXIT_CODES = "\n".join(f"  {code:<3} {words}" for code, words in EXIT_MEANINGS.items())

app = typer.Typer(
    name="sm-llm",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help=f"""Train large language models from one job specification.

\b
Begin here:
  sm-llm fit tiny-local                 prepare text and train a small Llama on this machine
  sm-llm recipes                        what else comes with the package
  sm-llm init tiny-local > job.yaml     a commented copy to change
  sm-llm plan job.yaml                  every number that follows, before anything is started
  sm-llm fit job.yaml task.max_steps=50

\b
Follow and control it from anywhere:
  sm-llm ls, status, logs -f, metrics, plot, checkpoints, attempts
  sm-llm attach, stop, resume, rerun, shell; of a cluster: sm-llm nodes

\b
S3, in and out:
  sm-llm fetch hf://org/name@revision DST, sm-llm sync SRC DST, sm-llm doctor --storage s3://bucket/runs

\b
Weights to and from neuronx-distributed:
  sm-llm convert SRC DST --to nxd --tp N, sm-llm convert SRC DST --to hf

\b
Proof that a broken job continues exactly:
  sm-llm doctor --resume-proof job.yaml

\b
Exit codes, also in scripts:
{_EXIT_CODES}

\b
Shell completion:
  sm-llm --install-completion

RUN is a run's folder or address in S3, its id or its name in the default storage or ./runs (or --storage), its native
job (sagemaker://REGION/JOB or the job's ARN, local://host/process), or a YAML file: the newest run of that
specification. Where it may be left out, the newest run is meant.""",
)


@dataclass
class Output:
    """What the reader of standard output still expects: a document of JSON, where a verb was given ``--json``."""

    is_json: bool = False


def _print_version(asked: bool) -> None:
    if asked:
        from sm_llm import __version__

        echo(f"sm-llm {__version__}")
        raise typer.Exit


@app.callback()
def whole(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Entry point of ``sm-llm``: the user's issues become one message and an exit code, never a traceback."""
    # Before anything is printed: names and log lines may hold control sequences (docs/security.md).
    clean_streams()
    gc.set_threshold(100_000)  # modules that are being loaded are not garbage: the search for it takes 5% of `plan`
    # Set by the verb that has --json, so that an error raised anywhere is printed in the form that was asked for.
    output = Output()
    try:
        app(obj=output)
    except ImportError as error:
        from sm_llm.optional import cause

        if (text := cause(error)) is None:
            # Not for want of an optional package, so a fault of ours, which keeps its traceback.
            raise
        echo(f"error: {text}", err=True)
        sys.exit(1)
    except OSError as error:
        # Of a file of the user's, which may not be read or written, or whose disk is full.
        if error.filename is None or error.strerror is None:
            raise
        echo(f"error: {error.filename}: {error.strerror}", err=True)
        sys.exit(1)
    except SmLlmError as error:
        echo(f"error: {error}", err=True)
        if output.is_json:
            echo(json.dumps({"error": error.to_json()}, indent=2, allow_nan=False))
        sys.exit(USAGE_EXIT_CODE if isinstance(error, _REFUSALS) else 1)
    sys.exit(0)
