"""Shards of neuronx-distributed as a source of weights: any slice, for any degrees, checked against the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sm_llm.convert.api import convert
from sm_llm.errors import CheckpointError
from sm_llm.models.config import read_config
from sm_llm.models.families.table import family
from sm_llm.models.weights_check import holds_shards
from sm_llm.worker.strategies.weights import ShardedWeights
from tests.convert.models import CONFIGS, write_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "dtype", "qkv"), [("llama", "F32", "fused"), ("llama", "BF16", "linear"), ("qwen2", "F32", "fused")]
)
def test_every_slice_is_that_of_the_weights_that_were_cut(name: str, dtype: str, qkv: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", CONFIGS[name], dtype)
    convert(model, tmp_path / "shards", to="nxd", tensor_parallel_degree=4, pipeline_parallel_degree=2, qkv=qkv)
    assert (holds_shards(tmp_path / "shards"), holds_shards(model)) == (True, False)
    config = read_config(model, where="model")
    reader, whole = (
        ShardedWeights(tmp_path / "shards", family(config).tensors(config)),
        load_file(model / "model.safetensors"),
    )
    random = np.random.default_rng(0)
    for key, tensor in whole.items():
        for _ in range(3):
            begin = [int(random.integers(0, size)) for size in tensor.shape]
            sizes = [int(random.integers(1, size - at + 1)) for size, at in zip(tensor.shape, begin, strict=True)]
            wanted = tensor[tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True))]
            assert torch.equal(reader.read(key, begin, sizes), wanted), key


def test_shards_of_another_model_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", CONFIGS["llama"])
    convert(tmp_path / "model", tmp_path / "shards", to="nxd", tensor_parallel_degree=2)
    other = write_model(tmp_path / "other", {**CONFIGS["llama"], "hidden_size": 128})
    config = read_config(other, where="model")
    with pytest.raises(CheckpointError, match=r"have other tensors: lm_head\.weight"):
        ShardedWeights(tmp_path / "shards", family(config).tensors(config))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "model", CONFIGS["llama"])
    convert(tmp_path / "model", tmp_path / "shards", to="nxd", tensor_parallel_degree=2, xser=False)
    (tmp_path / "shards/model/dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()
    config = read_config(tmp_path / "model", where="model")
    with pytest.raises(CheckpointError, match=r"task\.start\.pretrained: .*1 of 2 ranks is missing"):
        ShardedWeights(tmp_path / "shards", family(config).tensors(config))
