"""What of a user's folder goes into the code bundle: files in a fixed order, links followed, no secrets and no data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from sm_llm.contract.program_tree import IGNORE_FILE, ProgramTree
from sm_llm.errors import Issue, warning
from sm_llm.spec.environment.secret_files import secret_by_content, secret_by_name

# What lies below is made up by the kernel: the environment of this very process, for one.
_NO_DISKS = ("/proc", "/sys", "/dev")
_DISK_IN_MEMORY = "/dev/shm"
_LARGEST_FILE = 100_000_000
LARGEST_TREE = 500_000_000
WARN_TREE = 50_000_000
MOST_FILES = 20_000


@dataclass
class SourceTree:
    """Files of a folder: name in the bundle ("/" between parts) -> file on this machine."""

    files: dict[str, Path] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    """Errors and warnings."""
    left_out: list[str] = field(default_factory=list)
    """Names that were left out, folders with a closing "/"."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.files.values())


def source_tree(root: Path, where: str = "task.source") -> SourceTree:
    """Walk ``root``. Issues name ``where``; files are searched for secrets, by name and by content."""
    tree = SourceTree()
    # Packing a home folder would upload whatever else is in it.
    if root.resolve() in (Path("/"), Path.home().resolve()):
        tree.issues.append(
            Issue(
                "program-folder-invalid",
                where,
                "is not a program folder",
                str(root),
                "Give the folder that holds the program",
            )
        )
        return tree
    try:
        _walk(root, "", root.resolve(), (), ProgramTree(root), tree, where)
    except (OSError, ValueError) as error:
        unread = str(getattr(error, "filename", None) or root / IGNORE_FILE)
        remedy = f"Fix it, or list it in {IGNORE_FILE}"
        return SourceTree(
            issues=[*tree.issues, Issue("program-folder-unreadable", where, f"cannot be read: {error}", unread, remedy)]
        )
    tree.files = dict(sorted(tree.files.items()))
    if len(tree.files) > MOST_FILES:
        remedy = f"List in {IGNORE_FILE} what the program does not need"
        tree.issues.append(
            Issue(
                "program-files-too-many",
                where,
                f"{len(tree.files):,} files are too many for a bundle",
                str(root),
                remedy,
            )
        )
    total = tree.bytes
    remedy = f"List in {IGNORE_FILE} what the program does not need; data and weights are read from S3"
    if total > LARGEST_TREE:
        tree.issues.append(
            Issue(
                "program-too-large", where, f"{total / 1e6:,.0f} MB are too much for a code bundle", str(root), remedy
            )
        )
    elif total > WARN_TREE:
        message = f"the code bundle holds {total / 1e6:,.0f} MB of {root}"
        tree.issues.append(warning("program-large", where, message, remedy=remedy))
    return tree


def _walk(
    folder: Path, prefix: str, root: Path, above: tuple[Path, ...], rules: ProgramTree, tree: SourceTree, where: str,
) -> None:  # fmt: skip
    here = folder.resolve()
    # Links are followed, so a link to a folder above would make the walk endless.
    if here in above:
        problem = f"the link {prefix.rstrip('/')} leads back to a folder that holds it"
        tree.issues.append(
            Issue("program-link-cycle", where, problem, str(folder), f"Remove it, or list it in {IGNORE_FILE}")
        )
        return
    for entry in sorted(os.scandir(folder), key=lambda it: it.name):
        name = f"{prefix}{entry.name}"
        is_folder = entry.is_dir()
        # Before anything is checked: what the ignore file lists needs no repair.
        if rules.leaves_out(name):
            tree.left_out.append(f"{name}/" if is_folder else name)
            continue
        path = Path(entry.path)
        if entry.is_symlink() and not _note_link(path, name, root, tree, where):
            continue
        if is_folder:
            _walk(path, f"{name}/", root, (*above, here), rules, tree, where)
        elif entry.is_file():
            _add(path, name, root, tree, where)


def _note_link(path: Path, name: str, root: Path, tree: SourceTree, where: str) -> bool:
    """Whether what a link leads to may be packed, as far as that follows from where it leads."""
    target = path.resolve()
    if any(map(target.is_relative_to, _NO_DISKS)) and not target.is_relative_to(_DISK_IN_MEMORY):
        remedy = f"Remove it, or list it in {IGNORE_FILE}"
        problem = f"the link {name} leads to {target}, which is not a file on a disk"
        tree.issues.append(Issue("program-link-unusable", where, problem, os.readlink(path), remedy))
        return False
    if not target.exists():
        remedy = f"Fix or remove it, or list it in {IGNORE_FILE}"
        tree.issues.append(
            Issue("program-link-broken", where, f"the link {name} leads nowhere", os.readlink(path), remedy)
        )
    elif not target.is_relative_to(root):
        message = f"{name} is a link out of the folder; what it leads to is packed ({target})"
        tree.issues.append(warning("program-link-leaves-folder", where, message))
    return True


def _add(path: Path, name: str, root: Path, tree: SourceTree, where: str) -> None:
    if not os.access(path, os.R_OK):
        tree.issues.append(
            Issue(
                "program-file-unreadable",
                where,
                f"{name} cannot be read",
                str(path),
                f"Fix it, or list it in {IGNORE_FILE}",
            )
        )
    elif not secret_by_name(name) and (size := path.stat().st_size) > _LARGEST_FILE:  # not worth reading
        remedy = f"List it in {IGNORE_FILE} and read it from S3"
        tree.issues.append(
            Issue(
                "program-file-too-large", where, f"{name} is not code: it has {size / 1e6:,.0f} MB", str(path), remedy
            )
        )
    elif reason := secret_by_name(name) or _secret_target(path, root) or secret_by_content(path):
        # Characters that are patterns in the ignore file's syntax.
        line = name.replace("*", r"\*").replace("?", r"\?").replace("[", r"\[")
        way_out = "the worker gets secrets by reference (secrets.NAME=…)"
        remedy = f"Add the line /{line} to {IGNORE_FILE} to leave it out; {way_out}"
        tree.issues.append(Issue("program-file-secret", where, f"{name} {reason}", str(path), remedy))
    else:
        tree.files[name] = path


def _secret_target(path: Path, root: Path) -> str:
    """A link is judged by what it leads to, whatever it is called."""
    target = path.resolve()
    if target.is_relative_to(root):
        return ""  # judged under its own name
    reason = secret_by_name("/".join(target.parts[-3:]))
    return f"leads to {target}, which {reason}" if reason else ""
