"""Issues of a user's program before it is packed: its entry, what it would install, and what may not leave."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import REQUIREMENTS, is_owned
from sm_llm.contract.program_tree import IGNORE_FILE, ProgramTree
from sm_llm.errors import Issue, warning
from sm_llm.launcher.planning.local_paths import is_reference, local_folder
from sm_llm.launcher.planning.requirement_file import requirement_issues
from sm_llm.optional import is_installed
from sm_llm.runs.run_paths import CONTAINER_BASE
from sm_llm.spec.inputs import FOLDERS, OF_INPUTS
from sm_llm.spec.tasks import ScriptTask
from sm_llm.spec.validation.task_checks import words_in_braces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from sm_llm.launcher.images.images import Image
    from sm_llm.launcher.planning.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec

_MODULE = "-m "
_PLATFORM_FOLDER = re.compile(rf"{CONTAINER_BASE}/(model|output/data|output|checkpoints|input)\b")
_VARIABLES = {
    "model": "SM_MODEL_DIR",
    "output/data": "SM_OUTPUT_DATA_DIR",
    "checkpoints": "SM_LLM_CHECKPOINTS",
    "input": "SM_CHANNEL_<NAME>",
}
_TEXT_FILES = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")
_LARGEST_TEXT = 1_000_000


def program_warnings(job: JobSpec) -> Iterator[Issue]:
    """What a program gets that is possible, but hardly meant."""
    task = job.task
    if not isinstance(task, ScriptTask):
        return
    folders = [*FOLDERS, *(f"{OF_INPUTS}{name}" for name in job.inputs)]
    for path, word in words_in_braces(task):
        if word not in folders:
            listed = ", ".join(f"{{{it}}}" for it in folders)
            message = f"{{{word}}} reaches the program as it is; folders of the job are {listed}"
            yield warning("placeholder-not-replaced", path, message)
    if job.backend.runs_here:
        yield from _platform_folder_warnings(job, task)
    args = task.args if isinstance(task.args, dict) else {}
    for name, same in _same_names(args):
        message = f"SM_HP_{name.upper()} holds the value of {same}; the program finds both in SM_HPS"
        yield warning("argument-variables-collide", f"task.args.{name}", message)


def _platform_folder_warnings(job: JobSpec, task: ScriptTask) -> Iterator[Issue]:
    """Folders of SageMaker's containers by their fixed names: on this machine they are not the job's.

    In arguments they are led to the job's own.
    """
    advice = "here it is not a folder of the job. Read this variable in its place"
    for name, value in job.environment.items():
        if found := _PLATFORM_FOLDER.search(value):
            message = f"{found[0]} is a folder of SageMaker's containers, and {advice} ({_variable(found[1])})"
            yield warning("variable-names-container-folder", f"environment.{name}", message)
    folder = None if is_reference(task.source) else local_folder(task.source)
    if folder is None or not folder.is_dir():
        return
    try:
        files = ProgramTree(folder).files()
    except (OSError, ValueError):
        return  # an issue already
    for file in files:
        if (found := _platform_folder_in(file)) is not None:
            name = file.relative_to(folder).as_posix()
            message = f"names {found[0]} of SageMaker's containers, and {advice} ({_variable(found[1])})"
            yield warning("program-names-container-folder", f"task.source/{name}", message)


def _platform_folder_in(file: Path) -> re.Match[str] | None:
    """The first fixed folder in a text file, but for defaults beside a variable of the toolkit."""
    if file.suffix not in _TEXT_FILES or file.stat().st_size > _LARGEST_TEXT:
        return None
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((found for it in lines if "SM_" not in it and (found := _PLATFORM_FOLDER.search(it))), None)


def _variable(folder: str) -> str:
    return _VARIABLES.get(folder, "SM_OUTPUT_DIR")


def _same_names(args: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Arguments whose names are one in upper case, and the last of that name, which the variable holds."""
    last = {name.upper(): name for name in args}
    yield from ((name, last[name.upper()]) for name in args if last[name.upper()] != name)


def source_issues(job: JobSpec) -> Iterator[Issue]:
    """A program's folder on this machine that is not there, or is none; none for other tasks."""
    source = job.task.source if isinstance(job.task, ScriptTask) else None
    folder = None if is_reference(source) else local_folder(source)
    # A folder of the container exists only once the job runs.
    if folder is None or folder.is_dir() or str(folder).startswith("/opt/ml/"):
        return
    if folder.exists():
        remedy = f"Give the folder, {folder.parent}, and the file as task.entry"
        yield Issue(
            "program-source-is-a-file", "task.source", "is a file, and the program's folder is wanted", source, remedy
        )
    else:
        remedy = "Check the path; leave it out only if the program is in the image"
        yield Issue("program-source-not-found", "task.source", "is not there", source, remedy)


def local_program_issues(job: JobSpec) -> Iterator[Issue]:
    """The same for a program that is run from its folder: an entry that is not in it, too."""
    yield from source_issues(job)
    task = job.task
    if not isinstance(task, ScriptTask) or is_reference(task.source):
        return
    folder = local_folder(task.source)
    folder = folder if folder is not None and folder.is_dir() else None
    try:
        tree = None if folder is None else ProgramTree(folder)
    except (OSError, ValueError) as error:
        problem = f"{IGNORE_FILE} cannot be read: {error}"
        yield Issue(
            "program-ignore-file-unreadable",
            "task.source",
            problem,
            str(folder),
            "Write it as UTF-8 text, in the syntax of .gitignore",
        )
        return
    if tree is not None:
        yield from _import_warnings(tree, task.entry)
    if tree is not None and tree.holds(REQUIREMENTS):
        yield from requirement_issues(tree.root / REQUIREMENTS, None)
    if task.entry.startswith(_MODULE):
        yield from _module_issues(task.entry, tree)
    elif tree is not None and not tree.holds(task.entry):
        is_there = (tree.root / task.entry).is_file()
        yield _left_out(task.entry) if is_there else _not_there(task.entry, f"Check the name in {tree.root}")


def _import_warnings(tree: ProgramTree, entry: str) -> Iterator[Issue]:
    """Files that do not parse, and modules of SageMaker's library that this environment lacks."""
    from sm_llm.launcher.planning.removed_modules import import_warnings

    try:
        files = {file.relative_to(tree.root).as_posix(): file for file in tree.files()}
    except (OSError, ValueError):
        return  # copying them is what reports it
    yield from import_warnings(files, None, entry, is_here=True)


def _not_there(entry: str, remedy: str) -> Issue:
    return Issue("program-entry-not-found", "task.entry", "is not in the source folder", entry, remedy)


def _left_out(entry: str) -> Issue:
    problem = f"is in the source folder, but {IGNORE_FILE} (or its name) leaves it out of the program"
    return Issue(
        "program-entry-ignored",
        "task.entry",
        problem,
        entry,
        f"Change the pattern in {IGNORE_FILE}, or name another entry",
    )


def _module_issues(entry: str, tree: ProgramTree | None) -> Iterator[Issue]:
    """A module that is neither in the program's folder nor installed in this environment, in which it would run."""
    names = entry.removeprefix(_MODULE).strip().split(".")
    # python -m searches the program's folder first, so a name in it hides an installed package.
    own = tree is not None and ((tree.root / names[0]).is_dir() or (tree.root / f"{names[0]}.py").is_file())
    if own and tree is not None:
        path = "/".join(names)
        wanted = (f"{path}.py", f"{path}/__main__.py")
        found = any(map(tree.holds, wanted))
        if not found and any((tree.root / it).is_file() for it in wanted):
            yield _left_out(entry)
            return
    else:
        found = is_installed(names[0])
    if not found:
        where = f"in {tree.root} or " if tree is not None else ""
        yield Issue(
            "program-module-not-installed",
            "task.entry",
            f"is not {where}installed in this environment",
            entry,
            "Check the module's name",
        )


def program_issues(job: JobSpec, tree: SourceTree | None, image: Image | None) -> list[Issue]:
    """Issues of a script job's source; none for other tasks."""
    task = job.task
    if not isinstance(task, ScriptTask) or tree is None:
        return []
    issues = list(tree.issues)
    issues += _entry_issues(task.entry, tree)
    if (file := tree.files.get(REQUIREMENTS)) is not None:
        issues += requirement_issues(file, image, tree.files)
    if (setup := tree.files.get("setup.py")) is not None and setup.stat().st_size == 0:
        remedy = "Write setup() into it, or remove it: the program runs without"
        issues.append(
            Issue(
                "program-setup-empty",
                "task.source",
                "setup.py is empty, so nothing can be installed from it",
                str(setup),
                remedy,
            )
        )
    return issues


def module_warnings(entry: str, tree: SourceTree) -> Iterator[Issue]:
    """A module to start that is not part of the program, and that no requirement brings."""
    package = entry.removeprefix(_MODULE).strip().partition(".")[0]
    # Python's own modules, and those that the image owns, are there without a requirement.
    if not entry.startswith(_MODULE) or package in sys.stdlib_module_names or is_owned(package, None):
        return
    here = any(name == f"{package}.py" or name.startswith(f"{package}/") for name in tree.files)
    if not here and REQUIREMENTS not in tree.files:
        message = f"{package} is not in task.source, and no {REQUIREMENTS} brings it: the image must hold it"
        yield warning("program-module-of-the-image", "task.entry", message)


def _entry_issues(entry: str, tree: SourceTree) -> Iterator[Issue]:
    """An entry that the folder does not hold. A module whose package is not there may be in the image."""
    wanted = [entry]
    if entry.startswith(_MODULE):
        path = entry.removeprefix(_MODULE).replace(".", "/")
        wanted = [f"{path}.py", f"{path}/__main__.py"]
    if any(out == name or (out.endswith("/") and name.startswith(out)) for out in tree.left_out for name in wanted):
        yield _left_out(entry)
        return
    if entry.startswith(_MODULE):
        package = path.partition("/")[0]
        if not any(name == f"{package}.py" or name.startswith(f"{package}/") for name in tree.files):
            return
    # A folder that could not be read has been reported already.
    if any(name in tree.files for name in wanted) or (tree.issues and not tree.files):
        return
    scripts = [name for name in tree.files if name.endswith((".py", ".sh"))]
    remedy = f"There are: {', '.join(scripts[:8]) or 'no scripts'}"
    yield _not_there(entry, remedy)
