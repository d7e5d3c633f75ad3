"""Faults of a user's program before it is packed: its entry, what it would install, and what may not leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import REQUIREMENTS
from sm_llm.contract.program_tree import IGNORE_FILE, ProgramTree
from sm_llm.errors import Fault
from sm_llm.launcher.planning.local_places import is_reference, local_folder
from sm_llm.launcher.requirement_file import requirement_faults
from sm_llm.optional import is_installed
from sm_llm.spec.tasks import ScriptTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.images.images import Image
    from sm_llm.launcher.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec

_MODULE = "-m "


def source_faults(job: JobSpec) -> Iterator[Fault]:
    """A program's folder on this machine that is not there, or is none; none for other tasks."""
    source = job.task.source if isinstance(job.task, ScriptTask) else None
    folder = None if is_reference(source) else local_folder(source)
    if folder is None or folder.is_dir() or str(folder).startswith("/opt/ml/"):
        return
    if folder.exists():
        remedy = f"Give the folder, {folder.parent}, and the file as task.entry"
        yield Fault("task.source", "is a file, and the program's folder is wanted", source, remedy)
    else:
        remedy = "Check the path; leave it out only if the program is in the image"
        yield Fault("task.source", "is not there", source, remedy)


def local_program_faults(job: JobSpec) -> Iterator[Fault]:
    """The same for a program that is run from its folder: an entry that is not in it, too."""
    yield from source_faults(job)
    task = job.task
    if not isinstance(task, ScriptTask) or is_reference(task.source):
        return
    folder = local_folder(task.source)
    folder = folder if folder is not None and folder.is_dir() else None
    try:
        tree = None if folder is None else ProgramTree(folder)
    except (OSError, ValueError) as error:
        problem = f"{IGNORE_FILE} cannot be read: {error}"
        yield Fault("task.source", problem, str(folder), "Write it as UTF-8 text, in the syntax of .gitignore")
        return
    if tree is not None and tree.holds(REQUIREMENTS):
        yield from requirement_faults(tree.root / REQUIREMENTS, None)
    if task.entry.startswith(_MODULE):
        yield from _module_faults(task.entry, tree)
    elif tree is not None and not tree.holds(task.entry):
        is_there = (tree.root / task.entry).is_file()
        yield _left_out(task.entry) if is_there else _not_there(task.entry, f"Check the name in {tree.root}")


def _not_there(entry: str, remedy: str) -> Fault:
    return Fault("task.entry", "is not in the source folder", entry, remedy)


def _left_out(entry: str) -> Fault:
    problem = f"is in the source folder, but {IGNORE_FILE} (or its name) leaves it out of the program"
    return Fault("task.entry", problem, entry, f"Change the pattern in {IGNORE_FILE}, or name another entry")


def _module_faults(entry: str, tree: ProgramTree | None) -> Iterator[Fault]:
    """A module that is neither in the program's folder nor installed in this environment, in which it would run."""
    names = entry.removeprefix(_MODULE).strip().split(".")
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
        yield Fault("task.entry", f"is not {where}installed in this environment", entry, "Check the module's name")


def program_faults(job: JobSpec, tree: SourceTree | None, image: Image | None) -> list[Fault]:
    """Faults of a script job's source; none for other tasks."""
    task = job.task
    if not isinstance(task, ScriptTask) or tree is None:
        return []
    faults = list(tree.faults)
    faults += _entry_faults(task.entry, tree)
    if (file := tree.files.get(REQUIREMENTS)) is not None:
        faults += requirement_faults(file, image, tree.files)
    if (setup := tree.files.get("setup.py")) is not None and setup.stat().st_size == 0:
        remedy = "Write setup() into it, or remove it: the program runs without"
        faults.append(
            Fault("task.source", "setup.py is empty, so nothing can be installed from it", str(setup), remedy)
        )
    return faults


def _entry_faults(entry: str, tree: SourceTree) -> Iterator[Fault]:
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
    if any(name in tree.files for name in wanted) or (tree.faults and not tree.files):
        return
    scripts = [name for name in tree.files if name.endswith((".py", ".sh"))]
    remedy = f"There are: {', '.join(scripts[:8]) or 'no scripts'}"
    yield _not_there(entry, remedy)
