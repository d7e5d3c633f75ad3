"""What is kept of the forward pass for the backward pass, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from sm_llm.spec.parallelism.fsdp import FsdpSpec

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default})
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def wrap_layer(layer: torch.nn.Module, number: int, spec: FsdpSpec, *, keep_rng: bool) -> torch.nn.Module:
    """Decoder layer ``number`` with the activation checkpointing and offloading that ``spec`` asks for.

    ``keep_rng``: it draws random numbers, which the second computation must draw again.
    """
    kind = spec.activation_checkpointing
    if kind in ("none", "budget") or (kind == "every_nth" and number % spec.checkpoint_every_layers):
        return layer
    options: dict[str, Any] = {"context_fn": _selective_contexts} if kind == "selective" else {}
    wrapped = checkpoint_wrapper(layer, preserve_rng_state=keep_rng, **options)
    return _OffloadedInputs(wrapped) if spec.offload_activations else wrapped  # type: ignore[no-untyped-call]


def computed_part(layer: torch.nn.Module) -> torch.nn.Module:
    """The part of a wrapped layer to compile: hooks on saved tensors, which cannot be traced, stay outside."""
    return layer.get_submodule("_checkpoint_wrapped_module") if isinstance(layer, _OffloadedInputs) else layer


class _OffloadedInputs(OffloadWrapper):
    """Keeps a checkpointed layer's inputs in host memory until its backward pass.

    A compiled layer saves its parameters as well; torch's own wrapper would copy them to the host and back.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        host = save_on_cpu(pin_memory=True)
        # By memory: what is saved may be a view of a parameter, such as its transpose.
        own = {_address(it) for it in self.parameters() if not isinstance(it, DTensor)}

        def pack(tensor: torch.Tensor) -> Any:
            return tensor if _address(tensor) in own else (host.pack_hook(tensor),)

        def unpack(held: Any) -> torch.Tensor:
            tensor: torch.Tensor = held if isinstance(held, torch.Tensor) else host.unpack_hook(*held)
            return tensor

        with saved_tensors_hooks(pack, unpack):
            return self._checkpoint_wrapped_module(*args, **kwargs)


def _address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor, or of that which it is a view of, begins."""
    # A weight that was gathered in fp8 is a wrapper without memory, around its bytes.
    held: torch.Tensor = getattr(tensor, "_data", tensor)
    return held.untyped_storage().data_ptr()


def _selective_contexts() -> tuple[Any, Any]:
    """Keep attention's results and those of every second matrix product: dear to compute, for the memory they take."""
    products = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            # Counted apart, so that the second computation makes the same choices as the first.
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        else:
            kept = operation in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
