"""What a training leaves open is chosen when it starts, on its own GPUs, and stays so in every later attempt."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sm_llm.contract.memory_estimate import GIB
from sm_llm.contract.memory_planner import Choice, Hardware, choose
from sm_llm.errors import RunFailed, StorageError
from sm_llm.runs.events.events import SettingsChosen
from sm_llm.runs.run_paths import settings_key
from sm_llm.spec.machines.hardware import Card
from sm_llm.spec.tasks import open_settings, with_settings
from sm_llm.spec.training import CheckpointStart
from sm_llm.storage.uri import open_store, run_and_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.tasks import TrainTask
    from sm_llm.storage.base import Store
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.device import Device

_COMPILERS = ("cc", "gcc", "clang")


def with_choices(context: WorkerContext, task: TrainTask, config: Mapping[str, Any], device: Device) -> TrainTask:
    """``task`` with a value for whatever it leaves open: what an earlier attempt has chosen, or what fits here.

    Every process calls it, and finds the same: the first one's choice is kept in the run's storage. A run that
    continues another's checkpoint takes that one's choices, where it has as many GPUs of the same kind.

    Raises ``StorageError``, and ``SpecError`` where the task's numbers do not fit together.
    """
    if not open_settings(task):
        return task
    hardware = Hardware(_card(device), context.process.world_size, context.process.local_world_size, _no_compiler())
    choice, is_kept = _kept(context, task, hardware), True
    if choice is None:
        choice, is_kept = choose(config, task, hardware), False
        assert choice is not None
        choice = _keep_first(context.store, hardware, choice)
    values = {name: choice.values[name] for name in open_settings(task)}
    if choice.predicted_bytes is not None:
        context.notice(f"settings chosen {'earlier' if is_kept else 'for this machine'}: {choice}")
    context.emit(SettingsChosen(values, choice.reason, choice.predicted_bytes, is_kept))
    return with_settings(task, values)


def assert_equal(chosen: list[dict[str, Any]]) -> None:
    """Raise ``RunFailed`` where processes, each with its own settings, have chosen differently: on other GPUs."""
    if any(it != chosen[0] for it in chosen):
        raise RunFailed(
            "the processes run on different GPUs, for which different settings would be chosen. Set "
            "task.micro_batch_size, task.parallelism.activation_checkpointing, task.parallelism.reshard_after_forward "
            "and task.precision.compile"
        )


def _card(device: Device) -> Card | None:
    """Its name and all of its memory: what is free now differs from one process to the next."""
    memory = device.total_memory
    return None if memory is None else Card(device.name, memory / GIB)


def _no_compiler() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    # Triton compiles the caller of each kernel in C.
    return None if any(map(shutil.which, _COMPILERS)) else "there is no C compiler, which Triton needs"


def _key(hardware: Hardware) -> str:
    return settings_key(
        re.sub(r"[^a-z0-9]+", "-", f"{hardware.card} {hardware.world_size}x{hardware.node_size}".lower())
    )


def _kept(context: WorkerContext, task: TrainTask, hardware: Hardware) -> Choice | None:
    """The choice of an earlier attempt, or of the run that this one continues, for such hardware."""
    if hardware.card is None:
        return None
    stores = [context.store]
    if isinstance(task.start, CheckpointStart):
        uri, _ = run_and_step(task.start.checkpoint)
        stores.append(open_store(uri, context.job.spec.storage_options.model_dump()))
    for store in stores:
        choice = _read(store, hardware)
        if choice is not None and set(open_settings(task)) <= set(choice.values):
            return choice
    return None


def _keep_first(store: Store, hardware: Hardware, choice: Choice) -> Choice:
    """The first process's choice, for all. Nothing is kept on CPUs, where it is the same everywhere."""
    if hardware.card is None:
        return choice
    store.put_if_absent(_key(hardware), (json.dumps(choice.to_json(), indent=2) + "\n").encode())
    return _read(store, hardware) or choice


def _read(store: Store, hardware: Hardware) -> Choice | None:
    body = store.get(_key(hardware))
    if body is None:
        return None
    try:
        return Choice(**json.loads(body))
    except (ValueError, TypeError) as error:
        raise StorageError(f"{store.uri}: {_key(hardware)} is not a choice of settings: {error}. Delete it") from error
