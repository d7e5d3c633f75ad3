"""The verb that copies from the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, S3Access, console, print_json, s3_access
from sm_llm.terminal import echo

AllWeights = Annotated[bool, typer.Option("--all-weights", help="Every format of the weights, and original/.")]


@app.command()
@s3_access
def fetch(
    source: Annotated[str, typer.Argument(metavar="SRC", help="hf://[datasets/]org/name[@revision][/path].")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder or s3://bucket/prefix.")],
    include: Annotated[list[str] | None, typer.Option(help="Take only: a folder, .suffix or 'glob'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave out: a folder, .suffix or 'glob'.")] = None,
    all_weights: AllWeights = False,
    as_json: AsJson = False,
    *,
    options: S3Access,
) -> None:
    """Copy a model or data set of the Hugging Face hub to a folder or S3, at one commit.

    The commit is pinned in DST/.fetch with the checksum of every file. Interrupted, the same command continues. A token
    is read from HF_TOKEN, or from where the hub's own login keeps it.

    \b
    Examples:
      sm-llm fetch hf://meta-llama/Llama-3.2-1B ./llama
      sm-llm fetch hf://datasets/org/texts@v2/en s3://bucket/texts
    """
    from sm_llm.launcher.tools.sync_command import fetch_lines, shown, stopping_on_signals
    from sm_llm.storage.hub.hub_fetch import fetch as copy

    with stopping_on_signals(), shown(console(stderr=True)) as progress:
        report = copy(
            source,
            destination,
            include=include or (),
            # original/ holds the same weights once more, in their makers' own format.
            exclude=(*(exclude or ()), *(() if all_weights else ("original",))),
            one_weight_format=not all_weights,
            options=options,
            progress=progress,
        )
    if as_json:
        print_json(report.to_json())
        return
    for line in fetch_lines(report):
        echo(line)
