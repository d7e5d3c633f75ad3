"""Faults of a user's program before it is packed: its entry, what it would install, and what may not leave."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sm_llm.contract.image_packages import REQUIREMENTS, is_owned, normalised
from sm_llm.contract.program_tree import IGNORE_FILE, ProgramTree
from sm_llm.errors import Fault
from sm_llm.launcher.local_places import is_reference, local_folder
from sm_llm.optional import is_installed
from sm_llm.spec.tasks import ScriptTask

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sm_llm.launcher.images import Image
    from sm_llm.launcher.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec

_MODULE = "-m "
_OPTIONS = re.compile(r"(?:^|\s)#|\s--|\\$")
"""What may follow a requirement in its line: a comment, options such as --hash, a sign that the line goes on."""
_EGG = re.compile(r"#egg=([A-Za-z0-9][A-Za-z0-9._-]*)")
_ARCHIVE = re.compile(
    r"^(?:[^@]*/)?([A-Za-z0-9][A-Za-z0-9._]*(?:-[A-Za-z][A-Za-z0-9._]*)*)-\d[^/]*\.(?:whl|tar\.gz|zip)$"
)
"""A wheel or source archive, in a folder or behind an address: ``…/torch-2.5.0-cp311-….whl``."""
_NESTED = re.compile(r"(?:-r|--requirement)[ =]*(\S+)")
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


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
        faults += requirement_faults(file, image)
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


def requirement_faults(file: Path, image: Image | None, above: tuple[Path, ...] = ()) -> Iterator[Fault]:
    """Requirements that are none, and such as would put another torch, or what is built on it, over the image's own.

    Files that ``file`` names are read as well; ``above`` are those that led here.
    """
    path = f"task.source/{file.name}"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        yield Fault(path, f"cannot be read: {error}", str(file), "Write it as UTF-8 text")
        return
    for number, text in enumerate(lines, 1):
        line = _OPTIONS.split(text)[0].strip()
        if (nested := _NESTED.fullmatch(line)) and (other := file.parent / nested[1]) not in (above := (*above, file)):
            yield from requirement_faults(other, image, above)
            continue
        name = _name(line)
        if not _is_requirement(line):
            remedy = "Write for example einops>=0.8"
            yield Fault(path, f"line {number} is no requirement", line, remedy)
        elif is_owned(name, image.line if image else None) and not _is_met(line, name, image):
            held = f" ({name} {image.torch})" if image and name == "torch" else ""
            problem = f"line {number} asks for {line}, which belongs to the image{held}"
            remedy = "Leave it out, or choose another image (backend.image_version, image_uri)"
            yield Fault(path, problem, line, remedy)


def _name(line: str) -> str:
    """The package that a line asks for: by its name, by a wheel or archive, or by ``#egg=``; empty for options."""
    if egg := _EGG.search(line):
        return normalised(egg[1])
    if archive := _ARCHIVE.search(line):
        return normalised(archive[1])
    if line.startswith(("git+", "hg+", "svn+", "bzr+")):
        return normalised(line.partition("#")[0].rpartition("/")[2].partition("@")[0].removesuffix(".git"))
    match = _NAME.match(line)
    return normalised(match[1]) if match else ""


def _is_requirement(line: str) -> bool:
    """Whether pip could read a line: names with versions are looked at, options and addresses are left to it."""
    from packaging.requirements import InvalidRequirement, Requirement

    if not line or line.startswith(("-", ".", "/")) or "://" in line or "${" in line or line.endswith(".whl"):
        return True
    try:
        Requirement(line)
    except InvalidRequirement:
        return False
    return True


def _is_met(line: str, name: str, image: Image | None) -> bool:
    """Whether what is asked for is what the image has already; known of torch alone."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return False
    if requirement.url is not None:
        return False  # what is behind an address is not what the image has
    if not requirement.specifier:
        return True
    return name == "torch" and image is not None and bool(requirement.specifier.contains(_full(image.torch)))


def _full(version: str) -> Any:
    return version if version.count(".") > 1 else f"{version}.0"
