"""The verbs of Neuron's cache of compiled graphs, in a group of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, S3Access, print_json, s3_access
from sm_llm.terminal import counted, echo

CACHE_VERBS = {
    "ls": "sm_llm.launcher.tools.neuron_cache:ls",
    "clear": "sm_llm.launcher.tools.neuron_cache:clear",
    "unlock": "sm_llm.launcher.tools.neuron_cache:unlock",
}
"""Every verb of the group and the Python function that does its work."""

cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look after the graphs compiled for Trainium.")
app.add_typer(cache, name="cache")

Location = Annotated[str, typer.Argument(metavar="STORAGE", help="Where runs are stored, or the cache itself.")]


@cache.command()
@s3_access
def ls(location: Location, as_json: AsJson = False, *, options: S3Access) -> None:
    """List the compilers of a cache, with their graphs: compiled, failed, and not compiled yet."""
    from sm_llm.launcher.tools import neuron_cache
    from sm_llm.terminal import size

    graphs = neuron_cache.ls(location, options)
    if as_json:
        print_json([it.to_json() for it in graphs])
        return
    if not graphs:
        echo(f"{neuron_cache.cache_location(location)} has no graphs")
    for compiler, states, count in neuron_cache.summary(graphs):
        shown = ", ".join(f"{number} {state}" for state, number in states.items())
        echo(f"{compiler}: {shown}, {size(count)}")


@cache.command()
@s3_access
def clear(
    location: Location,
    everything: Annotated[bool, typer.Option("--all", help="All graphs, not those alone that failed.")] = False,
    compiler: Annotated[str | None, typer.Option(help="Of this version alone, e.g. 2.23.6484.0.")] = None,
    *,
    options: S3Access,
) -> None:
    """Delete graphs that failed to compile, so that they are compiled again; or all."""
    from sm_llm.launcher.tools import neuron_cache
    from sm_llm.terminal import size

    # Failed graphs alone by default: compiling the others again takes hours.
    done = neuron_cache.clear(location, failed_only=not everything, compiler=compiler, options=options)
    echo(f"deleted {counted(len(done.keys), 'file')}, {size(done.size)}, of {done.location}")


@cache.command()
@s3_access
def unlock(
    location: Location,
    older_than_minutes: Annotated[float, typer.Option(min=0, help="Leave younger locks.")] = 60.0,
    *,
    options: S3Access,
) -> None:
    """Delete locks that a compiler which was killed has left, and for which every other one waits."""
    from sm_llm.launcher.tools import neuron_cache

    done = neuron_cache.unlock(location, older_than_minutes=older_than_minutes, options=options)
    echo(f"deleted {counted(len(done.keys), 'lock')} of {done.location}")
