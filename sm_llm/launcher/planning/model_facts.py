"""What a plan holds about a model, from its config alone: counts, FLOPs and checkpoint size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.contract.memory_estimate import SIZES, state_bytes
from sm_llm.errors import Issue, SpecError, StorageError
from sm_llm.launcher.planning.local_paths import local_folder, referenced_step
from sm_llm.models.config import model_config
from sm_llm.models.families.table import family
from sm_llm.models.parallel import kv_heads, model_issues
from sm_llm.models.presets import PRESETS
from sm_llm.spec.tasks import ConvertTask, FetchTask
from sm_llm.spec.training import PretrainedStart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.spec.tasks import TrainTask

# Of weights that a plan reads whole: a second from a local disk.
_READ_BYTES = 1 << 30


@dataclass(frozen=True)
class ModelFacts:
    """Numbers of one architecture at one sequence length."""

    model_type: str
    parameters: int
    non_embedding_parameters: int
    flops_per_token: float
    """Forward and backward, by ``flops_formula``."""
    flops_formula: str
    vocab_size: int
    max_position_embeddings: int
    checkpoint_bytes: int
    checkpoint_holds: str
    """What makes them up."""
    key_value_heads: int = 0


def known_preset(tasks: Mapping[str, Any], step: str | None) -> str | None:
    """The preset of the weights that a step puts out: fetched from the preset's page on the hub, or converted."""
    from sm_llm.storage.hub.hub_addresses import parse_hub

    task = tasks.get(step or "")
    if isinstance(task, ConvertTask):
        return known_preset(tasks, referenced_step(task.source))
    if not isinstance(task, FetchTask):
        return None
    try:
        address = parse_hub(task.source)
    except StorageError:  # the step's own check reports it
        return None
    is_whole = address.kind == "model" and not address.path
    return next((it.name for it in PRESETS.values() if is_whole and it.source == address.repository), None)


def pretrained_source(task: TrainTask) -> str | None:
    """Folder, hub id or reference of the weights that training starts from."""
    return task.start.pretrained if isinstance(task.start, PretrainedStart) else None


def _readable(source: str | None, where: str) -> str | None:
    """The config of a model on the hub, in the hub's cache; other sources as they are."""
    if source is None:
        return None
    from sm_llm.storage.hub.hub_addresses import config_file, is_hub, parse_hub

    if not is_hub(source):
        return source
    try:
        return str(config_file(parse_hub(source)))
    except StorageError as error:
        raise SpecError([Issue("hub-config-unreadable", where, str(error))]) from None


def planned_config(task: TrainTask) -> dict[str, Any]:
    """The canonical config of the model that ``task`` trains.

    Raises ``SpecError`` for an unknown family, preset or config field, and for degrees that the model does not allow.
    """
    pretrained = pretrained_source(task)
    # A path or preset decides on the config, so the hub need not be asked for that of the weights.
    if task.model.path is None and task.model.preset is None:
        pretrained = _readable(pretrained, "task.start.pretrained")
    config = model_config(
        preset=task.model.preset,
        path=_readable(task.model.path, "task.model.path"),
        pretrained=pretrained,
        overrides=task.model.config,
    )
    # Plain options, because models/ and spec/ do not import each other.
    if issues := model_issues(config, task.parallelism.strategy, task.parallelism.model_dump()):
        raise SpecError(issues)
    return config


def pretrained_issues(config: Mapping[str, Any], task: TrainTask) -> list[Issue]:
    """Issues of weights that lie on this machine, compared with the canonical ``config``.

    Of the files the headers are read, and up to ``_READ_BYTES`` the values, too. Weights elsewhere, and the values of
    larger ones, are checked by the worker, before its first step.
    """
    folder = local_folder(pretrained_source(task))
    if folder is None or not folder.is_dir():
        return []
    from sm_llm.models.weights_check import check_weights, holds_shards, not_finite, unread_warning

    if holds_shards(folder):  # whoever reads them checks them
        return []
    checked = check_weights(folder, config)
    damaged = list(checked.issues) or list(not_finite(checked.tensors, _READ_BYTES))
    return [*damaged, *([unread_warning(checked.unread)] if checked.unread else [])]


def model_facts(config: Mapping[str, Any], task: TrainTask) -> ModelFacts:
    """Facts of the model of a canonical ``config``."""
    kind = family(config)
    parameters = kind.parameter_count(config)
    master = task.precision.master
    holds, bytes_each = f"{master} weights and two AdamW moments", state_bytes(task.precision)
    if task.precision.moments != "master":
        holds += f" in {task.precision.moments}"
    if task.parallelism.memory().zero1:
        # The masters are the optimiser's: what computes is saved beside them.
        compute = "fp32" if task.precision.compute == "fp32" else "bf16"
        holds = f"{compute} weights, {master} masters and two AdamW moments"
        bytes_each += SIZES[compute]
    return ModelFacts(
        model_type=kind.model_type,
        parameters=parameters,
        non_embedding_parameters=kind.non_embedding_parameter_count(config),
        flops_per_token=kind.flops_per_token(config, task.data.seq_length),
        flops_formula=kind.flops_formula,
        vocab_size=kind.vocab_size(config),
        max_position_embeddings=kind.max_position_embeddings(config),
        # Random states, steps and the loader's position add kilobytes.
        checkpoint_bytes=parameters * bytes_each,
        checkpoint_holds=holds,
        key_value_heads=kv_heads(config),
    )
