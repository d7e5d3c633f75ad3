"""A Hugging Face causal model without memory for its weights, and its parameters filled shard by shard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sm_llm.models.config import both_spellings
from sm_llm.models.families.table import family
from sm_llm.worker.parameter_names import with_plain_names
from sm_llm.worker.runtime.imports import without_collections

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.worker.strategies.weights import WeightReader


def build_on_meta(
    config: Mapping[str, Any], attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The causal language model of a canonical config, on the meta device."""
    # The class of a model is imported only when it is made.
    with without_collections():
        return _on_meta(config, attention, dtype)


def _on_meta(config: Mapping[str, Any], attention: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in both_spellings(dict(config)).items() if name != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    # A key/value cache only serves generation, and would hold activations.
    hf_config.use_cache = False
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    return model


def decoder_layers(model: torch.nn.Module, config: Mapping[str, Any]) -> list[tuple[torch.nn.Module, str]]:
    """Every decoder layer as (parent module, name of the child in it), in order."""
    wanted = family(config).decoder_layer_class
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == wanted
    ]


@dataclass(frozen=True)
class OuterModules:
    """What lies around the decoder layers."""

    table: torch.nn.Module
    """The token embedding."""
    head: list[torch.nn.Module]
    """What comes behind the last layer: the norm and the output head."""


def outer_modules(model: torch.nn.Module) -> OuterModules | None:
    """Modules with parameters around a model's layers; None where token table and output head share one."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    # A parameter cannot be in two groups of FSDP.
    if table.weight is head.weight:
        return None
    return OuterModules(table, [*last_norms(model), head])


def last_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What has parameters between the last decoder layer and the output head."""
    table = model.get_input_embeddings()  # type: ignore[operator]
    return [
        child
        for child in model.base_model.children()  # type: ignore[union-attr]
        if child is not table and not isinstance(child, torch.nn.ModuleList) and any(True for _ in child.parameters())
    ]


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by Hugging Face name; wrapper words are stripped, a tied head appears once (as the embedding)."""
    return with_plain_names(model.named_parameters())


def materialise(
    model: torch.nn.Module, parameter_device: torch.device, device: torch.device, weights: WeightReader | None
) -> None:
    """Give a model on the meta device its memory, its weights (this process's shards only) and its buffers.

    Parameters live at ``parameter_device``; buffers on the ``device`` that computes. Without ``weights`` parameters
    are NaN, which no training passes over in silence, until a checkpoint is loaded.
    """
    model.to_empty(device=parameter_device)
    model.tie_weights()  # type: ignore[operator]  # to_empty gives each place of a tied parameter its own memory
    with torch.no_grad():
        for name, parameter in named_parameters(model).items():
            local, offsets = _local_part(parameter)
            local = plain(local)
            if weights is None:
                # Not 0: a parameter that a checkpoint does not bring would go unnoticed.
                local.fill_(math.nan)
            else:
                local.copy_(weights.read(name, offsets, tuple(local.shape)))
    _rebuild_buffers(model, device)


def plain(local: torch.Tensor) -> torch.Tensor:
    """The tensor inside of a process's part that FSDP gathers in another format; any other as it is."""
    inner: torch.Tensor = getattr(local, "_tensor", local) if hasattr(local, "fsdp_pre_all_gather") else local
    return inner


def _local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This process's part of a parameter, and where it begins in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(offsets)


def _rebuild_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Compute non-persistent buffers (rotary frequencies) again: ``to_empty`` left them without values."""
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is None:
            continue
        with torch.device("cpu"):
            # transformers' modules with buffers of this kind are made from the config alone.
            fresh = type(module)(model.config)
        for name, buffer in fresh.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
        for name, value in vars(fresh).items():  # older versions keep a second copy outside the buffers
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to(device))
