"""Backends and strategies are named in their own packages alone, however a module spells a name."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from sm_llm.spec.backends.table import BACKENDS
from sm_llm.spec.parallelism.table import STRATEGIES
from tests.syntax import by_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
    "convert/hf_source.py": ({"fsdp"}, "what torch puts before the names of parameters"),
    "launcher/backends/kubeflow/": ({"sagemaker"}, "labels and API groups of HyperPod"),
    "launcher/backends/slurm/setup/": ({"fsdp"}, "an image stack"),
    "launcher/backends/sagemaker/sdk/sdk_arguments.py": ({"smp"}, "a block of the SDK's argument distribution"),
    "launcher/backends/slurm/submit.py": ({"sagemaker"}, "a file on HyperPod's nodes"),
    "launcher/images/": ({"smp", "fsdp", "sagemaker"}, "image stacks, folders of docker/, a client of boto3"),
    "launcher/tools/neuron_cache.py": ({"nxd"}, "the cache of compiled graphs is that engine's"),
    "launcher/planning/removed_modules.py": ({"smp", "sagemaker"}, "an image stack, its library torch.sagemaker"),
    "models/parallel.py": ({"fsdp", "smp", "nxd"}, "what each engine takes of a model; models know no specification"),
    "optional.py": ({"sagemaker"}, "a package that may be missing"),
    "pipelines.py": ({"sagemaker"}, "the public functions for SageMaker Pipelines"),
    "runs/run_paths.py": ({"local"}, "a folder of a run"),
    "spec/backends/local.py": ({"sagemaker"}, "the contract that is emulated"),
    "spec/backends/sagemaker.py": ({"local"}, "the instance types of the SDK's local mode"),
    "spec/backends/table.py": (set(BACKENDS), "the rows"),
    "spec/machines/neuron_releases.py": ({"nxd"}, "a package of a Neuron SDK"),
    "spec/parallelism/base.py": ({"smp"}, "an image stack"),
    "spec/parallelism/table.py": (set(STRATEGIES), "the rows"),
    "spec/parallelism/smp.py": ({"fsdp"}, "a parameter of its library"),
    "spec/tasks.py": ({"nxd"}, "a form of checkpoints"),
    "spec/validation/address_checks.py": ({"sagemaker"}, "settings of inputs that one service alone has"),
    "spec/validation/task_checks.py": ({"nxd", "sagemaker"}, "a form of checkpoints, names of the model registry"),
    "worker/inputs/graph_cache.py": ({"nxd"}, "the cache of compiled graphs is that engine's"),
    "worker/parameter_names.py": ({"fsdp"}, "what torch puts before the names of parameters"),
    "worker/results/deliver.py": ({"nxd"}, "a form of checkpoints"),
    "worker/scratch.py": ({"sagemaker"}, "a disk of HyperPod's nodes"),
    "worker/strategies/smp/": ({"fsdp"}, "FSDP1 of torch, which the library wraps"),
    "worker/tasks/convert.py": ({"nxd"}, "a form of checkpoints"),
    "worker/tasks/register.py": ({"sagemaker"}, "the task registers with the service"),
    "worker/tasks/script.py": ({"smp"}, "a file of SageMaker's model parallel library"),
    "worker/strategies/model.py": ({"fsdp"}, "torch's name of a method that tensors may have"),
}
"""Modules and folders that name a part all the same, each with the reason."""


STRUCTURAL = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "count")
"""Methods of texts that decide by what they are given."""


def texts_for_people(tree: ast.AST) -> set[int]:
    """Ids of the texts of several words, and of those that are statements of their own: nothing is decided by them.

    A text that is compared, searched for or cut off is none, however many words it has.
    """
    found: set[int] = set()
    decides: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            found.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\S\s+\S", node.value):
            found.add(id(node))
        elif isinstance(node, ast.Compare | ast.MatchValue):
            decides |= {id(it) for it in ast.walk(node)}
        elif isinstance(node, ast.Subscript):
            decides.add(id(node.slice))
        elif isinstance(node, ast.Call):
            method = getattr(node.func, "attr", "")
            if method in STRUCTURAL or getattr(getattr(node.func, "value", None), "id", "") in ("re", "fnmatch"):
                decides |= {id(it) for argument in node.args for it in ast.walk(argument)}
    statements = {id(it.value) for it in ast.walk(tree) if isinstance(it, ast.Expr)}
    return (found - decides) | statements


def words_of(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """The imports, names and texts of a module; whether each is a text. Those for people are left out."""
    for_people = texts_for_people(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield f"{node.module or ''}.", False
            yield from ((f"{node.module or ''}.{it.name}.", False) for it in node.names)
        elif isinstance(node, ast.alias):
            yield from ((it, False) for it in (node.name, f"{node.name}.", node.asname) if it)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in for_people:
            yield node.value, True
        else:
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None)))
            if isinstance(name, str):
                yield name, False


def named(tree: ast.AST) -> set[str]:
    """Names of the parts that a module names: by an import, a class, a name or a text.

    A text or a name holds that of a part as a word of its own, wherever it stands: ``nxd-``, ``-slurm``, ``is_smp``.
    """
    found = set()
    for word, is_text in set(words_of(tree)):
        found |= {CLASSES[it] for it in re.findall(r"\w+", word) if it in CLASSES}
        for name, folder in PARTS.items():
            if name in word and (
                re.search(rf"(^|\.){folder}\.{name}[.:]", f"{word}:") or is_word(name, word, is_text=is_text)
            ):
                found.add(name)
    return found


def is_word(name: str, text: str, *, is_text: bool) -> bool:
    """Whether a name is a word of a text or of an identifier.

    ``local`` is a word of its own meaning, so it counts alone, and as what stands before a sign: ``local:``. Modules of
    torch are called ``torch.sagemaker`` and ``torch.distributed.fsdp``.
    """
    if text.startswith("torch."):
        return False
    if name == "local":
        return is_text and re.match(r"\s*local(?![A-Za-z0-9_])", text) is not None
    return re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", text) is not None


@cache
def found_in(path: str) -> frozenset[str]:
    return frozenset(named(by_path()[path]))


def own(path: str) -> set[str]:
    """The parts whose own package a module is in: that of a backend's worker, too."""
    folders = {name: f"{folder}|^worker" if folder == "backends" else folder for name, folder in PARTS.items()}
    return {name for name, folder in folders.items() if re.search(rf"(^|/)({folder})/{name}(/|\.py$)", path)}


def test_a_backend_and_a_strategy_are_named_in_their_own_packages_alone() -> None:
    found = {}
    for path in by_path():
        allowed = set().union(*(names for location, (names, _) in ALLOWED.items() if path.startswith(location)))
        if wrong := found_in(path) - own(path) - allowed:
            found[path] = wrong
    assert not found, "ask the options class, the strategy or the interface of backends instead"


def test_what_is_allowed_is_used() -> None:
    for location, (names, why) in ALLOWED.items():
        used = set().union(*(found_in(path) for path in by_path() if path.startswith(location)))
        assert names <= used, f"{location} no longer names {names - used} ({why})"


@pytest.mark.parametrize(
    "source",
    [
        "type(x) is SmpSpec",
        "type(x).__name__ == 'SmpSpec'",
        "isinstance(x, spec.SlurmOptions)",
        "match x:\n    case NxdStrategy():\n        pass",
        "name == 'nxd'",
        "name == 'slurm '.strip()",
        "f'{name} ' == 'slurm '",
        "name.endswith('-slurm')",
        "f'job-slurm-{name}'",
        "f'{name}/slurm'",
        "'jobs of slurm here' in text",
        "text.startswith('on slurm, ')",
        "re.match('(a|slurm) b', text)",
        "match name:\n    case 'slurm':\n        pass",
        "rows = {'slurm': 1}",
        "rows.slurm",
        "f(slurm=1)",
        "def slurm_only(): ...",
        "is_slurm = 1",
        "import a.b as smp",
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
    source = '"""Only slurm."""\nf("Use backend.name=sagemaker here", x.local, "not-local", f"{x} has no slurm here")'
    assert named(ast.parse(source)) == set()


def attributes(options: type) -> set[str]:
    """Public names of a class of options, its fields among them."""
    return {*(it for it in dir(options) if not it.startswith("_")), *options.model_fields}  # type: ignore[attr-defined]


def of_some(rows: Iterable[type]) -> dict[type, set[str]]:
    """Class of options -> names that not all classes have."""
    found = {it: attributes(it) for it in rows}
    shared = set.intersection(*found.values())
    return {it: names - shared for it, names in found.items()}


OF_SOME = {
    name: {part for part, row in table.items() if name in of_some(it.options for it in table.values())[row.options]}
    for table in (BACKENDS, STRATEGIES)
    for name in set().union(*of_some(it.options for it in table.values()).values())
}
"""Name of an option -> the backends, or strategies, that have it."""
OPTIONS = re.compile(
    r"(\.|^)(backend|parallelism)$|\[['\"](backend|parallelism)['\"]\]$|\(['\"](backend|parallelism)['\"].*\)$"
)
"""How an expression ends that gives the options of a job, of a plan or of a record."""
ASKED_ALL_THE_SAME = {
    "contract/compile_cache.py": "the cache is one engine's, and where it lies is no constant of a graph",
}
"""Modules that ask all the same, each with the reason."""


def variables_of_options(tree: ast.AST) -> set[str]:
    """Variables that hold options: ``o = job.backend``, also by way of another variable or of a walrus."""
    found: set[str] = set()
    while True:
        before = len(found)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if is_options(node.value, found):
                    found |= {it.id for it in targets if isinstance(it, ast.Name)}
        if len(found) == before:
            return found


def is_options(node: ast.expr, variables: set[str]) -> bool:
    """Whether an expression gives options, as a whole or as a mapping."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "model_dump":
        return is_options(node.func.value, variables)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("vars", "dict", "asdict"):
        return any(is_options(it, variables) for it in node.args)
    if isinstance(node, ast.NamedExpr):
        return is_options(node.value, variables)
    is_named = isinstance(node, ast.Name) and node.id in variables
    return is_named or OPTIONS.search(ast.unparse(node)) is not None


def asked_by_name(tree: ast.AST, own_parts: set[str]) -> Iterator[int]:
    """Lines that ask options of a job for what only some of their classes have, by a name that is a text.

    ``own_parts``: whose names may be asked for here. Attributes that are written out are mypy's.
    """
    variables = variables_of_options(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            held, names, is_sure = node.value, [node.slice], False
        elif not isinstance(node, ast.Call) or not node.args:
            continue
        elif getattr(node.func, "id", "") in ("getattr", "hasattr"):
            # Whatever it is called that is asked: a name of an option that only some have is enough.
            held, names, is_sure = node.args[0], node.args[1:2], True
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            held, names, is_sure = node.func.value, node.args[:1], False
        elif getattr(node.func, "attr", getattr(node.func, "id", "")) == "attrgetter":
            held, names, is_sure = node.func, node.args, True
        else:
            continue
        known = [it.value for it in names if isinstance(it, ast.Constant)]
        is_foreign = any(of_others(part, own_parts) for it in known for part in str(it).split("."))
        if (is_sure and is_foreign) or ((is_foreign or not known) and is_options(held, variables)):
            yield node.lineno


def of_others(name: str, own_parts: set[str]) -> bool:
    """Whether a name is that of an option that only some have, ``own_parts`` not among them."""
    return name in OF_SOME and not OF_SOME[name] & own_parts


def test_no_module_asks_options_for_what_some_of_them_have() -> None:
    found = {path: sorted(set(asked_by_name(tree, own(path)))) for path, tree in by_path().items()}
    wrong = {path: lines for path, lines in found.items() if lines and path not in ASKED_ALL_THE_SAME}
    assert not wrong, "give the base class a property, or take the options class's own .of(job)"
    assert [path for path in ASKED_ALL_THE_SAME if not found[path]] == []


@pytest.mark.parametrize(
    "source",
    [
        "getattr(job.backend, 'region', None)",
        "o = job.backend; getattr(o, 'partition')",
        "o = job.backend; p = o; getattr(p, name)",
        "getattr(whatever, 'partition')",
        "hasattr((o := job.backend), name)",
        "operator.attrgetter('backend.partition')(job)",
        "record.spec['backend']['partition']",
        "record.spec['backend'].get('partition')",
        "record.spec.get('backend', {})['partition']",
        "b = spec['backend']; b.get('partition')",
        "vars(job.backend)['partition']",
        "task.parallelism.model_dump()['zero1']",
        "d = job.backend.model_dump(); d['partition']",
    ],
)
def test_options_that_are_asked_by_name_are_seen(source: str) -> None:
    assert set(asked_by_name(ast.parse(source), set())) == {1}


def test_options_that_all_have_are_asked_for() -> None:
    for source in ("spec['backend']['name']", "getattr(task, 'seed')", "match['name']", "job.backend.region"):
        assert list(asked_by_name(ast.parse(source), set())) == [], source
    assert list(asked_by_name(ast.parse("record.spec['backend']['partition']"), {"slurm"})) == []
