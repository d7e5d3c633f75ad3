"""The verb that tries out whether things are as runs need them: a storage, or exact resume."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, Overrides, S3Access, print_json, s3_access, with_user_options
from sm_llm.terminal import echo

_STEPS = 24


@app.command()
@s3_access
def doctor(
    overrides: Overrides = None,
    storage: Annotated[
        str | None, typer.Option(help="Try a folder or s3:// address that runs are to be kept in.")
    ] = None,
    resume_proof: Annotated[
        str | None, typer.Option("--resume-proof", metavar="RECIPE|FILE", help="Break a training job and compare.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Check the cluster that backend.KEY=VALUE describe: slurm.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="With --resume-proof: train so many steps, twice. [default: 24]")
    ] = None,
    as_json: AsJson = False,
    *,
    options: S3Access,
) -> None:
    """Try whether things are as runs need them.

    --storage tries whether a storage can do what runs need of it, and prints the IAM policy that is missing.
    --resume-proof runs the first steps of a training job twice, once broken by SIGKILL twice and continued, and
    compares losses, learning rates and hashes of all that is restored.
    --backend checks a cluster: its commands, plugins and accounting, and by a small job what its nodes see.

    \b
    Examples:
      sm-llm doctor --storage s3://bucket/runs
      sm-llm doctor --resume-proof job.yaml --steps 60 task.deterministic=true
      sm-llm doctor --backend slurm backend.shared_folder=/fsx/sm_llm backend.virtual_environment=/fsx/venv
    """
    # Each proves something else, and their options do not mix.
    if [storage, resume_proof, backend].count(None) != 2:
        raise typer.BadParameter("give --storage, --resume-proof or --backend")
    if steps is not None and resume_proof is None:
        raise typer.BadParameter("--steps has no effect without --resume-proof")
    if storage is None and options != with_user_options(S3Access()):
        raise typer.BadParameter("options of S3 have no effect without --storage; write storage_options.KEY=VALUE")
    if backend is not None:
        from sm_llm.launcher.tools.clusters import check_cluster

        # Progress on standard error: with --json standard output is the document alone.
        report = check_cluster(backend, *overrides or (), tell=lambda text: echo(text, err=True))
        _answer(report.to_json(), report.text(), report.ok, as_json)
    if resume_proof is not None:
        from sm_llm.launcher.tools.resume_check import check_resume

        tell = lambda text: echo(text, err=True)  # noqa: E731
        proof = check_resume(resume_proof, *overrides or (), steps=_STEPS if steps is None else steps, tell=tell)
        _answer(proof.to_json(), proof.text(), proof.ok, as_json)
    assert storage is not None
    # Only a job has values to override.
    if overrides:
        raise typer.BadParameter("--storage takes no KEY=VALUE")
    from sm_llm.storage.storage_probe import probe_storage

    probed = probe_storage(storage, options)
    _answer(probed.to_json(), probed.text(), probed.ok, as_json)


def _answer(values: object, text: str, ok: bool, as_json: bool) -> NoReturn:
    if as_json:
        print_json(values)
    else:
        echo(text)
    raise typer.Exit(0 if ok else 1)
