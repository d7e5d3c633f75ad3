"""A program's requirements.txt as pip reads it, before it is packed: lines that pip could not install in the job."""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import TYPE_CHECKING, Any

from sm_llm.contract.image_packages import REQUIREMENTS, is_owned, normalised
from sm_llm.contract.program_tree import ProgramTree
from sm_llm.errors import Issue
from sm_llm.redaction import is_token_shaped, redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from packaging.requirements import Requirement

    from sm_llm.launcher.images.images import Image

_COMMENT = re.compile(r"(?:^|\s+)#.*$")
# Options behind a requirement, such as --hash.
_TRAILING_OPTIONS = re.compile(r"\s--")
_EGG = re.compile(r"#egg=([A-Za-z0-9][A-Za-z0-9._-]*)")
# A wheel or source archive, in a folder or behind an address: ``…/torch-2.5.0-cp311-….whl``.
_ARCHIVE = re.compile(
    r"^(?:[^@]*/)?([A-Za-z0-9][A-Za-z0-9._]*(?:-[A-Za-z][A-Za-z0-9._]*)*)-\d[^/]*\.(?:whl|tar\.gz|zip)$"
)
# What pip fills in from the environment, so that a secret need not be written down.
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_FILE_URL = re.compile(r"(?:[A-Za-z0-9][\w.-]*(?:\[[^\]]*\])?\s*@\s*)?file:/+(?:localhost/)?([^#;]+?)(?:\s*;.*|#.*)?$")
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_SHORT = {"-r": "--requirement", "-c": "--constraint", "-e": "--editable", "-i": "--index-url", "-f": "--find-links"}
_OTHER = (
    "--index-url", "--extra-index-url", "--find-links", "--trusted-host", "--no-binary", "--only-binary",
    "--use-feature", "--no-index", "--pre", "--prefer-binary", "--require-hashes",
)  # fmt: skip
_FILES = ("--requirement", "--constraint")
_EDITABLE = "--editable"
# One of them makes a folder something that pip can install.
_PROJECTS = ("pyproject.toml", "setup.py")


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of every line that asks for something: continued lines joined, comments left out.

    A line that ends with a backslash continues in the next one, unless it is a comment (pip's "Requirements File
    Format").
    """
    first = 0
    parts: list[str] = []
    # The empty line closes a last line that ends with a backslash.
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_comment = line.lstrip().startswith("#")
        first = first if parts else number
        parts.append(f" {line}" if is_comment else line)
        if line.endswith("\\") and not is_comment:
            parts[-1] = line.rstrip("\\")
            continue
        whole, parts = _COMMENT.sub("", "".join(parts)).strip(), []
        if whole:
            yield first, whole


def requirement_issues(
    file: Path, image: Image | None, files: Mapping[str, Path] | None = None, name: str = REQUIREMENTS
) -> Iterator[Issue]:
    """Requirements that pip could not read or find in the job, and such as would replace what the image owns.

    ``files`` are those that go with the program, by name; without them those that the program's tree in the folder of
    ``file`` holds. ``name`` is the file's own among them. Files that it names are read as well.
    """
    yield from _Program(image, file.parent, files).issues(name, file, ())


class _Program:
    """The files of a program, for the requirements in them."""

    def __init__(self, image: Image | None, folder: Path, files: Mapping[str, Path] | None) -> None:
        self._image = image
        self._tree = ProgramTree(folder)
        self._files = files
        # Package -> the lines that ask for it, on every platform.
        self._wanted: dict[str, list[tuple[int, Requirement]]] = {}

    def _file(self, name: str) -> Path | None:
        if name.startswith(".."):
            return None
        if self._files is not None:
            return self._files.get(name)
        return self._tree.root / name if self._tree.holds(name) else None

    def _has_folder(self, name: str) -> bool:
        if name == "." or name.startswith(".."):
            return name == "."
        if self._files is not None:
            return any(it.startswith(f"{name}/") for it in self._files)
        return (self._tree.root / name).is_dir() and not self._tree.leaves_out(name)

    def issues(self, name: str, file: Path, above: tuple[str, ...]) -> Iterator[Issue]:
        path = f"task.source/{name}"
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            yield Issue(
                "requirements-unreadable", path, f"cannot be read: {error}", str(file), "Write it as UTF-8 text"
            )
            return
        for number, line in logical_lines(text):
            # ${NAME} is how a secret is to be referred to, so it is not a token itself.
            if is_token_shaped(_VARIABLE.sub("", line)):
                problem = f"line {number} holds a token or password, and programs and plans are stored and shown"
                remedy = "Set secrets.NAME to where it is kept and write ${NAME}, or set secrets.PIP_INDEX_URL"
                yield Issue("requirement-holds-secret", path, problem, redact(line), remedy)
            elif line.startswith("-"):
                yield from self._option(name, number, line, (*above, name))
            else:
                yield from self._requirement(path, number, _TRAILING_OPTIONS.split(line)[0].strip())

    def _option(self, name: str, number: int, line: str, above: tuple[str, ...]) -> Iterator[Issue]:
        path, (option, value) = f"task.source/{name}", _split(line)
        if option in _FILES:
            yield from self._named(name, number, option, value, above)
        elif option == _EDITABLE:
            check = self._requirement if "://" in value else self._location_issues
            yield from check(path, number, value)
        elif option not in _OTHER:
            problem = f"line {number} has an option that pip does not take in such a file"
            yield Issue(
                "requirement-option-unknown",
                path,
                problem,
                line,
                f"Leave it out; known are {', '.join((*_FILES, _EDITABLE, *_OTHER))}",
            )

    def _named(self, name: str, number: int, option: str, value: str, above: tuple[str, ...]) -> Iterator[Issue]:
        """Issues of a file that is named by another; constraints are no requirements, and install nothing."""
        # An address, a variable or an absolute path is outside the program, and only pip in the job can read it.
        if "://" in value or "${" in value or value.startswith("/"):
            return
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(name), value))
        file = self._file(wanted)
        if file is None:
            problem = f"line {number} names a file that does not go with the program"
            yield Issue(
                "requirement-file-outside-program",
                f"task.source/{name}",
                problem,
                value,
                "Put it into task.source, or leave the line out",
            )
        # The files above end a cycle of files that name each other.
        elif option == "--requirement" and wanted not in above:
            yield from self.issues(wanted, file, above)

    def _requirement(self, path: str, number: int, line: str) -> Iterator[Issue]:
        package, image = _package(line), self._image
        if (location := _file_url(line)) is not None:
            yield from self._location_issues(path, number, location)
        elif _is_local(line):
            yield from self._location_issues(path, number, line)
        elif not _is_requirement(line):
            yield Issue(
                "requirement-malformed",
                path,
                f"line {number} is not a requirement",
                line,
                "Write for example einops>=0.8",
            )
            return
        if is_owned(package, image.stack if image else None) and not _is_met(line, package, image):
            held = f" ({package} {image.torch})" if image and package == "torch" else ""
            problem = f"line {number} asks for {line}, which belongs to the image{held}"
            remedy = "Leave it out, or choose another image (backend.image_version, image_uri)"
            yield Issue("requirement-of-the-image", path, problem, line, remedy)
        else:
            yield from self._conflicts(path, number, line)

    def _conflicts(self, path: str, number: int, line: str) -> Iterator[Issue]:
        """A version that another line rules out: pip installs nothing of such a file."""
        requirement = _parsed(line)
        # A marker selects by a platform that is not this one, and an address has no version: neither can be compared
        # here.
        if requirement is None or requirement.marker is not None or requirement.url is not None:
            return
        own = self._wanted.setdefault(normalised(requirement.name), [])
        for other, earlier in own:
            # Both directions, because only exact pins are compared: whether two ranges overlap is left to pip.
            if not _agree(requirement, earlier) or not _agree(earlier, requirement):
                problem = f"line {number} asks for another version of {requirement.name} than line {other}, {earlier}"
                yield Issue("requirement-given-twice", path, problem, line, "Keep one of the two")
                return
        own.append((number, requirement))

    def _location_issues(self, path: str, number: int, line: str) -> Iterator[Issue]:
        """Issues of a folder or archive, relative to the program's folder, where pip runs."""
        # A folder may be named with extras: ./lib[gpu].
        location = posixpath.normpath(re.sub(r"\[[^\]]*\]$", "", line.removeprefix("file:")))
        if "${" in location:
            return
        if location.startswith("/"):
            if self._image is not None:  # an image of one's own may hold it
                problem = f"line {number} names a file of this machine, which {self._image.name} does not hold"
                yield Issue(
                    "requirement-path-absolute",
                    path,
                    problem,
                    line,
                    "Put it into task.source, and name it relative to it",
                )
            return
        if location.endswith(_ARCHIVES):
            if self._file(location) is None:
                problem = f"line {number} names an archive that does not go with the program"
                yield Issue(
                    "requirement-archive-outside-program",
                    path,
                    problem,
                    line,
                    "Put it into task.source, or name the package",
                )
        elif not self._has_folder(location):
            problem = f"line {number} names a folder that does not go with the program"
            yield Issue(
                "requirement-folder-outside-program",
                path,
                problem,
                line,
                "Put it into task.source, or name the package",
            )
        elif not any(self._file(posixpath.normpath(f"{location}/{it}")) for it in _PROJECTS):
            problem = f"line {number} asks pip to install a folder that has no {' and no '.join(_PROJECTS)}"
            yield Issue(
                "requirement-folder-without-project",
                path,
                problem,
                line,
                "Write one, or leave the line out: the program finds its own modules",
            )


def _split(line: str) -> tuple[str, str]:
    """The long name of an option and its value: ``-r x``, ``-rx``, ``--requirement x`` or ``--requirement=x``."""
    if not line.startswith("--"):
        return _SHORT.get(line[:2], line[:2]), _unquoted(line[2:].lstrip(" ="))
    name, _, value = line.replace("=", " ", 1).partition(" ")
    return name, _unquoted(value.strip())


def _unquoted(value: str) -> str:
    try:
        return " ".join(shlex.split(value))
    except ValueError:
        return value


def _package(line: str) -> str:
    """The package that a line asks for: by its name, by a wheel or archive, or by ``#egg=``; empty for a folder."""
    if egg := _EGG.search(line):
        return normalised(egg[1])
    if archive := _ARCHIVE.search(line):
        return normalised(archive[1])
    if line.startswith(("git+", "hg+", "svn+", "bzr+")):
        return normalised(line.partition("#")[0].rpartition("/")[2].partition("@")[0].removesuffix(".git"))
    match = _NAME.match(line)
    return normalised(match[1]) if match else ""


def _is_local(line: str) -> bool:
    """Whether a line names a folder or an archive here: pip takes what has a slash, a leading dot or such an ending."""
    # An address, alone or behind a name (name @ address), is not a path.
    if "://" in line or "@" in line:
        return False
    return line.startswith((".", "/", "file:")) or line.endswith(_ARCHIVES) or ("/" in line and ";" not in line)


def _is_requirement(line: str) -> bool:
    """Whether pip could read a line: names with versions are parsed, addresses are left to it."""
    return "://" in line or "${" in line or _parsed(line) is not None


def _parsed(line: str) -> Requirement | None:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def _file_url(line: str) -> str | None:
    """The path of ``file://…``, also behind a name (``pkg @ file:///x.whl``); None for any other line."""
    match = _FILE_URL.match(line)
    return None if match is None else f"/{match[1].lstrip('/')}"


def _agree(pinned: Requirement, other: Requirement) -> bool:
    """Whether every exact version that one line asks for is one that the other takes."""
    # A prefix (==2.*) fixes no version.
    exact = [it.version for it in pinned.specifier if it.operator == "==" and not it.version.endswith("*")]
    return all(other.specifier.contains(version, prereleases=True) for version in exact)


def _is_met(line: str, name: str, image: Image | None) -> bool:
    """Whether what is asked for is what the image has already; known of torch alone."""
    requirement = _parsed(line)
    if requirement is None:
        return False
    if requirement.url is not None:
        return False  # what is behind an address is not what the image has
    if not requirement.specifier:
        return True
    return name == "torch" and image is not None and bool(requirement.specifier.contains(_full(image.torch)))


def _full(version: str) -> Any:
    return version if version.count(".") > 1 else f"{version}.0"
