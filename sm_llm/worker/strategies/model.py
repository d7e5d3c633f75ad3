"""A Hugging Face causal model without memory for its weights, and its parameters filled shard by shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sm_llm.models.config import both_spellings
from sm_llm.models.registry import family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.worker.weights import WeightReader

_MASKLESS = "sdpa_without_mask"
_WRAPPER_WORDS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def build_on_meta(config: Mapping[str, Any], attention: str = "sdpa") -> torch.nn.Module:
    """The causal language model of a canonical config, in fp32 on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in both_spellings(dict(config)).items() if name != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    hf_config.use_cache = False
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation=attention
        )
    return model


def causal_attention(config: Mapping[str, Any], seq_length: int) -> str:
    """The attention implementation for whole rows of ``seq_length`` tokens: the same kernel, without a mask to make.

    For "sdpa" transformers looks at the position ids for packed sequences, and so waits for the device once in every
    forward pass. Under a name that it has no mask function for it makes no mask, and the kernel is told to be causal.
    A sliding window shorter than the row needs its mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if family(config).attention_span(config, seq_length) < seq_length:
        return "sdpa"
    AttentionInterface.register(_MASKLESS, sdpa_attention_forward)
    return _MASKLESS


def decoder_layers(model: torch.nn.Module, config: Mapping[str, Any]) -> list[tuple[torch.nn.Module, str]]:
    """Every decoder layer as (parent module, name of the child in it), in order."""
    wanted = family(config).decoder_layer_class
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == wanted
    ]


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters by Hugging Face name; wrapper words are stripped, a tied head appears once (as the embedding)."""
    for name, parameter in model.named_parameters():
        for word in _WRAPPER_WORDS:
            name = name.replace(word, "")
        yield name, parameter


def materialise(model: torch.nn.Module, device: torch.device, weights: WeightReader) -> None:
    """Give a model on the meta device its memory, its weights (this process's shards only) and its buffers."""
    model.to_empty(device=device)
    model.tie_weights()  # type: ignore[operator]  # to_empty gives each place of a tied parameter its own memory
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            local, offsets = _local_part(parameter)
            local.copy_(weights.read(name, offsets, tuple(local.shape)))
    _rebuild_buffers(model, device)


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
            fresh = type(module)(model.config)
        for name, buffer in fresh.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
        for name, value in vars(fresh).items():  # older versions keep a second copy outside the buffers
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to(device))
