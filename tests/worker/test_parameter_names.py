"""Names of parameters under every mixture of wrappers."""

from __future__ import annotations

import itertools

import pytest
import torch

from sm_llm.worker.parameter_names import plain_name, with_plain_names

NAME = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "mixture", list(itertools.permutations(["_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"]))
)
@pytest.mark.parametrize("location", [0, 2, 3, 4])
def test_CV14_words_of_wrappers_are_stripped_wherever_they_stand(mixture: tuple[str, ...], location: int) -> None:
    parts = NAME.split(".")
    for count in range(len(mixture) + 1):
        wrapped = ".".join([*parts[:location], *mixture[:count], *parts[location:]])
        assert plain_name(wrapped) == NAME
        assert plain_name(f"module.{wrapped}") == NAME


def test_CV14_collisions_are_refused() -> None:
    with pytest.raises(ValueError, match="two parameters are called"):
        with_plain_names([("a._orig_mod.weight", 1), ("a.weight", 2)])


def test_CV14_a_model_under_checkpointing_offloading_and_compilation_keeps_its_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    expected = [name for name, _ in plain.named_parameters()]
    plain[0] = torch.compile(offload_wrapper(checkpoint_wrapper(plain[0])))  # type: ignore[assignment]
    plain[1] = checkpoint_wrapper(torch.compile(plain[1]))  # type: ignore[arg-type]
    whole = torch.compile(plain)
    assert [name for name, _ in whole.named_parameters()] != expected  # type: ignore[attr-defined]
    assert list(with_plain_names(whole.named_parameters())) == expected  # type: ignore[attr-defined]


def test_a_models_own_module_called_module_keeps_its_name() -> None:
    assert plain_name("encoder.module.weight") == "encoder.module.weight"
    assert plain_name("module") == "module"
