"""What the verbs share: arguments and options, the console, JSON on standard output, and following a run that began."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from sm_llm.cli.app import Output
from sm_llm.errors import PlanError
from sm_llm.runs.run_states import USAGE_EXIT_CODE
from sm_llm.spec.loading.user_file import has_user_defaults
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.run import Run


def typed(overrides: list[str] | None) -> list[str]:
    """Overrides as the command line gives them: their values record that they came from there."""
    from sm_llm.spec.loading.overrides import CommandLine

    return [CommandLine(it) for it in overrides or ()]


Spec = Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="Name of a recipe, or a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]", help="e.g. task.optim.learning_rate=1e-4", callback=typed),
]
ClusterName = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help="Whose cluster; else that of the first that has one.")
]
RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="Folder, s3:// address, id, name or job URI of a run, or a YAML file; else the newest."
    ),
]
GivenRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder, s3:// address, id, name or job URI of a run, or a YAML file.")
]
Storage = Annotated[
    str | None,
    typer.Option("--storage", help="Where runs are found by id or name; else the default storage and ./runs."),
]


def _note_json(context: typer.Context, asked: bool) -> bool:
    """Let ``main`` know that whoever reads standard output expects JSON, also where the verb fails."""
    if asked and isinstance(context.obj, Output):
        context.obj.is_json = True
    return asked


AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.", callback=_note_json)]
New = Annotated[bool, typer.Option("--new", help="Start another run, even if an unfinished one could continue.")]
Wait = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait", help="Watch until it ends, or leave it in the background; a local run is watched."
    ),
]
S3Access: TypeAlias = S3Options
_S3_ACCESS = {
    "endpoint_url": "Another S3 endpoint.",
    "region": "Region of the bucket.",
    "kms_key_id": "Encrypt what is written with this KMS key.",
    "storage_class": "S3 storage class of what is written.",
    "expected_bucket_owner": "Account id that must own the bucket.",
}


def s3_access(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options by which S3 is reached; it gets them as its one argument ``options``."""

    @functools.wraps(verb)
    def with_access(**given: Any) -> None:
        verb(options=with_user_options(S3Options(**{name: given.pop(name) for name in _S3_ACCESS})), **given)

    own = inspect.signature(verb, eval_str=True)
    # The fields of S3Options are options of their own in place of the one argument.
    parameters = [it for it in own.parameters.values() if it.name != "options"]
    for name, text in _S3_ACCESS.items():
        kind = Annotated[str | None, typer.Option(help=text)]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    # Typer reads both.
    with_access.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_access.__annotations__ = {it.name: it.annotation for it in parameters}
    return with_access


def with_user_options(given: S3Options) -> S3Options:
    if not has_user_defaults(os.environ):
        return given  # sooner: a short copy takes less time than reading defaults
    from sm_llm.runs.locate import user_options

    return user_options(given)


def console(*, stderr: bool = False) -> Console:
    """Where tables and words go."""
    from sm_llm.launcher.display.console import console as make

    return make(stderr=stderr)


def print_json(value: Any) -> None:
    """``value`` on standard output. NaN has no place in JSON: it is an error of ours."""
    echo(json.dumps(value, indent=2, allow_nan=False))


def leave_if_unsupported(plans: Sequence[Plan]) -> None:
    """Leave with the exit code of a refusal where jobs cannot run; their plans, with the reason, were printed."""
    from sm_llm.launcher.planning.plan import assert_supported

    try:
        assert_supported(plans)
    except PlanError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE_EXIT_CODE) from None


def launched(launch: Callable[[bool], Run], new: bool) -> Run:
    """The run that ``launch(new)`` starts or continues; beside another one that is unfinished, what the user chooses.

    Without a terminal to ask in, ``UnfinishedRun`` is raised on.
    """
    from sm_llm.launcher.unfinished import UnfinishedRun

    try:
        return launch(new)
    except UnfinishedRun as found:
        # The question is printed on standard error, which leaves standard output to JSON.
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        echo(str(found), err=True)
        choices = "[c]ontinue it as it is, begin a [n]ew run, or [q]uit"
        # The first letter is enough of an answer.
        answer = typer.prompt(choices, default="q", err=True).strip().lower()[:1]
        if answer == "c":
            return found.run.resume()
        if answer == "n":
            return launch(True)
        raise typer.Abort from None


def carry_on(run: Run, *, wait: bool | None, as_json: bool) -> None:
    """Print what was started, watch it if wanted (None: if it is local), and leave with the exit code of its state."""
    from sm_llm.launcher.display.live import accompany
    from sm_llm.runs.run_states import EXIT_CODES

    state = accompany(run, console(stderr=as_json), wait=run.is_local if wait is None else wait)
    if as_json:
        print_json(run.status().to_json())
    # A run that was left in the background has no end, and so no code of its own.
    raise typer.Exit(EXIT_CODES.get(state, 0))
