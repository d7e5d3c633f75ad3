"""What a training leaves open is chosen when it starts, on its own GPUs, and stays so in every later attempt."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.memory_estimate import GIB
from sm_llm.contract.memory_planner import Choice, Hardware, choose
from sm_llm.data.describe import describe_rows
from sm_llm.errors import RunFailed, StorageError
from sm_llm.runs.events.events import SettingsChosen
from sm_llm.runs.run_paths import settings_key
from sm_llm.spec.machines.hardware import Card
from sm_llm.spec.tasks import AUTO, CHECKPOINTING, COMPILE, open_settings, setting, with_settings
from sm_llm.spec.training import CheckpointStart
from sm_llm.storage.uri import open_store, run_and_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.tasks import TrainTask
    from sm_llm.storage.base import Store
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.device import Device

_COMPILERS = ("cc", "gcc", "clang")
_DIGITS = 12


def with_choices(context: WorkerContext, task: TrainTask, config: Mapping[str, Any], device: Device) -> TrainTask:
    """``task`` with a value for whatever it leaves open: what an earlier attempt has chosen, or what fits here.

    Every process calls it, and finds the same: the first one's choice is kept in the run's storage. A run that
    continues another's checkpoint takes that one's choices. A choice holds for as many GPUs of the same kind, and for
    the same of what it was made for: model, batch, sequences, number formats and parallelism.

    Raises ``StorageError``, ``SpecError`` where the task's numbers do not fit together, ``DataError`` for unusable
    rows, and ``RunFailed`` for a budget of activations where nothing can be compiled.
    """
    if not open_settings(task):
        return task
    hardware = Hardware(_card(device), context.process.world_size, context.process.local_world_size, _no_compiler())
    _assert_budget(task, hardware)
    key = None if hardware.card is None else _key(task, config, hardware)
    choice, is_kept = _kept(context, task, key), True
    if choice is None:
        choice, is_kept = choose(config, task, hardware, _rows(task)), False
        assert choice is not None
        choice = _keep_first(context.store, task, key, choice)
    if choice.predicted_bytes is not None:
        context.notice(f"settings chosen {'earlier' if is_kept else 'for this machine'}: {choice}")
    context.emit(SettingsChosen(dict(choice.values), choice.reason, choice.predicted_bytes, is_kept))
    # A plan knows it only where it knows the GPU.
    if (graphs := task.precision.compiled_graphs) != AUTO and choice.values.get(COMPILE) is False:
        problem = f"has no effect: no layers are compiled ({choice.reason})"
        context.notice(f"task.precision.compiled_graphs: {graphs} {problem}", "warning")
    return with_settings(task, choice.values)


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


def _assert_budget(task: TrainTask, hardware: Hardware) -> None:
    needs_compiler = COMPILE in open_settings(task) and setting(task, CHECKPOINTING) == "budget"
    if needs_compiler and hardware.card is not None and hardware.no_compiler is not None:
        raise RunFailed(
            "task.parallelism.activation_checkpointing: the budget is torch.compile's, and nothing can be compiled "
            f"here: {hardware.no_compiler}. Use selective"
        )


def _rows(task: TrainTask) -> int | None:
    """Rows to train on, where a folder states them."""
    if task.data.format != "rows" or task.data.train is None:
        return None
    return describe_rows(Path(task.data.train)).rows


def _key(task: TrainTask, config: Mapping[str, Any], hardware: Hardware) -> str:
    """Names the GPUs, and all else that a choice depends on. The length of training decides no later attempt's."""
    # Where the rest changes, a choice may not fit any more, and may be for settings that are no longer open.
    basis = {
        "config": config,
        "precision": task.precision.model_dump(mode="json", exclude={"compiled_graphs"}),
        "parallelism": task.parallelism.model_dump(mode="json"),
        "compiles": hardware.no_compiler is None,
        "batch": [task.micro_batch_size, task.global_batch_size, task.data.seq_length],
    }
    # A part of the name, since stores create files and never change them.
    digest = hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:_DIGITS]
    gpus = f"{hardware.card} {hardware.world_size}x{hardware.node_size}".lower()
    return settings_key(f"{re.sub(r'[^a-z0-9]+', '-', gpus)}-{digest}")


def _kept(context: WorkerContext, task: TrainTask, key: str | None) -> Choice | None:
    """The choice of an earlier attempt, or of the run that this one continues. None without ``key``."""
    if key is None:
        return None
    stores = [context.store]
    if isinstance(task.start, CheckpointStart):
        uri, _ = run_and_step(task.start.checkpoint)
        stores.append(open_store(uri, context.job.spec.storage_options.model_dump()))
    return next((it for store in stores if (it := _read(store, task, key)) is not None), None)


def _keep_first(store: Store, task: TrainTask, key: str | None, choice: Choice) -> Choice:
    """The first process's choice, for all. Without ``key`` it is the same everywhere, and not kept."""
    if key is None:
        return choice
    store.put_if_absent(key, (json.dumps(choice.to_json(), indent=2) + "\n").encode())
    return _read(store, task, key) or choice


def _read(store: Store, task: TrainTask, key: str) -> Choice | None:
    body = store.get(key)
    if body is None:
        return None
    try:
        return Choice.from_json(json.loads(body), open_settings(task))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{store.uri}: {key} is not a choice of settings: {error}. Delete it") from error
