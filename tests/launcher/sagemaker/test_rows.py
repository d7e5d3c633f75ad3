"""The places that every backend, strategy and task kind touches agree with one another."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from sm_llm.launcher.backend import backend
from sm_llm.launcher.images.images import IMAGES, MINIMUM_TORCH, rows
from sm_llm.spec.backends.table import BACKENDS, backend_spec
from sm_llm.spec.parallelism.base import StrategySpec
from sm_llm.spec.parallelism.table import STRATEGIES, strategy_spec
from sm_llm.spec.schema import tag_values
from sm_llm.spec.tasks import TASK_KINDS, Task


def test_every_backend_of_the_specification_has_a_class_of_its_name() -> None:
    assert set(tag_values(backend_spec())) == set(BACKENDS)
    assert {name: backend(name).name for name in BACKENDS} == {name: name for name in BACKENDS}


def test_the_table_of_strategies_holds_every_class_under_its_name() -> None:
    assert {name: row.options for name, row in STRATEGIES.items()} == tag_values(strategy_spec())
    assert {name for name, row in STRATEGIES.items() if not issubclass(row.options, StrategySpec)} == set()


def test_what_can_be_launched_has_a_worker() -> None:
    for strategy in STRATEGIES.values():
        for name in (strategy.worker, strategy.device):
            module, _, attribute = name.partition(":")
            assert callable(getattr(import_module(module), attribute)), name
    for kind, row in TASK_KINDS.items():
        if row.worker is not None:
            module, _, function = row.worker.partition(":")
            assert callable(getattr(import_module(module), function)), kind


def test_the_table_of_task_kinds_holds_every_kind_under_its_name() -> None:
    assert {kind: row.spec for kind, row in TASK_KINDS.items()} == tag_values(Task)
    assert {row.entrypoint for row in TASK_KINDS.values()} == {f"{kind}.py" for kind in TASK_KINDS}
    workers = {row.worker.partition(":")[0].rpartition(".")[2] for row in TASK_KINDS.values() if row.worker}
    modules = {it.name for it in iter_modules(import_module("sm_llm.worker.tasks").__path__)}
    assert workers == modules, "a module of tasks/ that no row names, or the other way round"


def test_the_default_of_every_image_stack_is_one_that_we_train_with() -> None:
    for line, oldest in MINIMUM_TORCH.items():
        if line != "cpu":  # its default is for tasks that train nothing
            assert tuple(map(int, rows(line)[0].torch.split("."))) >= oldest  # type: ignore[arg-type]
    assert len({(row.stack, row.version) for row in IMAGES}) == len(IMAGES)
