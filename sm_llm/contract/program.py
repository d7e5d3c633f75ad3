"""The user's own program of a script task: its command line, and what it and its worker hand to each other.

The program finds its folders in variables: ``SM_LLM_OUTPUT``, ``SM_LLM_CHECKPOINTS``, ``SM_LLM_SCRATCH`` and, for every
input of the job, ``SM_LLM_INPUT_<NAME>``. After a resume ``SM_LLM_RESUME_STEP`` and ``SM_LLM_RESUME_FOLDER`` name the
checkpoint that was brought back.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

from sm_llm.spec.inputs import PLACEHOLDER
from sm_llm.spec.loading.yaml_text import to_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from sm_llm.spec.tasks import ScriptTask

OUTPUT = "SM_LLM_OUTPUT"
CHECKPOINTS = "SM_LLM_CHECKPOINTS"
SCRATCH = "SM_LLM_SCRATCH"
HANDOVER = "SM_LLM_HANDOVER"
"""Folder of the node into which ``sm_llm.publish`` puts finished checkpoints: ``<step>/<name>/…``."""
EVENTS = "SM_LLM_EVENTS"
"""File to which ``sm_llm.log`` appends events; rank 0 alone has it."""
ATTEMPT = "SM_LLM_ATTEMPT"
SMP_CONFIG = "SM_LLM_SMP_CONFIG"
"""JSON file with the parameters of ``parallelism: {strategy: smp}``, for ``torch.sagemaker.init``."""
RESUME_STEP = "SM_LLM_RESUME_STEP"
RESUME_FOLDER = "SM_LLM_RESUME_FOLDER"
ARGUMENTS_FILE = "arguments.yaml"

_MODULE = re.compile(r"-m +([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_STEP = re.compile(r"(?:.*[-_.]|(?:.*[-_.])?(?:step|checkpoint|ckpt|epoch|iter))?(\d+)")
_PLAIN_HYDRA = re.compile(r"[A-Za-z_/.%@*|?][A-Za-z0-9_/.%@*|?:+-]*")
_BEFORE_QUOTE = re.compile(r"\\+(?='|\Z)")


def step_of(name: str) -> int | None:
    """The step that a checkpoint folder's name ends with: ``checkpoint-500``, ``step_500``, ``500``."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def command(task: ScriptTask, folder: Path) -> list[str]:
    """The argv of the program, byte for byte as in the specification. ``folder`` is where it runs.

    A mapping in style ``file`` is written there.
    """
    if match := _MODULE.fullmatch(task.entry):
        start = [sys.executable, "-m", match[1]]
    elif task.entry.endswith(".py"):
        start = [sys.executable, task.entry]
    else:
        start = ["bash", task.entry]
    if task.args_style == "file" and not isinstance(task.args, list):
        path = folder / ARGUMENTS_FILE
        path.write_text(to_yaml(task.args) + "\n", encoding="utf-8")
        return [*start, str(path)]
    return [*start, *argument_words(task)]


def program_words(task: ScriptTask) -> int:
    """How many words of ``command`` come before the program's arguments."""
    return 3 if _MODULE.fullmatch(task.entry) else 2


def given_arguments(task: ScriptTask) -> dict[str, Any]:
    """The arguments of a mapping that reach the program: as an option, null is no argument; elsewhere it is a value."""
    args = task.args if isinstance(task.args, dict) else {}
    # Hydra and YAML have a word for null, argparse has none.
    are_options = task.args_style in ("--key value", "flags")
    return {key: value for key, value in args.items() if value is not None or not are_options}


def argument_words(task: ScriptTask) -> list[str]:
    """The arguments as the program gets them, before the names of folders are filled in; of a file, its name."""
    if isinstance(task.args, list):
        return list(task.args)
    return [ARGUMENTS_FILE] if task.args_style == "file" else [*_written(given_arguments(task), task.args_style)]


def _written(args: Mapping[str, Any], style: str) -> Iterator[str]:
    """Arguments of a mapping in its own order; a list is several words, or a list in Hydra's spelling."""
    for key, value in args.items():
        if style == "key=value":
            yield from _hydra(key, value)
        elif style == "flags" and isinstance(value, bool):
            yield from [f"--{key}"] if value else []
        else:
            yield f"--{key}"
            yield from [_word(it) for it in value] if isinstance(value, list) else [_word(value)]


def _word(value: Any) -> str:
    """A value as Python spells it; what has a structure, as JSON."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _hydra(key: str, value: Any) -> Iterator[str]:
    """``key=value`` as Hydra and OmegaConf read it back; ``~key`` deletes, a mapping becomes dotted keys."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _hydra(f"{key}.{name}", item)
    elif key.startswith("~") and value is None:
        yield key
    else:
        yield f"{key}={_hydra_value(value)}"


def _hydra_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra_value, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN_HYDRA.fullmatch(value) and to_yaml(value) == value:
        return value
    # Between quotes a backslash means itself, but for those in front of a quote or at the end.
    escaped = _BEFORE_QUOTE.sub(lambda match: match[0] * 2, value).replace("'", "\\'")
    return f"'{escaped}'"


def with_folders(task: ScriptTask, folders: Mapping[str, str]) -> ScriptTask:
    """The task with ``{inputs.NAME}``, ``{output}``, ``{checkpoints}`` and ``{scratch}`` in its arguments replaced.

    ``folders`` holds the folder of each by its name, ``inputs.NAME`` among them.
    """
    return task.model_copy(update={"args": _filled(task.args, folders)})


def _filled(value: Any, folders: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda match: folders.get(match[1], match[0]), value)
    if isinstance(value, list):
        return [_filled(item, folders) for item in value]
    return {key: _filled(item, folders) for key, item in value.items()} if isinstance(value, dict) else value
