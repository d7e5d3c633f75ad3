"""Verbs that act on a run that exists: watch, stop, continue, finish, repeat, branch."""

from __future__ import annotations

from typing import Annotated

import typer

from sm_llm.cli.app import app
from sm_llm.cli.options import AsJson, GivenRun, Overrides, RunName, Storage, Wait, carry_on, console, print_json
from sm_llm.terminal import echo, quoted

Step = Annotated[int | None, typer.Option("--step", min=1, help="The checkpoint of this step; else the newest.")]


@app.command()
def attach(run: RunName = None, storage: Storage = None) -> None:
    """Watch a run that is running; Ctrl-C only ends the watching.

    \b
    Examples:
      sm-llm attach tiny-local
      sm-llm attach local://my-host/4711
    """
    from sm_llm.launcher.display.live import follow_live
    from sm_llm.launcher.find_runs import attach as find
    from sm_llm.runs.run_states import EXIT_CODES

    state = follow_live(find(run, storage=storage, running_first=True), console())
    # None: Ctrl-C ended the display alone, and the run continues.
    raise typer.Exit(0 if state is None else EXIT_CODES.get(state, 0))


@app.command()
def wait(run: RunName = None, storage: Storage = None, as_json: AsJson = False) -> None:
    """Wait silently until a run has ended.

    The exit code is that of its state; a failure is printed with the first failing rank and its cause.

    \b
    Example:
      sm-llm fit job.yaml --no-wait && sm-llm wait && echo done
    """
    from sm_llm.errors import RunFailed
    from sm_llm.launcher.find_runs import attach as find
    from sm_llm.runs.run_states import EXIT_CODES

    found = find(run, storage=storage)
    try:
        found.wait()
    # Not raised on: the exit code is that of the state, and --json prints the status all the same.
    except RunFailed as error:
        echo(f"error: {error}", err=True)
    status = found.status()
    if as_json:
        print_json(status.to_json())
    # A state without a code of its own is no success to a script.
    raise typer.Exit(EXIT_CODES.get(status.state, 1))


@app.command()
def stop(
    run: RunName = None,
    storage: Storage = None,
    now: Annotated[bool, typer.Option("--now", help="Kill it; what was not saved is lost.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Watch how it ends, or only ask.")] = True,
    as_json: AsJson = False,
) -> None:
    """Stop a run after its current step, saving what it can. Where it has ended already, that is printed."""
    from sm_llm.launcher.display.live import see_it_stop
    from sm_llm.launcher.find_runs import attach as find

    found = find(run, storage=storage, running_first=True)
    # No error: the run is over, as was asked for.
    if found.attempts and (state := found.state).is_final:
        echo(f"{found.id} is {state.value}: there is nothing to stop", err=as_json)
        if as_json:
            print_json(found.status().to_json())
        return
    found.stop(now=now)
    words = "is being killed" if now else "was asked to stop after its current step"
    # With --json standard output is for the document alone.
    echo(f"{found.id} {words}", err=as_json)
    if wait:
        see_it_stop(found, console(stderr=as_json))
    if as_json:
        print_json(found.status().to_json())


@app.command()
def shell(
    run: RunName = None,
    storage: Storage = None,
    node: Annotated[int, typer.Option("--node", min=0, help="Node to enter, counted from 0.")] = 0,
    print_only: Annotated[bool, typer.Option("--print", help="Print the command only.")] = False,
) -> None:
    """Open a shell where a run is running.

    On SageMaker in the container of a node, if the run was launched with backend.remote_debug=true; on Slurm on a node,
    within the job's allocation.

    \b
    Example:
      sm-llm shell s3://bucket/runs/RUN --node 1
    """
    from sm_llm.launcher.find_runs import attach as find
    from sm_llm.launcher.tools.shell import shell as enter
    from sm_llm.launcher.tools.shell import shell_command

    found = find(run, storage=storage, running_first=True)
    # The shell replaces this process, so nothing after this call is reached.
    if not print_only:
        enter(found, node)
    echo(quoted(*shell_command(found, node)))


@app.command()
def resume(
    run: GivenRun,
    overrides: Overrides = None,
    storage: Storage = None,
    step: Step = None,
    wait: Wait = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest, or an earlier checkpoint.

    With --step the later checkpoints are rolled back. Changes hold from here on. A run without a checkpoint is refused.

    \b
    Examples:
      sm-llm resume tiny-local
      sm-llm resume runs/job-20260101-120000-beef --step 400 task.optim.max_grad_norm=0.5
    """
    from sm_llm.launcher.find_runs import attach as find

    carry_on(find(run, storage=storage).resume(*overrides or (), step=step), wait=wait, as_json=as_json)


@app.command()
def finish(run: RunName = None, storage: Storage = None, wait: Wait = None, as_json: AsJson = False) -> None:
    """Publish the result of a run that has done all steps.

    For a run that ended after its last step, before its result was published (completed-unpublished).
    """
    from sm_llm.launcher.find_runs import attach as find

    carry_on(find(run, storage=storage).finish(), wait=wait, as_json=as_json)


@app.command()
def rerun(
    run: GivenRun, overrides: Overrides = None, storage: Storage = None, wait: Wait = None, as_json: AsJson = False
) -> None:
    """Repeat a run, from its record, as a new one.

    It has the same specification, digest and inputs. Changes since then are printed: packages, this code, the commit.

    \b
    Example:
      sm-llm rerun tiny-local-20260101-120000-beef task.seed=1
    """
    from sm_llm.launcher.find_runs import attach as find
    from sm_llm.launcher.lifecycle import differences

    found = find(run, storage=storage)
    # Reported and not refused: what has changed may be the reason to run it again.
    for line in differences(found.record, found.launch_folder):
        echo(f"not as it was then: {line}", err=True)
    carry_on(found.rerun(*overrides or ()), wait=wait, as_json=as_json)


@app.command()
def branch(
    run: GivenRun,
    overrides: Overrides = None,
    storage: Storage = None,
    step: Step = None,
    wait: Wait = None,
    as_json: AsJson = False,
) -> None:
    """Begin a new run from a checkpoint of another.

    The other run stays as it is.

    \b
    Example:
      sm-llm branch tiny-local --step 324 task.max_steps=400 task.optim.learning_rate=1e-4
    """
    from sm_llm.launcher.find_runs import attach as find

    carry_on(find(run, storage=storage).branch(*overrides or (), step=step), wait=wait, as_json=as_json)
