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
from typing import TYPE_CHECKING

import pytest

from tests.syntax import PACKAGE, ROOT, has_code, imported, imports, modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

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
COMMENTS_PER_100_LINES = (3.7, 4.0)
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
    folders = Counter(name.rpartition(".")[0] for name in modules())
    edges = imports(modules())
    circles, between = cycles(edges), between_parts(edges)
    environ = {**os.environ, "AWS_CONFIG_FILE": os.devnull, "AWS_DEFAULT_REGION": "us-east-1"}
    entered = subprocess.check_output([sys.executable, "-c", DRY_RUN], cwd=ROOT, env=environ, text=True, timeout=300)
    return {
        "folders of more than 15 modules": sum(it > 15 for it in folders.values()),
        "modules in the largest folder": max(folders.values()),
        "import cycles": len(circles),
        "modules in import cycles": sum(map(len, circles)),
        "import cycles of parts of a package": len(between),
        "own modules entered by a dry run": int(entered.split()[-1]),
        "isinstance on types of strategies, backends and stores": sum(map(chosen_types, modules().values())),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_a_count_does_not_rise(name: str) -> None:
    limit, target = LIMITS[name]
    assert counts()[name] <= limit, f"{name}: {counts()[name]}, at most {limit}; the target is {target}"
    assert target <= limit


def test_only_their_own_packages_name_a_type_of_store_or_home() -> None:
    named = {
        name: found
        for name, tree in modules().items()
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
LATE_AS_A_WHOLE = {"sm_llm.worker.strategies.fsdp.float8_layers": {"torchao"}}
"""Modules that define classes of such a package, which no module imports at its top."""
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
    early = {name: loaded_at_once(tree) for name, tree in modules().items()}
    forbidden = {name: LOADED_LATE if name.startswith("sm_llm.worker.") else LOADED_LATE | OF_WORKERS for name in early}
    for name, packages in LATE_AS_A_WHOLE.items():
        forbidden[name] -= packages
    assert {name: found & forbidden[name] for name, found in early.items() if found & forbidden[name]} == {}
    imported = {it.module for tree in modules().values() for it in tree.body if isinstance(it, ast.ImportFrom)}
    assert not imported & LATE_AS_A_WHOLE.keys()


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


def test_a_package_is_imported_in_its_folders_alone() -> None:
    elsewhere = {
        (name, package)
        for name, tree in modules().items()
        for package in {it.partition(".")[0] for it in imported(tree)} & ALLOWED_IN.keys()
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
    here = [it.removesuffix(".__init__") for it in modules() if not it.startswith("sm_llm.worker.")]
    names = [it for it in here if not it.endswith("__main__")]
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
    assert subprocess.check_output(argv, cwd=tmp_path, env=environ, text=True, timeout=300) == ""
    noisy = [*argv[:2], PURE + "open('x', 'w')"]
    assert subprocess.check_output(noisy, cwd=tmp_path, env=environ, text=True, timeout=300) == "open x\n"


def fake(**sources: str) -> Iterator[tuple[str, ast.Module]]:
    yield from ((name, ast.parse(source)) for name, source in sources.items())


def cycles_of(**sources: str) -> list[set[str]]:
    """The cycles of modules that are given by name, with ``__`` in place of a dot."""
    return cycles(imports(dict(fake(**{name.replace("__", "."): source for name, source in sources.items()}))))


def test_cycles_are_found_however_a_module_is_imported() -> None:
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a"
    assert cycles_of(a="import b", b="def f():\n    from c import x", c=late, d="import a") == [{"a", "b", "c"}]
    for back in (
        "from . import one",
        "from .one import x",
        "from ..p.one import x",
        "from .. import p\nfrom ..p import one",
        "from importlib import import_module\nimport_module('q.p.one')",
        "__import__('q.p.one')",
    ):
        assert cycles_of(q__p__one="import q.p.two", q__p__two=back) == [{"q.p.one", "q.p.two"}], back


def test_cycles_through_a_package_are_found() -> None:
    """A name that is taken from the package is taken from whatever its ``__init__`` imports."""
    facade = {"q.__init__": "from q.one import f"}
    for back in ("from q import f", "import q\nq.f()", "from . import f"):
        sources = {**facade, "q.one": "import q.two", "q.two": back}
        assert cycles(imports(dict(fake(**sources)))) == [{"q.__init__", "q.one", "q.two"}], back
    # Whoever imports a module of another package runs that package's ``__init__``.
    sources = {"q.p.__init__": "import q.one", "q.p.two": "", "q.one": "import q.p.two"}
    assert cycles(imports(dict(fake(**sources)))) == [{"q.p.__init__", "q.one"}]


WITH_CODE = {
    "sm_llm": "the public names, loaded late",
    "sm_llm.cli": "registers the verbs in the order of the help",
    "sm_llm.convert": "is the package and the function of the verb at once",
}
"""Packages whose ``__init__`` is more than a docstring, each with the reason. It counts as a module of its folder."""


def test_packages_hold_their_code_in_modules() -> None:
    assert {it.removesuffix(".__init__") for it in modules() if it.endswith(".__init__")} == set(WITH_CODE)
    assert [has_code(ast.parse(it)) for it in ('"""Doc."""', "", '"""Doc."""\nx = 1', "import a")] == [0, 0, 1, 1]


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


OF_DEVICES = {
    "sm_llm.worker.device": "the interface",
    "sm_llm.worker.strategies.fsdp.reduction": "the stream that FSDP2 reduces on, which only that engine has",
}
"""Modules that use the interface of one kind of device, each with the reason."""
KINDS_OF_DEVICES = {"cuda", "mps", "xpu", "accelerator"}


def device_calls(tree: ast.AST) -> set[int]:
    """Lines that use torch's module of one kind of device, by whichever spelling."""
    found = {it.lineno for it in ast.walk(tree) if isinstance(it, ast.Attribute) and is_device_module(it)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported(ast.Module([node], []))
            found |= {node.lineno for it in names if it.partition(".")[0] == "torch" and named_device(it)}
    return found


def named_device(dotted: str) -> bool:
    return len(parts := dotted.split(".")) > 1 and parts[1] in KINDS_OF_DEVICES


def is_device_module(node: ast.Attribute) -> bool:
    return node.attr in KINDS_OF_DEVICES and ast.unparse(node.value) in ("torch", "torch.backends")


def test_the_worker_asks_devices_through_their_interface() -> None:
    found = {name: lines for name, tree in modules().items() if (lines := device_calls(tree))}
    assert {name: lines for name, lines in found.items() if name not in OF_DEVICES} == {}, "make it part of Device"
    assert [name for name in OF_DEVICES if name not in found] == []


def test_every_use_of_a_kind_of_device_is_seen() -> None:
    spelt = "torch.cuda.synchronize()|x = torch.cuda|from torch import cuda|import torch.cuda as c"
    for source in (*spelt.split("|"), "from torch.cuda import Event", "torch.accelerator.x()", "torch.backends.cuda.x"):
        assert device_calls(ast.parse(source)) == {1}, source
    assert device_calls(ast.parse("tensor.is_cuda\ndevice.type == 'cuda'\nimport torch\n")) == set()


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


def test_the_design_is_one_page() -> None:
    assert len((ROOT / "docs" / "design.md").read_text().split()) <= 1000


def test_the_folders_of_the_tests_are_those_of_the_package() -> None:
    packages = {name.split(".")[1] for name in modules() if name.count(".") > 1}
    with_tests = {it.parent.name for it in (ROOT / "tests").glob("*/test_*.py")}
    assert packages - with_tests == set()
    assert with_tests - packages == {"recipes"}
    listed = (ROOT / "tests" / "README.md").read_text()
    assert [it for it in packages if f"`{it}`" not in listed] == []
