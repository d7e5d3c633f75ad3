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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sm_llm"
LIMITS = {
    "folders of more than 15 modules": (0, 0),
    "modules in the largest folder": (15, 15),
    "import cycles": (0, 0),
    "modules in import cycles": (0, 0),
    "import cycles of parts of a package": (0, 0),
    "own modules entered by a dry run": (100, 100),
    "isinstance on types of strategies, backends and stores": (0, 0),
}
"""Count -> its limit, and its target. Lower the limit in the change that makes the count fall."""
COMMENTS_PER_100_LINES = (3.6, 4.0)
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

PURE = """
import os, sys
sys.dont_write_bytecode = True
import sm_llm
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EFFECTS = ("os.mkdir", "os.rename", "os.remove", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect")
def heed(event, arguments):
    if event in EFFECTS or (event == "open" and arguments[2] & WRITES):
        print(event, arguments[0])
sys.addaudithook(heed)
fields = ("backend.role=arn:aws:iam::123456789012:role/x", "storage=s3://bucket-x/x")
sm_llm.plan("llama-2-7b-fsdp", *fields)
sm_llm.launch("llama-2-7b-fsdp", *fields, dry_run=True)
sm_llm.launch("smoke", dry_run=True)
"""
"""Prints what of a plan or a dry run writes, starts or contacts anything; Python itself reports it."""


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
    found, assigned = [], set()
    for root in reversed(order):
        group, queue = set(), [root]
        while queue:
            node = queue.pop()
            if node not in assigned:
                assigned.add(node)
                group.add(node)
                queue += back[node]
        found.append(group)
    return [group for group in found if len(group) > 1]


def between_parts(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Cycles among the parts of one package, its modules and the packages in it: whole folders that import each other,
    though no two of their modules do.
    """
    parts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer, targets in edges.items():
        for target in targets:
            pairs = enumerate(zip(importer.split("."), target.split("."), strict=False))
            depth, (own, other) = next((depth, pair) for depth, pair in pairs if pair[0] != pair[1])
            parts[".".join(importer.split(".")[:depth])][own].add(other)
    return [{f"{package}.{it}" for it in group} for package, inner in parts.items() for group in cycles(inner)]


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
    between = between_parts(imports(trees()))
    environ = {**os.environ, "AWS_CONFIG_FILE": os.devnull, "AWS_DEFAULT_REGION": "us-east-1"}
    entered = subprocess.check_output([sys.executable, "-c", DRY_RUN], cwd=ROOT, env=environ, text=True, timeout=120)
    return {
        "folders of more than 15 modules": sum(it > 15 for it in folders.values()),
        "modules in the largest folder": max(folders.values()),
        "import cycles": len(circles),
        "modules in import cycles": sum(map(len, circles)),
        "import cycles of parts of a package": len(between),
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
LARGE = LOADED_LATE | OF_WORKERS | {"botocore", "s3transfer", "awscrt", "huggingface_hub", "tokenizers"}
"""What no module loads when it is imported, but for the worker's that run in images with torch."""


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


ALLOWED_IN = {
    "torch": ("worker/",),
    "transformers": ("worker/",),
    "torchao": ("worker/",),
    "datasets": ("data/",),
    "tokenizers": ("data/", "worker/"),
    "sagemaker": ("launcher/backends/sagemaker/sdk/",),
    "kubernetes": ("launcher/backends/kubeflow/",),
    "matplotlib": ("launcher/display/",),
    "s3transfer": ("storage/engines/",),
    "awscrt": ("storage/",),
    "huggingface_hub": ("storage/hub/", "models/"),
    "typer": ("cli/",),
}
"""Package -> the only folders whose modules import it, in functions, too. ``docs/design.md`` states it."""


def imported(tree: ast.Module) -> set[str]:
    """Packages that a module imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {it.name.partition(".")[0] for it in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_a_package_is_imported_in_its_folders_alone() -> None:
    elsewhere = {
        (name, package)
        for name, tree in trees().items()
        for package in imported(tree) & ALLOWED_IN.keys()
        if not (name.replace(".", "/") + "/").startswith(tuple(f"sm_llm/{it}" for it in ALLOWED_IN[package]))
    }
    assert elsewhere == set()


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted({it.partition(".")[0] for it in sys.modules}))
"""
WITHOUT_TORCH = ("main", "tasks.convert", "tasks.fetch", "tasks.prepare", "tasks.register", "tasks.script")
"""Modules of the worker that images without torch run."""


def test_modules_load_no_large_package_when_they_are_imported() -> None:
    """In a fresh process, whatever way a module imports: all modules but the worker's, then its parts without torch."""
    names = [it for it in trees() if not it.startswith("sm_llm.worker.") and not it.endswith("__main__")]
    argv = [sys.executable, "-c", IMPORT_ALL, *names, *(f"sm_llm.worker.{it}" for it in WITHOUT_TORCH)]
    printed = subprocess.check_output(argv, cwd=ROOT, text=True, timeout=240)
    loaded = {name: set(rest) & LARGE for name, *rest in map(str.split, printed.splitlines())}
    assert len(loaded) > 250
    assert next(((name, found) for name, found in loaded.items() if found), None) is None


def test_imports_at_the_top_are_seen() -> None:
    source = (
        "import torch.nn\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import boto3\n"
        "try:\n    from sagemaker.x import y\nexcept ImportError:\n    pass\ndef f():\n    import mlflow\n"
    )
    assert loaded_at_once(ast.parse(source)) == {"torch", "typing", "sagemaker"}


def test_plans_and_dry_runs_write_start_and_contact_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "AWS_CONFIG_FILE": os.devnull, "AWS_DEFAULT_REGION": "us-east-1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    argv = [sys.executable, "-c", PURE]
    assert subprocess.check_output(argv, cwd=tmp_path, env=environ, text=True, timeout=120) == ""
    noisy = [*argv[:2], PURE + "open('x', 'w')"]
    assert subprocess.check_output(noisy, cwd=tmp_path, env=environ, text=True, timeout=120) == "open x\n"


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


def test_folders_that_import_each_other_are_found() -> None:
    sources = {
        "p.a.one": "import p.b.two",
        "p.b.two": "x = 1",
        "p.b.three": "import p.a.four",
        "p.a.four": "import p.base",
    }
    found = imports({name: ast.parse(source) for name, source in {**sources, "p.base": ""}.items()})
    assert cycles(found) == []
    assert between_parts(found) == [{"p.a", "p.b"}]


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


def named_paths(text: str) -> list[str]:
    """Modules and folders that a page names, with a slash: ``spec/loading/load``, ``worker/tasks/``."""
    return [it for it in re.findall(r"`([\w./]+)`", text) if "/" in it and not it.startswith(("/", "."))]


def is_there(path: str) -> bool:
    """Whether a named place is a module or folder of the package, or a file or folder of the project."""
    return any(it.exists() for it in (PACKAGE / f"{path}.py", PACKAGE / path, ROOT / path, ROOT / "docs" / path))


def test_the_design_names_what_is_there() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    assert not is_there("launcher/nowhere")
    assert [it for it in named_paths(text) if not is_there(it)] == []
    walks = text.split("## 3.", 1)[1].split("## 4.", 1)[0]
    steps = re.split(r"^\d\. ", walks, flags=re.MULTILINE)[1:]
    assert len(steps) > 10
    assert [it for it in steps if not any((PACKAGE / f"{path}.py").is_file() for path in named_paths(it))] == []


def test_the_folders_of_the_tests_are_those_of_the_package() -> None:
    packages = {name.split(".")[1] for name in trees() if name.count(".") > 1}
    with_tests = {it.parent.name for it in (ROOT / "tests").glob("*/test_*.py")}
    assert packages - with_tests == set()
    assert with_tests - packages == {"recipes"}
    listed = (ROOT / "tests" / "README.md").read_text()
    assert [it for it in packages if f"`{it}`" not in listed] == []
