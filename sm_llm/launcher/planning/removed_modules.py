"""Files of a program that do not parse, and modules of SageMaker's model parallel library that its image lacks."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.launcher.images.images import Image

_PACKAGE = "torch.sagemaker"
_FSDP_CHECKPOINT = "torch.sagemaker.distributed.fsdp.checkpoint"
# Versions of the smp line before SMP 2.7.
_WITH_FSDP_CHECKPOINT = ("2.3.1", "2.2.0", "2.1.2", "2.0.1")
# Module -> why no image of today holds it, and what stands for it (release notes of SMP v2).
_REMOVED: dict[str, tuple[str, str]] = {
    _FSDP_CHECKPOINT: (
        "was removed with SMP 2.7",
        "Use torch.sagemaker.distributed.checkpoint.state_dict_saver and state_dict_loader",
    ),
    "smdistributed.modelparallel": ("is SMP v1, which SMP v2 replaces", "Use torch.sagemaker"),
}
# Packages that AWS documents or its own examples import with the newest image; what is below them may be there.
_HELD = (
    "torch.sagemaker", "torch.sagemaker.checkpoint", "torch.sagemaker.context_parallel",
    "torch.sagemaker.delayed_param",
    "torch.sagemaker.distributed", "torch.sagemaker.distributed.checkpoint", "torch.sagemaker.grad_norm",
    "torch.sagemaker.logger", "torch.sagemaker.moe", "torch.sagemaker.nn", "torch.sagemaker.state_handler",
    "torch.sagemaker.tensor_parallel", "torch.sagemaker.utils",
)  # fmt: skip
_LISTED = 3
_OPEN = tuple(name for name in _HELD if name not in (_PACKAGE, "torch.sagemaker.distributed"))


def import_warnings(
    files: Mapping[str, Path], image: Image | None, entry: str, *, is_here: bool = False
) -> Iterator[Issue]:
    """A warning for every module that the program's files (name -> file) import and that is not where it runs.

    ``image`` None is one of its own; ``is_here`` is a program that runs in this environment. Another warning for files
    that are not Python as this interpreter reads it, the ``entry`` first.
    """
    imported, broken = _imported(files)
    lacking = image.name if image is not None and image.stack != "smp" else ""
    if is_here and not _has_library():
        lacking = "this environment"
    yield from _syntax_warnings(broken, entry)
    for module, location in sorted(imported.items()):
        where, what = f"task.source/{location}", f"imports {module}, which"
        removed = next((it for it in _REMOVED if _is_below(module, it)), None)
        if removed == _FSDP_CHECKPOINT and image is not None and image.version in _WITH_FSDP_CHECKPOINT:
            continue
        if removed is not None:
            why, instead = _REMOVED[removed]
            yield warning("removed-module-imported", where, f"{what} {why}", remedy=instead)
        elif _is_below(module, _PACKAGE) and lacking:
            remedy = "Set task.parallelism.strategy=smp, on the backend sagemaker, for its image"
            yield warning("smp-imported-without-its-image", where, f"{what} {lacking} does not hold", remedy=remedy)
        elif _is_below(module, _PACKAGE) and module not in _HELD and not any(_is_below(module, it) for it in _OPEN):
            message = f"{what} is not known to be in the library"
            yield warning("smp-module-unknown", where, message, remedy="Check its name")


def _has_library() -> bool:
    """Whether this environment has SMP v2, which is a part of its torch; torch itself is not loaded."""
    found = find_spec("torch")
    folders = found.submodule_search_locations or () if found is not None else ()
    return any(Path(folder, "sagemaker").is_dir() for folder in folders)


def _is_below(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _imported(files: Mapping[str, Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Module -> the first file that imports it, of the packages that matter here; file -> why it does not parse."""
    found: dict[str, str] = {}
    broken: dict[str, str] = {}
    for name, path in files.items():
        if not name.endswith(".py"):
            continue
        try:
            # As bytes, so that the parser heeds the file's own encoding declaration.
            parsed = ast.parse(path.read_bytes())
        except SyntaxError as error:
            broken[name] = f"line {error.lineno}: {error.msg}"
        except (OSError, ValueError, RecursionError) as error:
            broken[name] = str(error)
        else:
            for module in _modules(parsed):
                if module.startswith((_PACKAGE, "smdistributed")):
                    found.setdefault(module, name)
    return found, broken


def _syntax_warnings(broken: Mapping[str, str], entry: str) -> Iterator[Issue]:
    """The image's Python may be newer than this one, so such a file is not refused."""
    own = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if entry in broken:
        message = f"{entry} does not start under {own}, {broken[entry]}"
        yield warning("program-entry-not-parsed", "task.entry", message)
    others = [f"{name} {text}" for name, text in broken.items() if name != entry]
    if others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        message = f"not to be imported under {own}: {'; '.join(others[:_LISTED])}{more}"
        yield warning("program-files-not-parsed", "task.source", message)


def _modules(parsed: ast.AST) -> Iterator[str]:
    """Modules that a file names in its imports."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        # Relative imports are the program's own modules.
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # A member may be a module or a name in one; only the names of removed modules are certain to be modules.
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [node.module] if _is_removed(node.module) else [node.module, *filter(_is_removed, members)]


def _is_removed(module: str) -> bool:
    """Whether a name that may be a module or a member of one is a removed module."""
    return any(_is_below(module, it) for it in _REMOVED)
