"""Shards of neuronx-distributed as a source of weights: any slice, for any degrees, checked against the model."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sm_llm.convert.api import convert
from sm_llm.errors import CheckpointError
from sm_llm.models.config import read_config
from sm_llm.models.families.table import family
from sm_llm.models.weights_check import holds_shards
from sm_llm.worker.checkpoint.start_resolver import StartResolver
from sm_llm.worker.process_info import ProcessInfo
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


def test_a_rank_of_another_checkpoint_is_refused_where_ranks_hold_copies(tmp_path: Path) -> None:
    """Each rank has the norms; its other slices fit whatever they hold."""
    model = write_model(tmp_path / "model", CONFIGS["llama"])
    other = write_model(tmp_path / "other", CONFIGS["llama"]) / "model.safetensors"
    save_file({name: 2 * it for name, it in load_file(other).items()}, other)
    for name in ("model", "other"):
        convert(tmp_path / name, tmp_path / f"{name}-nxd", to="nxd", tensor_parallel_degree=2, xser=False)
    rank = "model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
    tensors = family(config := read_config(model, where="model")).tensors(config)
    digests = [digest_of(tmp_path / "model-nxd")]
    shutil.copy(tmp_path / "other-nxd" / rank, tmp_path / "model-nxd" / rank)
    with pytest.raises(CheckpointError, match=r"task\.start\.pretrained: .* must be copies of the same part"):
        ShardedWeights(tmp_path / "model-nxd", tensors)
    # One process per node compares them.
    ShardedWeights(tmp_path / "model-nxd", tensors, compares_copies=False)
    digests.append(digest_of(tmp_path / "model-nxd"))
    assert len(set(digests)) == 2, "nodes whose shards differ do not start"


def digest_of(folder: Path) -> str:
    """The digest that all nodes must have of what they start from."""
    context: Any = SimpleNamespace(process=ProcessInfo())
    control: Any = SimpleNamespace(gather=lambda value: [value])
    nothing: Any = None
    return StartResolver(context, nothing, nothing, control, nothing)._digest(folder)


def test_the_order_of_heads_that_is_assumed_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", CONFIGS["llama"])
    convert(model, tmp_path / "shards", to="nxd", tensor_parallel_degree=4)
    tensors = family(config := read_config(model, where="model")).tensors(config)
    assert ShardedWeights(tmp_path / "shards", tensors).notes == []
    (tmp_path / "shards" / "conversion.json").unlink()
    [note] = ShardedWeights(tmp_path / "shards", tensors).notes
    assert note.startswith("layout trn1 is assumed")
