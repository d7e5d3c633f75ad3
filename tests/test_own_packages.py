"""Backends and strategies are named in their own packages alone, however a module spells a name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sm_llm.spec.backends.table import BACKENDS
from sm_llm.spec.parallelism.table import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sm_llm"
PARTS = {**dict.fromkeys(BACKENDS, "backends"), **dict.fromkeys(STRATEGIES, "(?:strategies|parallelism)")}
"""Name -> the folders, or the modules, of that name that are its own lie in folders of these names."""
CLASSES = {
    **{row.options.__name__: name for name, row in BACKENDS.items()},
    **{row.backend.rpartition(":")[2]: name for name, row in BACKENDS.items()},
    **{row.options.__name__: name for name, row in STRATEGIES.items()},
    **{row.worker.rpartition(":")[2]: name for name, row in STRATEGIES.items()},
}
"""Class -> whose it is. Others must be imported before they can be asked for."""
ALLOWED = {
    "__init__.py": ({"sagemaker"}, "the public functions for the SageMaker SDK and Pipelines"),
    "cli/convert.py": ({"nxd"}, "a form of checkpoints"),
    "cli/env.py": ({"fsdp"}, "an image stack"),
    "cli/image.py": ({"sagemaker"}, "the name of a repository"),
    "cli/pipeline.py": ({"sagemaker"}, "the verbs of SageMaker Pipelines"),
    "contract/hyperparameters.py": ({"sagemaker"}, "names that the training toolkit keeps for itself"),
    "contract/image_packages.py": ({"smp"}, "an image stack"),
    "convert/": ({"nxd"}, "a form of checkpoints"),
    "launcher/backends/kubeflow/": ({"sagemaker"}, "labels and API groups of HyperPod"),
    "launcher/backends/slurm/setup/": ({"fsdp"}, "an image stack"),
    "launcher/images/": ({"smp", "fsdp", "sagemaker"}, "image stacks, folders of docker/, a client of boto3"),
    "launcher/tools/neuron_cache.py": ({"nxd"}, "the cache of compiled graphs is that engine's"),
    "launcher/planning/removed_modules.py": ({"smp"}, "an image stack, and what its library has no more"),
    "models/parallel.py": ({"fsdp", "smp", "nxd"}, "what each engine takes of a model; models know no specification"),
    "optional.py": ({"sagemaker"}, "a package that may be missing"),
    "pipelines.py": ({"sagemaker"}, "the public functions for SageMaker Pipelines"),
    "runs/events/event_lines.py": ({"local"}, "a field of an event"),
    "runs/run_paths.py": ({"local"}, "a folder of a run"),
    "spec/backends/local.py": ({"sagemaker"}, "the contract that is emulated"),
    "spec/backends/sagemaker.py": ({"local"}, "the instance types of the SDK's local mode"),
    "spec/backends/table.py": (set(BACKENDS), "the rows"),
    "spec/parallelism/base.py": ({"smp"}, "an image stack"),
    "spec/parallelism/table.py": (set(STRATEGIES), "the rows"),
    "spec/parallelism/smp.py": ({"fsdp"}, "a parameter of its library"),
    "spec/tasks.py": ({"nxd"}, "a form of checkpoints"),
    "spec/validation/task_checks.py": ({"nxd"}, "a form of checkpoints"),
    "worker/inputs/graph_cache.py": ({"nxd"}, "the cache of compiled graphs is that engine's"),
    "worker/results/deliver.py": ({"nxd"}, "a form of checkpoints"),
    "worker/tasks/convert.py": ({"nxd"}, "a form of checkpoints"),
    "worker/tasks/register.py": ({"sagemaker"}, "the task registers with the service"),
    "worker/tasks/script.py": ({"smp"}, "a file of SageMaker's model parallel library"),
    "worker/strategies/model.py": ({"fsdp"}, "torch's name of a method that tensors may have"),
}
"""Modules and folders that name a part all the same, each with the reason."""


@cache
def trees() -> dict[str, ast.Module]:
    return {it.relative_to(PACKAGE).as_posix(): ast.parse(it.read_text()) for it in sorted(PACKAGE.rglob("*.py"))}


def words_of(tree: ast.AST) -> Iterator[str]:
    """What a module imports, the names in it, and its texts without spaces; those with spaces are for people.

    Texts that are statements of their own document something.
    """
    documentation = {id(it.value) for it in ast.walk(tree) if isinstance(it, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield f"{node.module or ''}."
            yield from (f"{node.module or ''}.{it.name}." for it in node.names)
        elif isinstance(node, ast.alias):
            yield from (node.name, f"{node.name}.")
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
            and (not re.search(r"\s", node.value))
        ):
            yield f"{node.value}:"


def named(tree: ast.AST) -> set[str]:
    """Names of the parts that a module names: by an import, a class, or a text.

    A text names a part as a whole or as its prefix (``nxd-``, ``sagemaker:``), in an f-string, too.
    """
    found = set()
    for word in set(words_of(tree)):
        found |= {CLASSES[it] for it in (word, word.rstrip(":")) if it in CLASSES}
        for name, folder in PARTS.items():
            if name in word and (
                re.search(rf"(^|\.){folder}\.{name}[.:]", word)
                or (word.endswith(":") and re.match(rf"{name}(?![A-Za-z0-9])", word))
            ):
                found.add(name)
    return found


@cache
def found_in(path: str) -> frozenset[str]:
    return frozenset(named(trees()[path]))


def own(path: str) -> set[str]:
    """The parts whose own package a module is in."""
    return {name for name, folder in PARTS.items() if re.search(rf"(^|/){folder}/{name}(/|\.py$)", path)}


def test_a_backend_and_a_strategy_are_named_in_their_own_packages_alone() -> None:
    found = {}
    for path in trees():
        allowed = set().union(*(names for location, (names, _) in ALLOWED.items() if path.startswith(location)))
        if wrong := found_in(path) - own(path) - allowed:
            found[path] = wrong
    assert not found, "ask the options class, the strategy or the interface of backends instead"


def test_what_is_allowed_is_used() -> None:
    for location, (names, why) in ALLOWED.items():
        used = set().union(*(found_in(path) for path in trees() if path.startswith(location)))
        assert names <= used, f"{location} no longer names {names - used} ({why})"


@pytest.mark.parametrize(
    "source",
    [
        "type(x) is SmpSpec",
        "type(x).__name__ == 'SmpSpec'",
        "isinstance(x, spec.SlurmOptions)",
        "match x:\n    case NxdStrategy():\n        pass",
        "name == 'nxd'",
        "name in ('fsdp', other)",
        "native.startswith('sagemaker:')",
        "f'slurm-{job}'",
        "from sm_llm.launcher.backends import sagemaker",
        "from sm_llm.launcher.backends.slurm import jobs as j",
        "import sm_llm.launcher.backends.local.backend",
        "from .backends.slurm import jobs",
        "import_module('sm_llm.worker.strategies.nxd.shards')",
        "from sm_llm.spec.parallelism.fsdp import MODES",
    ],
)
def test_every_spelling_is_seen(source: str) -> None:
    assert len(named(ast.parse(source))) == 1


def test_texts_for_people_are_left_alone() -> None:
    source = '"""Only slurm."""\nf("Use backend.name=sagemaker here", x.local, "not-local", "torch.sagemaker.nn")'
    assert named(ast.parse(source)) == set()


def asked_by_name(tree: ast.AST) -> Iterator[int]:
    """Lines that ask options of a job for an attribute that only some of their classes have."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and node.args
        if is_call and re.search(r"(^|\.)(backend|parallelism)$", ast.unparse(node.args[0])):  # type: ignore[attr-defined]
            yield node.lineno  # type: ignore[attr-defined]


def test_no_module_asks_options_for_what_some_of_them_have() -> None:
    assert list(asked_by_name(ast.parse("getattr(job.backend, 'region', None)"))) == [1]
    found = {path: lines for path, tree in trees().items() if (lines := list(asked_by_name(tree)))}
    assert not found, "give the base class a property, or take the options class's own .of(job)"
