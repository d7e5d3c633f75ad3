"""Counts of the package's structure. Each has a limit that may only fall, and the target that it falls to."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sm_llm.spec.backends.table import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sm_llm"
LIMITS = {
    "folders of more than 15 modules": (0, 0),
    "modules in the largest folder": (15, 15),
    "import cycles": (0, 0),
    "modules in import cycles": (0, 0),
    "own modules entered by a dry run": (100, 100),
    "isinstance on types of strategies, backends and stores": (0, 0),
}
"""Count -> its limit, and its target. Lower the limit in the change that makes the count fall."""
COMMENTS_PER_100_LINES = (2.8, 4.0)
"""The share of comments: a limit that may only rise, and its target."""
CHOSEN = {
    "FsdpSpec",
    "SmpSpec",
    "NxdSpec",
    "LocalBackend",
    "SageMakerBackend",
    "LocalOptions",
    "SageMakerOptions",
    "SlurmBackend",
    "SlurmOptions",
    "KubeflowBackend",
    "KubeflowOptions",
    "S3Store",
    "FolderStore",
    "S3RunStore",
    "FolderRunStore",
}
"""Types that stand for a strategy, a backend or a store; what depends on them belongs into their own packages."""
STORES = {"FolderStore", "S3Objects", "S3Store", "FolderRunStore", "S3RunStore"}
"""Types that nobody but ``storage`` and ``runs`` has to know."""
DRY_RUN = """
import sys, sm_llm
fields = ("backend.role=arn:aws:iam::123456789012:role/x", "storage=s3://bucket-x/x")
sm_llm.launch("llama-2-7b-fsdp", *fields, dry_run=True)
print(sum(name.partition(".")[0] == "sm_llm" for name in sys.modules))
"""


@cache
def trees() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module; a package's own ``__init__`` is not among them."""
    paths = [it for it in sorted(PACKAGE.rglob("*.py")) if it.name != "__init__.py"]
    return {".".join(it.relative_to(ROOT).with_suffix("").parts): ast.parse(it.read_text()) for it in paths}


def imports(of: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports anywhere: at the top, in functions and under TYPE_CHECKING."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in of.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named = [it.name for it in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                named = [node.module, *(f"{node.module}.{it.name}" for it in node.names)]
            else:
                continue
            found[name] |= {it for it in named if it in of and it != name}
    return found


def cycles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in list(edges):
        waiting = [(start, iter(edges.get(start, ())))] if start not in seen else []
        seen.add(start)
        while waiting:
            node, rest = waiting[-1]
            following = next((it for it in rest if it not in seen), None)
            if following is None:
                order.append(node)
                waiting.pop()
            else:
                seen.add(following)
                waiting.append((following, iter(edges.get(following, ()))))
    back: dict[str, set[str]] = defaultdict(set)
    for node, targets in edges.items():
        for target in targets:
            back[target].add(node)
    found, placed = [], set()
    for root in reversed(order):
        group, queue = set(), [root]
        while queue:
            node = queue.pop()
            if node not in placed:
                placed.add(node)
                group.add(node)
                queue += back[node]
        found.append(group)
    return [group for group in found if len(group) > 1]


def chosen_types(tree: ast.Module) -> int:
    """How often ``isinstance`` asks for one of the types in ``CHOSEN``."""
    calls = [it for it in ast.walk(tree) if isinstance(it, ast.Call) and getattr(it.func, "id", "") == "isinstance"]
    names = [{getattr(it, "id", getattr(it, "attr", "")) for it in ast.walk(call.args[1])} for call in calls]
    return sum(bool(it & CHOSEN) for it in names)


def comments(text: str) -> int:
    """Lines with a comment for readers: not one that is addressed to a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [it.string for it in tokens if it.type == tokenize.COMMENT]
    return sum(not it.lstrip("# ").startswith(("noqa", "type: ignore", "fmt:")) for it in found)


@cache
def counts() -> dict[str, int]:
    folders = Counter(name.rpartition(".")[0] for name in trees())
    circles = cycles(imports(trees()))
    environ = {**os.environ, "AWS_CONFIG_FILE": os.devnull, "AWS_DEFAULT_REGION": "us-east-1"}
    entered = subprocess.check_output([sys.executable, "-c", DRY_RUN], cwd=ROOT, env=environ, text=True, timeout=120)
    return {
        "folders of more than 15 modules": sum(it > 15 for it in folders.values()),
        "modules in the largest folder": max(folders.values()),
        "import cycles": len(circles),
        "modules in import cycles": sum(map(len, circles)),
        "own modules entered by a dry run": int(entered.split()[-1]),
        "isinstance on types of strategies, backends and stores": sum(map(chosen_types, trees().values())),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_a_count_does_not_rise(name: str) -> None:
    limit, target = LIMITS[name]
    assert counts()[name] <= limit, f"{name}: {counts()[name]}, at most {limit}; the target is {target}"
    assert target <= limit


def test_only_their_own_packages_name_a_type_of_store_or_home() -> None:
    named = {
        name: found
        for name, tree in trees().items()
        if not name.startswith(("sm_llm.storage.", "sm_llm.runs."))
        and (found := STORES & {getattr(it, "id", getattr(it, "name", "")) for it in ast.walk(tree)})
    }
    assert not named, "ask the interface (Store, RunStore), and open it by its address"


def test_the_share_of_comments_does_not_fall() -> None:
    texts = [it.read_text() for it in PACKAGE.rglob("*.py")]
    share = 100 * sum(map(comments, texts)) / sum(len(it.splitlines()) for it in texts)
    assert share >= COMMENTS_PER_100_LINES[0], f"{share:.2f} comments in 100 lines"


LOADED_LATE = {"boto3", "sagemaker", "kubernetes", "datasets", "matplotlib", "torchao"}
"""Packages that cost a start seconds, or that may be missing: imported inside of functions alone. Modules of engines
and trackers, which are loaded late as a whole, import theirs at the top."""
OF_WORKERS = {"torch", "transformers", "triton", "safetensors"}
"""Imported at the top of a module in ``worker`` alone."""


def loaded_at_once(tree: ast.Module) -> set[str]:
    """Packages that are loaded with a module: imports at its top, not those in functions or for type checkers."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {it.name.partition(".")[0] for it in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            waiting += [it for it in ast.walk(node) if isinstance(it, ast.Import | ast.ImportFrom)]
    return found


def test_large_and_optional_packages_are_loaded_where_they_are_used() -> None:
    early = {name: loaded_at_once(tree) for name, tree in trees().items()}
    forbidden = {name: LOADED_LATE if name.startswith("sm_llm.worker.") else LOADED_LATE | OF_WORKERS for name in early}
    assert {name: found & forbidden[name] for name, found in early.items() if found & forbidden[name]} == {}


def test_imports_at_the_top_are_seen() -> None:
    source = (
        "import torch.nn\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import boto3\n"
        "try:\n    from sagemaker.x import y\nexcept ImportError:\n    pass\ndef f():\n    import mlflow\n"
    )
    assert loaded_at_once(ast.parse(source)) == {"torch", "typing", "sagemaker"}


def fake(**sources: str) -> Iterator[tuple[str, ast.Module]]:
    yield from ((name, ast.parse(source)) for name, source in sources.items())


def test_cycles_are_found_however_a_module_is_imported() -> None:
    found = cycles(
        imports(
            dict(
                fake(
                    a="import b",
                    b="def f():\n    from c import x",
                    c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a",
                    d="import a",
                )
            )
        )
    )
    assert found == [{"a", "b", "c"}]


def test_choices_by_type_and_comments_are_counted() -> None:
    assert (
        chosen_types(ast.parse("isinstance(a, SmpSpec | int) or isinstance(b, spec.LocalBackend) or f(SmpSpec)")) == 2
    )
    assert comments("# why\nx = 1  # noqa: E501\ny = '# no'  # type: ignore[x]\n") == 1


def documented_folders() -> set[str]:
    """Folders in the tree of ``docs/design.md``, as paths below the package."""
    text = (ROOT / "docs" / "design.md").read_text()
    block = text.split("```text\nsm_llm/\n", 1)[1].split("```", 1)[0]
    above: list[str] = []
    found = set()
    for line in block.splitlines():
        name = line.split(maxsplit=1)[0]
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        if name.endswith("/"):
            above = [*above[:depth], name.rstrip("/")]
            found.add("/".join(above))
    return found


def test_the_design_shows_the_tree_as_it_is() -> None:
    folders = {
        it.parent.relative_to(PACKAGE).as_posix() for it in PACKAGE.rglob("*") if it.suffix in (".py", ".yaml", ".txt")
    }
    assert documented_folders() == folders - {"."}


OF_BACKENDS = {
    "cli/pipeline.py": "the verbs of SageMaker Pipelines",
    "launcher/images/image_build.py": "copies images to ECR with the account's clients",
    "__init__.py": "the public functions for the SageMaker SDK and Pipelines",
    "spec/backends/table.py": "the rows",
    "optional.py": "the SageMaker SDK is a package that may be missing",
    "runs/run_paths.py": "local/ is a folder of a run",
    "worker/tasks/register.py": "the task registers with the service",
}
"""Modules outside a backend's own that name it, each with the reason."""


def names_of_backends(tree: ast.Module, names: Collection[str]) -> set[str]:
    """Backends that a module names: as a whole text in its logic, or by importing something of theirs."""
    texts = {it.value for it in ast.walk(tree) if isinstance(it, ast.Constant) and isinstance(it.value, str)}
    modules = {it.module or "" for it in ast.walk(tree) if isinstance(it, ast.ImportFrom)}
    modules |= {name.name for it in ast.walk(tree) if isinstance(it, ast.Import) for name in it.names}
    return {
        name
        for name in names
        if name in texts or any(re.search(rf"\.backends\.{name}(\.|$)", module) for module in modules)
    }


def test_no_module_names_a_backend_that_is_not_its_own() -> None:
    assert names_of_backends(ast.parse("x == 'slurm'\nimport a.backends.local.b"), ["slurm", "local"]) == {
        "slurm",
        "local",
    }
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        own = re.search(r"backends/(\w+)(/|\.py)", name)
        if own is None and name not in OF_BACKENDS:
            found[name] = names_of_backends(ast.parse(path.read_text()), BACKENDS)
    assert not {name: it for name, it in found.items() if it}, "ask the options class or the backend instead"
