"""Verbs that read: what runs there are, and what one of them did and does."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, ClusterName, Overrides, RunName, Storage, console, print_json
from sm_llm.terminal import echo


@app.command()
def ls(
    storage: Annotated[
        str | None, typer.Argument(metavar="[STORAGE]", help="Folder or s3:// address of the runs; else ./runs.")
    ] = None,
    option: Annotated[str | None, typer.Option("--storage", help="The same, as for the other verbs.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a storage, the oldest first."""
    if storage is not None and option is not None:
        raise typer.BadParameter("give the storage once: as an argument or with --storage", param_hint="--storage")
    storage = storage if option is None else option
    from sm_llm.launcher.find_runs import ls as list_runs
    from sm_llm.launcher.find_runs import storage_address

    found = list_runs(storage)
    if as_json:
        print_json([it.to_json() for it in found])
        return
    if not found:
        echo(f"no run yet in {storage_address(storage)}")
        return
    from sm_llm.launcher.display.tables import runs_table

    shown = console()
    shown.print(runs_table(found, shown.width))


@app.command()
def nodes(
    overrides: Overrides = None,
    backend: ClusterName = None,
    as_json: AsJson = False,
) -> None:
    """List the nodes of a cluster: state, free accelerators, health, reason.

    \b
    Examples:
      sm-llm nodes
      sm-llm nodes backend.ssh_host=login backend.partition=p5
    """
    from sm_llm.launcher.tools.clusters import nodes as list_nodes
    from sm_llm.launcher.tools.clusters import rows

    found = list_nodes(backend, *overrides or ())
    if as_json:
        print_json([asdict(it) for it in found])
        return
    for line in rows(found):
        echo(line)


@app.command()
def status(run: RunName = None, storage: Storage = None, as_json: AsJson = False) -> None:
    """Show what a run is doing: state, step, loss, result."""
    from sm_llm.launcher.find_runs import attach

    found = attach(run, storage=storage).status()
    if as_json:
        print_json(found.to_json())
        return
    from sm_llm.launcher.display.tables import status_table

    console().print(status_table(found))


@app.command()
def attempts(run: RunName = None, storage: Storage = None, as_json: AsJson = False) -> None:
    """Show every start of a run: when, where from, how it ended."""
    from sm_llm.launcher.find_runs import attach

    found = attach(run, storage=storage)
    if as_json:
        print_json([it.model_dump(mode="json") for it in found.attempts])
        return
    from sm_llm.launcher.display.tables import attempts_table

    shown = console()
    shown.print(attempts_table(found, shown.width))


@app.command()
def logs(
    run: RunName = None,
    storage: Storage = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Begin with the last lines of every node.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this process.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="Only this node.")] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that match.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Another attempt than the newest.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="As it was written, with control sequences.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a run's processes printed.

    Control sequences, which could change what a terminal shows, are left out; --raw writes every byte.

    \b
    Examples:
      sm-llm logs -f --tail 0
      sm-llm logs tiny-local --rank 1 --tail 50
      sm-llm logs tiny-local --grep 'Loss|error'
    """
    from sm_llm.launcher.find_runs import attach

    lines = attach(run, storage=storage).logs(
        follow=follow, tail=tail, node=node, rank=rank, pattern=grep, attempt=attempt, raw=raw
    )
    for line in lines:
        if as_json:
            echo(json.dumps({"line": line}))
        elif raw:
            # The log was read with surrogateescape, which this turns back into its very bytes.
            sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape"))
            sys.stdout.buffer.flush()
        else:
            echo(line)


@app.command()
def metrics(
    run: RunName = None,
    storage: Storage = None,
    as_json: AsJson = False,
    last: Annotated[int | None, typer.Option(min=1, help="Only the last rows.")] = None,
) -> None:
    """Print the metrics of every step.

    --json has every field with every digit; NaN and infinity, which JSON lacks, are text.
    """
    from sm_llm.launcher.find_runs import attach
    from sm_llm.runs.events.run_metrics import to_json

    found = attach(run, storage=storage)
    rows = found.metrics()
    rows = rows[-last:] if last else rows
    if as_json:
        print_json([to_json(row) for row in rows])
        return
    if not rows:
        echo(f"{found.id} has no metrics: no step of it has reported any")
        return
    from sm_llm.launcher.display.tables import metrics_table

    shown = console()
    shown.print(metrics_table(rows, shown.width))


@app.command()
def plot(
    run: RunName = None,
    storage: Storage = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Else plot.png in the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw losses, learning rate and speed as a PNG."""
    from sm_llm.launcher.find_runs import attach

    path = str(attach(run, storage=storage).plot(output))
    if as_json:
        print_json({"plot": path})
        return
    echo(path)


@app.command()
def checkpoints(
    run: RunName = None,
    storage: Storage = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all the data and compare checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints: size, age, usable or not."""
    from sm_llm.launcher.find_runs import attach

    named = attach(run, storage=storage)
    found = named.checkpoints(deep=verify)
    if as_json:
        from dataclasses import asdict

        print_json([asdict(it) for it in found])
        return
    if not found:
        echo(f"{named.id} has no checkpoint")
        return
    from sm_llm.launcher.display.tables import checkpoints_table

    console().print(checkpoints_table(found))
