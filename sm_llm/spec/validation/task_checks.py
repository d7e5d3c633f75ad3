"""Checkers of the tasks that train no model of ours: prepare, fetch, register, precompile and the user's program."""

from __future__ import annotations

import json
import posixpath
import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.spec.inputs import FOLDERS, OF_INPUTS, PLACEHOLDER, is_folder_name
from sm_llm.spec.tasks import (
    ConvertTask,
    FetchTask,
    PrecompileTask,
    PrepareTask,
    RegisterTask,
    ScriptTask,
    TrainTokenizer,
)
from sm_llm.spec.validation.address_checks import HUB
from sm_llm.spec.validation.fields import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.job import JobSpec

_GROUP = re.compile(
    r"[A-Za-z0-9](?:-*[A-Za-z0-9]){0,62}|arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:model-package-group/\S+"
)
_IMAGE = re.compile(r"\S{1,255}")
_MODEL = re.compile(r"steps\.[\w-]+\.output(?:/.*)?|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/.+")
_FILE = re.compile(r"(?![/-])[\w.-]+(?:/[\w.-]+)*\.(?:py|sh)")
_MODULE = re.compile(r"-m [A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
# Linux's MAX_ARG_STRLEN, without the closing NUL.
_LONGEST_WORD = 131_071
_KEY = re.compile(r"[^\s=]+")


def check_tokenizer(job: JobSpec) -> Iterator[Issue]:
    """A tokenizer to use and one to train, for the same text."""
    task = job.task
    # A block of defaults cannot be distinguished from one that was left out.
    if isinstance(task, PrepareTask) and task.tokenizer is not None and task.train_tokenizer != TrainTokenizer():
        yield Issue("tokenizer-given-twice", "task.train_tokenizer", "give tokenizer or train_tokenizer, not both")


def check_fetch_source(job: JobSpec) -> Iterator[Issue]:
    """What is fetched comes from the hub."""
    task = job.task
    if isinstance(task, FetchTask) and not HUB.fullmatch(task.source):
        remedy = "Write hf://org/name@revision; files elsewhere are read where they are, or copied by sm-llm sync"
        yield Issue("fetch-source-invalid", "task.source", "is not an address on the hub", task.source, remedy)


def check_conversion(job: JobSpec) -> Iterator[Issue]:
    """Settings of the other direction, which the conversion would refuse."""
    task = job.task
    if isinstance(task, ConvertTask) and task.to == "nxd" and task.config is not None:
        remedy = "Leave it out: the config.json in the folder of the weights counts"
        problem = "has no effect with to: nxd"
        yield Issue("conversion-setting-without-effect", "task.config", problem, task.config, remedy)
    if isinstance(task, ConvertTask) and task.to == "hf" and not task.xser:
        problem = "has no effect with to: hf: the shards show it"
        yield Issue("conversion-setting-without-effect", "task.xser", problem, task.xser, "Leave it out")


def check_registration(job: JobSpec) -> Iterator[Issue]:
    """Limits of SageMaker's CreateModelPackage, and where a model can lie."""
    task = job.task
    if not isinstance(task, RegisterTask):
        return
    if not _MODEL.fullmatch(task.model):
        remedy = "Write steps.NAME.output, or s3://bucket/RUN/result"
        yield Issue("register-model-not-in-s3", "task.model", "is not a place of a model in S3", task.model, remedy)
    if not _GROUP.fullmatch(task.group):
        valid = re.sub(r"[^A-Za-z0-9]+", "-", task.group).strip("-")[:63] or "models"
        yield Issue(
            "register-group-name-invalid",
            "task.group",
            "a group's name has 1 to 63 letters, digits and hyphens",
            task.group,
            f"Try {valid}",
        )
    if not _IMAGE.fullmatch(task.image_uri):
        yield Issue(
            "register-image-invalid",
            "task.image_uri",
            "an image's address has 1 to 255 characters and no spaces",
            task.image_uri,
        )


def check_precompiled_strategy(job: JobSpec) -> Iterator[Issue]:
    """A strategy that compiles nothing ahead."""
    task = job.task
    if isinstance(task, PrecompileTask) and not task.training.parallelism.can.compiles_ahead:
        path, name = "task.training.parallelism.strategy", task.training.parallelism.strategy
        yield Issue("precompile-needs-nxd", path, "has no graphs to compile", name, "Only nxd compiles ahead")


def check_program_entry(job: JobSpec) -> Iterator[Issue]:
    """What is to run, and where it lies."""
    task = job.task
    if not isinstance(task, ScriptTask):
        return
    if not (_FILE.fullmatch(task.entry) or _MODULE.fullmatch(task.entry)) or ".." in task.entry.split("/"):
        remedy = "Write a .py or .sh file below source, or -m package.module"
        yield Issue("program-entry-invalid", "task.entry", "is not a program", task.entry, remedy)
    if task.source is not None and task.source.lower().endswith(_ARCHIVES):
        remedy = "Unpack it, and give the folder"
        yield Issue(
            "program-source-is-an-archive",
            "task.source",
            "is an archive; a program is read from its folder",
            task.source,
            remedy,
        )


def check_program_arguments(job: JobSpec) -> Iterator[Issue]:
    """Arguments that cannot be written as words."""
    task = job.task
    if not isinstance(task, ScriptTask):
        return
    if isinstance(task.args, dict):
        for key, value in task.args.items():
            yield from _argument_issues(task, key, value)
    else:
        for index, word in enumerate(task.args):
            yield from _word_issues(f"task.args.{index}", word)
        if task.args_style != type(task).model_fields["args_style"].default:
            problem = "has no effect: args is a list, which is passed on as it is"
            yield Issue(
                "args-style-without-effect",
                "task.args_style",
                problem,
                task.args_style,
                "Leave it out, or write args as a mapping",
            )


def check_placeholders(job: JobSpec) -> Iterator[Issue]:
    """Words in braces that are meant as folders and are none: the program would get them as they are."""
    task = job.task
    if not isinstance(task, ScriptTask):
        return
    known = [*FOLDERS, *(f"{OF_INPUTS}{name}" for name in job.inputs)]
    for path, word in words_in_braces(task):
        if word in known:
            continue
        meant = did_you_mean(word, known)
        # Other words in braces are the program's own, such as those of a format.
        if is_folder_name(word) or meant:
            problem, listed = "names no folder of the job", ", ".join(f"{{{it}}}" for it in known)
            yield Issue("placeholder-unknown", path, problem, f"{{{word}}}", f"{meant} Known: {listed}".strip())


def check_program_folders(job: JobSpec) -> Iterator[Issue]:
    """Folders in which the program leaves its result and its checkpoints."""
    task = job.task
    if not isinstance(task, ScriptTask):
        return
    # Both are made below the working directory of the program, which the worker owns.
    for name in ("output_folder", "checkpoint_folder"):
        folder = getattr(task, name)
        if folder.startswith("/") or ".." in folder.split("/") or folder.strip("/.") == "":
            problem = "is not a folder below the program's working directory"
            yield Issue("program-folder-not-relative", f"task.{name}", problem, folder, "For example output")
    # Normalised, because ./out/ and out are the same folder.
    output, checkpoints = (posixpath.normpath(it) for it in (task.output_folder, task.checkpoint_folder))
    if output == checkpoints:
        problem = "is the output folder too: checkpoints would end up in the result"
        yield Issue("program-folders-equal", "task.checkpoint_folder", problem, task.checkpoint_folder)
    elif checkpoints.startswith(f"{output}/"):
        problem = f"lies in the output folder {output}: checkpoints would end up in the result"
        yield Issue(
            "program-checkpoints-inside-output",
            "task.checkpoint_folder",
            problem,
            task.checkpoint_folder,
            "Give a folder beside it: checkpoints",
        )
    elif output.startswith(f"{checkpoints}/"):
        problem = f"lies in the checkpoint folder {checkpoints}: the result would be taken for a part of a checkpoint"
        yield Issue(
            "program-output-inside-checkpoints",
            "task.output_folder",
            problem,
            task.output_folder,
            "Give a folder beside it: output",
        )


def check_program_strategy(job: JobSpec) -> Iterator[Issue]:
    """Settings of a strategy that nothing hands to the program."""
    spec = job.task.parallelism if isinstance(job.task, ScriptTask) else None
    if spec is None or spec.can.reach_programs:
        return
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if name != "strategy" and value != getattr(type(spec)(), name):
            problem = "has no effect on a program: it starts under torchrun and shards its model itself"
            yield Issue(
                "program-degree-without-effect",
                f"task.parallelism.{name}",
                problem,
                value,
                "Leave it out, and give it to the program as args",
            )


def words_in_braces(task: ScriptTask) -> Iterator[tuple[str, str]]:
    """Path and word of every ``{word}`` in the arguments."""
    yield from _in_braces("task.args", task.args)


def _in_braces(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield from ((path, match[1]) for match in PLACEHOLDER.finditer(value))
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _in_braces(f"{path}.{key}", item)


def _word_issues(path: str, word: Any) -> Iterator[Issue]:
    """What no program can be given as one argument (execve(2))."""
    if isinstance(word, str) and (length := len(word.encode())) > _LONGEST_WORD:
        problem = f"has {length:,} bytes; a program is given at most {_LONGEST_WORD:,} in one argument"
        yield Issue("argument-too-long", path, problem, word, "Write args as a mapping with args_style: file")


def _argument_issues(task: ScriptTask, key: str, value: Any) -> Iterator[Issue]:
    path = f"task.args.{key}"
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        yield Issue("argument-not-json", path, f"cannot be written down: {error}", value)
        return
    # In a file nothing has to fit into a command line.
    if task.args_style == "file":
        return
    for word in value if isinstance(value, list) else [value]:
        yield from _word_issues(path, word)
    if key.startswith("-") and task.args_style != "key=value":
        problem = f"would be written as --{key}: an argument's name comes without hyphens"
        yield Issue(
            "argument-name-with-hyphens",
            path,
            problem,
            key,
            f"Write {key.lstrip('-')}" if key.lstrip("-") else "Write args as a list",
        )
    # From an override such as task.args.0=x, which was meant for a list.
    if key.isdigit():
        problem, remedy = "a number is the place of a word in a list, not an argument's name", "Write args as a list"
        yield Issue("argument-name-is-a-number", path, problem, key, remedy)
    if not _KEY.fullmatch(key):
        yield Issue("argument-name-invalid", path, "an argument's name has no spaces and no equals sign", key)
    items = value if isinstance(value, list) else [value]
    if None in items and isinstance(value, list) and task.args_style != "key=value":
        remedy = 'Leave it out, or write the text "null"'
        yield Issue("argument-null-in-list", path, "holds null, which cannot be an argument", value, remedy)
    if any(isinstance(item, list | dict) for item in items):
        remedy = "Use args_style: file, or write args as a list"
        yield Issue("argument-nested", path, f"{task.args_style!r} cannot write nested values", value, remedy)
