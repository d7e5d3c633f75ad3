"""The command line: one verb calls one Python function; there is no logic here beyond words and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sm_llm.errors import PlanError, SmLlmError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from sm_llm.launcher.run import Run

VERBS = {
    "fit": "sm_llm.launcher.api:launch",
    "plan": "sm_llm.launcher.plan:plan",
    "show": "sm_llm.spec.show:show",
    "init": "sm_llm.spec.template:commented",
    "prepare": "sm_llm.launcher.api:prepare",
    "status": "sm_llm.launcher.run:Run.status",
    "logs": "sm_llm.launcher.run:Run.logs",
    "metrics": "sm_llm.launcher.run:Run.metrics",
    "plot": "sm_llm.launcher.run:Run.plot",
    "recipes": "sm_llm.spec.recipes:recipe_files",
}
"""Every verb and the Python function that does its work."""

app = typer.Typer(
    name="sm-llm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="""Train large language models from one job specification.

\b
Begin here:
  sm-llm fit tiny-local                 prepare text and train a small Llama on this machine
  sm-llm recipes                        what else comes with the package
  sm-llm init tiny-local > job.yaml     a commented copy to change
  sm-llm plan job.yaml                  every number that follows, before anything is started
  sm-llm fit job.yaml task.max_steps=50

RUN is a run's folder, its id or its name below ./runs; without it, the newest run is meant.""",
)

Spec = Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="Name of a recipe, or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]", help="e.g. task.optim.learning_rate=1e-4")
]
RunName = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Folder, id or name of a run.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]
New = Annotated[bool, typer.Option("--new", help="Start another run, even if an unfinished one could go on.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Watch until it ends, or leave it in the background.")]


@app.command()
def fit(
    spec: Spec,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted; start nothing.")] = False,
    as_json: AsJson = False,
    new: New = False,
    wait: Wait = True,
) -> None:
    """Run a job or workflow, or continue it.

    After an interruption the same command goes on from the newest checkpoint; --new starts another run.
    Ctrl-C stops it cleanly. A closed terminal does not: the run goes on in the background.

    \b
    Examples:
      sm-llm fit tiny-local
      sm-llm fit job.yaml task.max_steps=1000 compute.processes_per_instance=4
      sm-llm fit job.yaml --dry-run --json
    """
    from sm_llm.launcher.api import launch

    if dry_run:
        _print_json([it.to_json() for it in launch(spec, *overrides or (), dry_run=True)])
        return
    _carry_on(launch(spec, *overrides or (), new=new), wait=wait, as_json=as_json)


@app.command()
def plan(spec: Spec, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a job and show what follows; starts nothing.

    \b
    Examples:
      sm-llm plan tiny-local
      sm-llm plan job.yaml task.max_tokens=1000000000 --json
    """
    from sm_llm.launcher.plan import plan as make_plan

    plans = make_plan(spec, *overrides or ())
    if as_json:
        _print_json([it.to_json() for it in plans])
        return
    from sm_llm.launcher.report import plan_table

    for it in plans:
        _console().print(plan_table(it))


@app.command()
def show(spec: Spec, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the merged spec and where each value came from."""
    from sm_llm.spec.load import load
    from sm_llm.spec.show import show as rows_of

    rows = rows_of(load(spec, overrides or ()))
    if as_json:
        _print_json([{"path": path, "value": value, "origin": origin} for path, value, origin in rows])
        return
    from sm_llm.launcher.report import origins_table

    _console().print(origins_table(rows))


@app.command()
def init(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe.")],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Where to write; else standard output.")] = None,
) -> None:
    """Write a commented copy of a recipe, to change and own.

    \b
    Example:
      sm-llm init tiny-local job.yaml
    """
    from sm_llm.spec.template import commented

    text = commented(recipe)
    if file is None:
        sys.stdout.write(text)
        return
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise SmLlmError(f"{file}: cannot be written ({error.strerror})") from None
    typer.echo(f"Wrote {file}. Next: sm-llm plan {file}")


@app.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Text files and folders, then KEY=VALUE.")],
    seq_length: Annotated[int, typer.Option(help="Tokens per row.")],
    tokenizer: Annotated[str | None, typer.Option(help="Folder of a tokenizer; one is trained if left out.")] = None,
    name: Annotated[str, typer.Option(help="Name of the run.")] = "prepare",
    as_json: AsJson = False,
    new: New = False,
    wait: Wait = True,
) -> None:
    """Turn text into packed rows of token ids.

    The result holds train/ and validation/ rows, the tokenizer, and an account of every token.

    \b
    Examples:
      sm-llm prepare texts/ --seq-length 2048
      sm-llm prepare a.jsonl b.parquet --seq-length 2048 --tokenizer my-tokenizer task.text_field=body
    """
    from sm_llm.launcher.api import prepare as start

    overrides = [it for it in sources if it.startswith(("task.", "compute.", "storage=", "environment.")) and "=" in it]
    texts = [it for it in sources if it not in overrides]
    run = start(*texts, seq_length=seq_length, tokenizer=tokenizer, name=name, overrides=overrides, new=new, wait=False)
    _carry_on(run, wait=wait, as_json=as_json)


@app.command()
def status(run: RunName = None, as_json: AsJson = False) -> None:
    """Show what a run is doing: state, step, loss, result."""
    from sm_llm.launcher.api import attach

    found = attach(run).status()
    if as_json:
        _print_json(found.to_json())
        return
    from sm_llm.launcher.report import status_table

    _console().print(status_table(found))


@app.command()
def logs(
    run: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines of every node.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="Only this node.")] = None,
    grep: Annotated[str | None, typer.Option(help="Only lines that match this regular expression.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a run's processes printed.

    \b
    Examples:
      sm-llm logs -f
      sm-llm logs tiny-local --tail 50 --grep 'Loss|error'
    """
    from sm_llm.launcher.api import attach

    for line in attach(run).logs(follow=follow, tail=tail, node=node, pattern=grep):
        typer.echo(json.dumps({"line": line}) if as_json else line)


@app.command()
def metrics(
    run: RunName = None,
    as_json: AsJson = False,
    last: Annotated[int | None, typer.Option(min=1, help="Only the last rows.")] = None,
) -> None:
    """Print the metrics of every step.

    --json has every field with every digit; NaN and infinity, which JSON lacks, are text.
    """
    from sm_llm.launcher.api import attach
    from sm_llm.launcher.metrics import to_json

    rows = attach(run).metrics()
    rows = rows[-last:] if last else rows
    if as_json:
        _print_json([to_json(row) for row in rows])
        return
    from sm_llm.launcher.report import metrics_table

    _console().print(metrics_table(rows))


@app.command()
def plot(
    run: RunName = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Else plot.png in the run.")] = None,
) -> None:
    """Draw losses, learning rate and speed as a PNG."""
    from sm_llm.launcher.api import attach

    typer.echo(str(attach(run).plot(output)))


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the jobs and workflows that come with the package."""
    from sm_llm.spec.recipes import recipe_files, recipe_summary

    found = {name: recipe_summary(path) for name, path in recipe_files().items()}
    if as_json:
        _print_json(found)
        return
    width = max(map(len, found), default=0)
    for name, summary in found.items():
        typer.echo(f"{name:<{width}}  {summary}")


def _carry_on(run: Run, *, wait: bool, as_json: bool) -> None:
    """Say what was started, watch it if wanted, and leave with the exit code of its state."""
    from sm_llm.contract.states import EXIT_CODES
    from sm_llm.launcher.live import accompany

    state = accompany(run, _console(stderr=as_json), wait=wait)
    if as_json:
        _print_json(run.status().to_json())
    raise typer.Exit(EXIT_CODES.get(state, 0))


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    # Piped output is for programs and logs: long lines stay whole there.
    return Console(stderr=stderr, highlight=False, width=None if is_terminal else 200)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def main() -> NoReturn:
    """Entry point of ``sm-llm``: the user's faults become one message and an exit code, never a traceback."""
    from sm_llm.contract.states import USAGE_EXIT_CODE

    try:
        app()
    except SmLlmError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(USAGE_EXIT_CODE if isinstance(error, SpecError | PlanError) else 1)
    sys.exit(0)


if __name__ == "__main__":
    main()
