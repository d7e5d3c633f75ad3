"""A Hugging Face model for SMP v2: built without memory, made of the library's layers where asked, wrapped by FSDP1."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from sm_llm.models.config import both_spellings
from sm_llm.models.families.table import family
from sm_llm.worker.strategies.smp import library

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.spec.parallelism.smp import SmpSpec
    from sm_llm.worker.strategies.weights import WeightReader

_LAYERS = "torch.sagemaker.tensor_parallel.transformer"
_ENGINE = "transformer_engine.pytorch"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have no memory for their parameters; buffers are real (rotary frequencies are computed)."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def hugging_face_model(config: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """The causal language model of a canonical config, in transformers' own layers, parameters on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    left_out = ("model_type", "dtype", "torch_dtype")  # the format is ours to choose, and buffers stay in fp32
    fields = {name: value for name, value in both_spellings(dict(config)).items() if name not in left_out}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    # A key/value cache only serves generation.
    hf_config.use_cache = False
    with parameters_on_meta():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa")
    for parameter in model.parameters():
        # On the meta device this changes the type alone.
        parameter.data = parameter.data.to(dtype)
    model.tie_weights()  # type: ignore[operator]
    return model


@torch.no_grad()
def fill_whole(model: torch.nn.Module, weights: WeightReader) -> None:
    """Give a model on the meta device host memory for all of its parameters, and their values."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(torch.empty_like(parameter, device="cpu")))
    model.tie_weights()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        parameter.copy_(weights.read(name, (0,) * parameter.dim(), tuple(parameter.shape)))


def transformed(
    model: torch.nn.Module, config: Mapping[str, Any], smp: SmpSpec, seed: int, *, from_rank0: bool
) -> torch.nn.Module:
    """The model in the library's layers (TransformerEngine), with the weights of rank 0 if asked. A collective."""
    experts = family(config).model_type == "mixtral"
    options = _experts(seed, from_rank0=from_rank0) if experts else None
    on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
    with parameters_on_meta() if experts and on_meta else nullcontext():
        found: torch.nn.Module = library.symbol(library.PACKAGE, "transform")(
            model, config=options, load_state_dict_from_rank0=from_rank0
        )
    return found


def _experts(seed: int, *, from_rank0: bool) -> Any:
    make = library.symbol("torch.sagemaker.moe.moe_config", "MoEConfig")
    options: dict[str, Any] = {"smp_moe": True, "random_seed": seed}
    if library.takes(make, "use_cpu_initialization"):  # not in the reference; AWS's scripts pass it where weights load
        options["use_cpu_initialization"] = from_rank0 and torch.distributed.get_rank() == 0
    return make(**options)


def delayed(model: torch.nn.Module, device: torch.device, *, own_layers: bool) -> Any:
    """The library's helper that gives each shard its memory on its own device once FSDP comes to it.

    Of transformers' layers it makes empty ones, since the values are filled in shard by shard; of its own it knows the
    distributions.
    """
    make = library.symbol("torch.sagemaker.delayed_param", "DelayedParamIniter")
    if own_layers:
        return make(model)
    helpers = "torch.sagemaker.utils.module_utils"
    empty, move = (library.symbol(helpers, it) for it in ("empty_module_params", "move_buffers_to_device"))

    def on_device(module: torch.nn.Module) -> None:
        empty(module, device=device)
        move(module, device=device)

    return make(model, init_method_using_config=on_device)


def sharded(
    model: torch.nn.Module,
    layer: type[torch.nn.Module],
    smp: SmpSpec,
    precision: MixedPrecision,
    device: torch.device,
    *,
    initer: Any,
    from_rank0: bool,
) -> FSDP:
    """The model under FSDP1, decoder layer by decoder layer; the library adds its process groups. A collective.

    ``use_orig_params`` keeps norms and biases apart from the matrices, so that weight decay can distinguish them.
    """
    validated: AbstractContextManager[Any] = nullcontext()
    options: dict[str, Any] = {}
    if initer is not None:
        validated = initer.validate_params_and_buffers_inited()
        # FSDP calls it for each module as it wraps it, so one layer at a time has its whole memory.
        options["param_init_fn"] = initer.get_param_init_fn()
        options["post_param_init_fn"] = initer.get_post_param_init_fn()  # the library's own: ties weights again
    with validated:
        return FSDP(
            model,
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={layer}),
            mixed_precision=precision,
            sharding_strategy=_strategy(smp.hybrid_shard_degree),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=True,
            limit_all_gathers=True,
            device_id=device,
            use_orig_params=True,
            sync_module_states=from_rank0,
            **options,
        )


def _strategy(degree: int) -> ShardingStrategy:
    """What goes with ``hybrid_shard_degree`` (Developer Guide): 0 is FSDP's own, 1 shards nothing."""
    return {0: ShardingStrategy.FULL_SHARD, 1: ShardingStrategy.NO_SHARD}.get(degree, ShardingStrategy.HYBRID_SHARD)


def layer_class(model: torch.nn.Module, config: Mapping[str, Any], *, own_layers: bool) -> type[torch.nn.Module]:
    """Class of one decoder layer."""
    if own_layers:
        found: type[torch.nn.Module] = library.symbol(_LAYERS, "TransformerLayer")
        return found
    wanted = family(config).decoder_layer_class
    return next(type(module) for module in model.modules() if type(module).__name__ == wanted)


def with_memory_saved(
    model: FSDP, layer: type[torch.nn.Module], config: Mapping[str, Any], smp: SmpSpec
) -> torch.nn.Module:
    """Activation checkpointing and offloading around a wrapped model, as the library wants them."""
    if smp.activation_checkpointing == "full":
        for kind, function in _checkpointed(layer, config, smp):
            # Offloading works with reentrant checkpointing only, TransformerEngine's own with the other.
            impl = CheckpointImpl.REENTRANT if function is None else CheckpointImpl.NO_REENTRANT
            wrap = partial(checkpoint_wrapper, checkpoint_impl=impl, checkpoint_fn=function)
            apply_activation_checkpointing(
                model, checkpoint_wrapper_fn=wrap, check_fn=lambda module, kind=kind: isinstance(module, kind)
            )
    return offload_wrapper(model) if smp.sm_activation_offloading else model


def _checkpointed(
    layer: type[torch.nn.Module], config: Mapping[str, Any], smp: SmpSpec
) -> list[tuple[type[torch.nn.Module], Any]]:
    """Which modules are computed again, and by what. In fp8 attention and experts are apart (Developer Guide)."""
    if not smp.fp8:
        return [(layer, None)]
    engine = partial(
        library.symbol(_ENGINE, "checkpoint"),
        distribute_saved_activations=False,
        get_rng_state_tracker=library.state("get_rng_state_tracker"),
        tp_group=library.state("tp_process_group"),
        use_reentrant=False,
    )
    if family(config).model_type != "mixtral":
        return [(layer, engine)]
    attention = library.symbol(f"{_ENGINE}.attention", "MultiheadAttention")
    experts = library.symbol("torch.sagemaker.moe.moe_layer", "MoELayer")
    return [(attention, engine), (experts, None)]


def fp8_context(smp: SmpSpec) -> AbstractContextManager[Any]:
    """What a forward pass runs in: fp8 by TransformerEngine with delayed scaling, or nothing."""
    if not smp.fp8:
        return nullcontext()
    formats = library.symbol("transformer_engine.common.recipe", "Format")
    recipe = library.symbol("transformer_engine.common.recipe", "DelayedScaling")(
        fp8_format=formats.HYBRID, amax_history_len=1024, amax_compute_algo="max"
    )
    group = library.state("world_process_group")
    context: AbstractContextManager[Any] = library.symbol(_ENGINE, "fp8_autocast")(
        enabled=True, fp8_recipe=recipe, fp8_group=group
    )
    return context
