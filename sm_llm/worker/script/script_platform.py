"""SageMaker's own contract for a user's program: its variables, and the folders that an ordinary script writes to.

A script that was written for SageMaker finds its arguments in ``SM_HPS`` and ``SM_HP_*`` and its inputs in
``SM_CHANNEL_*``, and writes to ``SM_MODEL_DIR`` and ``SM_OUTPUT_DATA_DIR``: parts of the output folder, which is
published as the run's result.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.program import given_arguments
from sm_llm.runs.run_paths import CONTAINER_BASE
from sm_llm.storage.publication.result import POINTER, holds_pointers
from sm_llm.terminal import counted
from sm_llm.worker.script.plain_files import make_names_usable, make_plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.runs.run_paths import ContainerPaths
    from sm_llm.spec.tasks import ScriptTask

PLATFORM = Path(CONTAINER_BASE)
"""The base of every container on SageMaker."""
MODEL, OUTPUT = "model", "output"
DATA = "data"
INTERMEDIATE = "intermediate"
# Files in the output folder of the platform (``SM_OUTPUT_DIR``) that toolkit, worker or a failing program write.
_OF_THE_PLATFORM = ("failure", "success", "stopped", "orphaned.log", ".room")
CHECKPOINTS = "checkpoints"
"""Below the container's base: where SageMaker's examples keep checkpoints."""


def variables(
    task: ScriptTask, argv: Sequence[str], inputs: Mapping[str, str], output: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """What the training toolkit sets, filled from the job: ``argv`` are the program's arguments, ``inputs`` its inputs
    by name, ``output`` the folder that is published."""
    arguments = given_arguments(task)
    channels = sorted({*json.loads(environ.get("SM_CHANNELS", "[]")), *inputs})
    found = {
        "SM_MODEL_DIR": str(output),
        "SM_OUTPUT_DATA_DIR": str(output / DATA),
        "SM_OUTPUT_INTERMEDIATE_DIR": str(output / INTERMEDIATE),
        "SM_HPS": json.dumps({**_given(environ), **arguments}),
        "SM_USER_ARGS": json.dumps(list(argv)),
        "SM_CHANNELS": json.dumps(channels),
        **{f"SM_CHANNEL_{name.upper()}": location for name, location in inputs.items()},
        **{f"SM_HP_{name.upper()}": _text(value) for name, value in arguments.items()},
    }
    # Some scripts read the one JSON variable instead of the single ones; both must agree.
    if training := environ.get("SM_TRAINING_ENV"):
        own = {"hyperparameters": arguments, "model_dir": str(output), "output_data_dir": str(output / DATA)}
        own["output_intermediate_dir"] = str(output / INTERMEDIATE)
        found["SM_TRAINING_ENV"] = json.dumps({**json.loads(training), **own})
    return found


def _given(environ: Mapping[str, str]) -> dict[str, Any]:
    """Hyperparameters that the toolkit passes and that are not overrides of our specification."""
    return {name: value for name, value in json.loads(environ.get("SM_HPS") or "{}").items() if "." not in name}


def _text(value: Any) -> str:
    """A value as the toolkit writes it into a variable."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def make_folders(container: ContainerPaths, output: Path, checkpoints: Path) -> None:
    """Make the folders that a program finds; the platform's folder for checkpoints leads to ours, where it can."""
    for folder in (output / DATA, output / INTERMEDIATE):
        folder.mkdir(parents=True, exist_ok=True)
    link = container.base / CHECKPOINTS
    try:
        # Left by an earlier attempt on this node. A folder with files in it is not ours to remove: the link then fails,
        # and what is in there is counted in the end.
        if link.is_symlink():
            link.unlink()
        elif link.is_dir() and not any(link.iterdir()):
            link.rmdir()
        link.symlink_to(checkpoints, target_is_directory=True)
    except OSError:
        return  # what is written there is warned of in the end


def collect(container: ContainerPaths, output: Path, own: Path) -> list[str]:
    """Bring what the program wrote to the platform's own folders, by their fixed names, into its output.

    Links to files in these folders, or below ``own``, the folder of all that the program has, become their files.
    Returns warnings for what is not published, or under another name.
    """
    root = container.output_data.parent
    locations = {
        container.model: output,
        container.output_data: output / DATA,
        root / INTERMEDIATE: output / INTERMEDIATE,
    }
    # Before anything moves, which would break the links to it.
    kept = [text for it in (container.model, root, output) for text in make_plain(it, (container.model, root, own))]
    # The platform's output folder comes last, because two of the others lie in it.
    for source, target in {**locations, root: output}.items():
        for entry in sorted(source.iterdir()) if source.is_dir() else []:
            # Pointers are this worker's; the platform's own reports are not part of a result.
            is_ours = entry.name == POINTER or holds_pointers(entry)
            if is_ours or (source == root and (entry in locations or entry.name in _OF_THE_PLATFORM)):
                continue
            if (target / entry.name).exists():
                kept.append(f"{entry} is not published: {target / entry.name} is there already")
                continue
            shutil.move(entry, target / entry.name)
    checkpoints = container.base / CHECKPOINTS
    if not checkpoints.is_symlink() and (count := count_files(checkpoints)):
        kept.append(f"{checkpoints}: not published ({counted(count, 'file')}). Write to SM_LLM_CHECKPOINTS")
    return [*kept, *make_names_usable(output)]


def astray(container: ContainerPaths, since: float, root: Path = PLATFORM) -> list[str]:
    """Warnings for what a program wrote, ``since`` a time of the clock, to the fixed folders of a SageMaker container,
    where the container's base is another: it is not published."""
    if container.base == root:
        return []
    found = []
    for name in (MODEL, OUTPUT, CHECKPOINTS):
        if count := sum(it.is_file() and it.stat().st_mtime >= since for it in (root / name).rglob("*")):
            files = "1 file was" if count == 1 else f"{count} files were"
            found.append(
                f"{files} written to {root / name} of this machine and {'is' if count == 1 else 'are'} not published: "
                f"the job's folder is {container.base / name}. Write to SM_MODEL_DIR, SM_OUTPUT_DATA_DIR or "
                "SM_LLM_CHECKPOINTS"
            )
    return found


def count_files(folder: Path) -> int:
    """Files in a folder and below it."""
    return sum(it.is_file() for it in folder.rglob("*")) if folder.is_dir() else 0
