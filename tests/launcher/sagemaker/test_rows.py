"""The places that every backend, strategy and task kind touches agree with one another."""

from __future__ import annotations

import inspect

from sm_llm.contract.entrypoint import TASK_KINDS
from sm_llm.launcher import runnable
from sm_llm.launcher.backends.registry import BACKENDS, backend
from sm_llm.launcher.images.images import IMAGES, MINIMUM_TORCH, rows
from sm_llm.spec.backends.table import backend_spec
from sm_llm.spec.reference.schema import tag_values
from sm_llm.worker.main import WORKERS
from sm_llm.worker.strategies import registry


def test_every_backend_of_the_specification_has_a_class_of_its_name() -> None:
    assert set(tag_values(backend_spec())) == set(BACKENDS)
    assert {name: backend(name).name for name in BACKENDS} == {name: name for name in BACKENDS}


def test_what_can_be_launched_has_a_worker() -> None:
    assert set(runnable.TASKS) == set(WORKERS) <= set(TASK_KINDS)
    text = inspect.getsource(registry)
    assert all(f'"{strategy}"' in text for strategy in runnable.STRATEGIES)


def test_the_default_of_every_line_of_images_is_one_that_we_train_with() -> None:
    for line, oldest in MINIMUM_TORCH.items():
        if line != "cpu":  # its default is for tasks that train nothing
            assert tuple(map(int, rows(line)[0].torch.split("."))) >= oldest  # type: ignore[arg-type]
    assert len({(row.line, row.version) for row in IMAGES}) == len(IMAGES)
