"""Verbs that begin something: from a specification to a plan or a run."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import (
    AsJson,
    New,
    Overrides,
    Spec,
    Wait,
    carry_on,
    console,
    launched,
    leave_if_unsupported,
    print_json,
    typed,
)
from sm_llm.errors import UsageError
from sm_llm.launcher.display.formatting import listed
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run


@app.command()
def fit(
    spec: Spec,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted; start nothing.")] = False,
    as_json: AsJson = False,
    new: New = False,
    wait: Wait = None,
) -> None:
    """Run a job or workflow, or continue it.

    After an interruption the same command continues from the newest checkpoint. Beside an unfinished run of the same
    name whose specification differs it asks (in a terminal) or refuses; --new starts another run.
    Ctrl-C stops it cleanly. A closed terminal does not: the run continues in the background.
    --dry-run checks what plan does, storage and inputs in S3 included, and shows the attempt of the unfinished run
    that this command would continue.

    \b
    Examples:
      sm-llm fit tiny-local
      sm-llm fit job.yaml task.max_steps=1000 compute.processes_per_instance=4
      sm-llm fit job.yaml --dry-run --json
    """
    from sm_llm.launcher.api import launch

    if dry_run:
        if new or wait is not None:
            option = "--new" if new else "--wait" if wait else "--no-wait"
            raise typer.BadParameter(f"{option} has no effect with --dry-run, which starts nothing")
        from sm_llm.launcher.api import plan_from_here, render

        # Before anything is printed: standard output gets all requests or none.
        plans, loaded, run_to_continue = plan_from_here(spec, overrides or ())
        submissions = render(plans, loaded, run_to_continue)
        for it in plans:  # standard output is for what would be sent
            echo("\n".join([f"{it.job.name}:", *it.start_lines()]), err=True)
        if as_json or not all(it.document for it in submissions):
            print_json([it.to_json() for it in submissions])
        else:
            echo("".join(it.document for it in submissions).rstrip("\n"))
        leave_if_unsupported(plans)
        return
    run = launched(lambda new: launch(spec, *overrides or (), new=new), new)
    carry_on(run, wait=wait, as_json=as_json)


@app.command()
def plan(spec: Spec, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a job and show what follows; starts nothing.

    Storage, inputs and checkpoints in S3 are looked up where there are AWS credentials, and named where there are none.
    Beside an unfinished run of the same name it prints what fit would do: continue it, or refuse.
    A job that cannot run yet, or on this machine, is shown as well, with the exit code of one that is refused.

    \b
    Examples:
      sm-llm plan tiny-local
      sm-llm plan job.yaml task.max_tokens=1000000000 --json
    """
    from sm_llm.launcher.api import plan_from_here

    plans, _, _ = plan_from_here(spec, overrides or ())
    if as_json:
        print_json([it.to_json() for it in plans])
    else:
        from sm_llm.launcher.display.tables import plan_table

        for it in plans:
            console().print(plan_table(it))
    leave_if_unsupported(plans)


@app.command()
def show(spec: Spec, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the merged spec and where each value came from."""
    from sm_llm.spec.loading.load import load
    from sm_llm.spec.reference.show import show as rows_of

    rows = rows_of(load(spec, overrides or ()))
    if as_json:
        print_json([{"path": path, "value": value, "origin": origin} for path, value, origin in rows])
        return
    from sm_llm.launcher.display.tables import origins_table

    shown = console()
    shown.print(origins_table(rows, shown.width))


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
    from sm_llm.spec.reference.template import commented

    text = commented(recipe)
    if file is None:
        sys.stdout.write(text)
        return
    try:
        with file.open("x", encoding="utf-8") as stream:  # x: no file of the user's is overwritten
            stream.write(text)
    except FileExistsError:
        remedy = f"Give another name, or remove it first: rm {quoted(file)}"
        raise UsageError(f"{file}: is there already, and may hold your changes. {remedy}") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be written ({error.strerror})") from None
    echo(f"Wrote {file}. Next: sm-llm plan {quoted(file)}")


@app.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Text files and folders, then KEY=VALUE.")],
    seq_length: Annotated[int, typer.Option(help="Tokens per row.")],
    tokenizer: Annotated[str | None, typer.Option(help="Folder of a tokenizer; one is trained if left out.")] = None,
    validation_fraction: Annotated[float, typer.Option(help="Share of documents held out as validation/ rows.")] = 0.0,
    name: Annotated[str, typer.Option(help="Name of the run.")] = "prepare",
    as_json: AsJson = False,
    new: New = False,
    wait: Wait = None,
) -> None:
    """Turn text into packed rows of token ids.

    The result holds train/ rows (and validation/ rows, if some are held out), the tokenizer, and an account of every
    document and token.

    \b
    Examples:
      sm-llm prepare texts/ --seq-length 2048 --validation-fraction 0.05
      sm-llm prepare a.jsonl b.parquet --seq-length 2048 --tokenizer my-tokenizer task.text_field=body
    """
    from sm_llm.launcher.api import prepare as start
    from sm_llm.spec.loading.overrides import TypedFields, is_override

    # Texts and overrides share one argument; an override has the form KEY=VALUE.
    overrides = typed([it for it in sources if is_override(it)])
    texts = [it for it in sources if it not in overrides]
    options = {"task.seq_length": True, "task.tokenizer": tokenizer is not None,
               "task.validation_fraction": validation_fraction > 0, "name": name != "prepare"}  # fmt: skip
    for path in (it.partition("=")[0] for it in overrides):
        if options.get(path):
            raise typer.BadParameter(f"{path} is given as an option as well, and only one of the two can count")
    task: dict[str, Any] = {"sources": texts, "seq_length": seq_length}
    if options["task.validation_fraction"]:
        task["validation_fraction"] = validation_fraction
    if tokenizer is not None:
        task["tokenizer"] = tokenizer
    # Given again: so their issues name the command line. What is left out there may be an override.
    given = TypedFields({"task": task, **({"name": name} if options["name"] else {})})

    def begin(new: bool) -> Run:
        return start(
            *texts,
            seq_length=seq_length,
            tokenizer=tokenizer,
            name=name,
            overrides=[given, *overrides],
            new=new,
            wait=False,
        )

    run = launched(begin, new)
    carry_on(run, wait=wait, as_json=as_json)


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the jobs and workflows that come with the package."""
    from sm_llm.spec.loading.load import recipe_files, recipe_summary

    found = {name: recipe_summary(path) for name, path in recipe_files().items()}
    if as_json:
        print_json(found)
        return
    for name, summary in found.items():
        echo(*listed(name, summary, max(map(len, found)), console().width))
