"""The verb that copies from the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, Endpoint, KmsKey, Owner, Region, StorageClass, console, print_json

AllWeights = Annotated[bool, typer.Option("--all-weights", help="Every format of the weights, and original/.")]


@app.command()
def fetch(
    source: Annotated[str, typer.Argument(metavar="SRC", help="hf://[datasets/]org/name[@revision][/path].")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder or s3://bucket/prefix.")],
    include: Annotated[list[str] | None, typer.Option(help="Take only: a folder, .suffix or 'glob'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave out: a folder, .suffix or 'glob'.")] = None,
    all_weights: AllWeights = False,
    endpoint_url: Endpoint = None,
    region: Region = None,
    kms_key_id: KmsKey = None,
    storage_class: StorageClass = None,
    expected_bucket_owner: Owner = None,
    as_json: AsJson = False,
) -> None:
    """Copy a model or data set of the Hugging Face hub to a folder or S3, at one commit.

    The commit is pinned in DST/.fetch with the checksum of every file. Broken off, the same command goes on. A token
    is read from HF_TOKEN, or from where the hub's own login keeps it.

    \b
    Examples:
      sm-llm fetch hf://meta-llama/Llama-3.2-1B ./llama
      sm-llm fetch hf://datasets/org/texts@v2/en s3://bucket/texts
    """
    from sm_llm.launcher.sync import fetch as copy
    from sm_llm.launcher.sync import fetch_lines, shown, stopping_on_signals
    from sm_llm.storage.s3_options import S3Options

    options = S3Options(endpoint_url, region, kms_key_id, storage_class, expected_bucket_owner)
    with stopping_on_signals(), shown(console(stderr=True)) as progress:
        report = copy(
            source,
            destination,
            include=include or (),
            exclude=(*(exclude or ()), *(() if all_weights else ("original",))),
            one_weight_format=not all_weights,
            options=options,
            progress=progress,
        )
    if as_json:
        print_json(report.to_json())
        return
    for line in fetch_lines(report):
        typer.echo(line)
