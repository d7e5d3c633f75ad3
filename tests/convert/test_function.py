"""The function of the shards: logits equal to transformers' for a grid of models and degrees; torch reads the files."""

from __future__ import annotations

import json
import shutil
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import sm_llm
from sm_llm.convert.hf_source import open_hf
from sm_llm.convert.layout import decoder, fitting_degrees, heads_of
from sm_llm.convert.nxd_source import find_shards, open_shards
from sm_llm.convert.simulate import Sharded, Whole, logits, prompt
from sm_llm.errors import ConversionRefused
from tests.convert.models import CONFIGS, write_model
from tests.fixtures.sampling import pick

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration
TOLERANCE = 1e-5
"""Of logits of a few units."""


def reference(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of transformers, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


def of_shards(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits as the ranks compute them from their files."""
    source = open_hf_config(folder)
    shards = open_shards(find_shards(folder), decoder(source).buffers)
    tensor = json.loads((folder / "conversion.json").read_text())["tensor_parallel_degree"]
    return logits(source, Sharded(shards, heads_of(source), tensor), ids)


def open_hf_config(folder: Path) -> dict[str, Any]:
    from sm_llm.convert.hf_source import read_model_config

    return read_model_config(folder)


HEADS = {"8/2": (8, 2), "32/8": (32, 8), "32/4": (32, 4), "6/2": (6, 2), "MHA": (8, 8)}
VALID = {
    "8/2": [1, 2, 4, 8],
    "32/8": [1, 2, 4, 8, 16, 32],
    "32/4": [1, 2, 4, 8, 16, 32],
    "6/2": [1, 2, 6],
    "MHA": [1, 2, 4, 8],
}
"""By hand: T divides Q and the inner width of 96, and T divides K or is a multiple of it."""


@pytest.mark.parametrize("heads", HEADS)
def test_logits_of_the_shards_are_those_of_transformers(heads: str, tmp_path: Path) -> None:
    """Every tp from 1 to 32; forms, layouts, stages, formats and ties take turns. 5 layers, 101 tokens, heads of 8."""
    query, kv = HEADS[heads]
    sizes = {
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "head_dim": 8,
        "num_hidden_layers": 5,
        "hidden_size": 96,
    }
    sources = [
        write_model(tmp_path / dtype, {**CONFIGS["llama"], **sizes, "tie_word_embeddings": dtype == "BF16"}, dtype)
        for dtype in ("F32", "BF16")
    ]
    ids = prompt(101)
    wanted = {it: reference(it, ids) for it in sources}
    forms, stages = cycle(["fused", "linear"]), cycle([(1, 1), (2, 1), (3, 1), (2, 2)])
    for tensor in range(1, 33):
        given = {"to": "nxd", "tensor_parallel_degree": tensor}
        if tensor not in VALID[heads]:
            with pytest.raises(ConversionRefused, match=r"leaves|neither divides"):
                sm_llm.convert(sources[0], tmp_path / "x", **given)
            continue
        for source, layout in zip(sources, ("trn1", "trn2"), strict=True):
            pipeline, virtual = next(stages)
            form = next(forms) if tensor > kv or tensor % 2 else ("coalesced" if query == kv else "split")
            target = tmp_path / f"{source.name}{tensor}"
            given |= {"pipeline_parallel_degree": pipeline, "virtual_pipeline_degree": virtual}
            sm_llm.convert(source, target, **given, qkv=form, layout=layout, xser=tensor % 4 == 2)
            assert np.abs(of_shards(target, ids) - wanted[source]).max() < TOLERANCE, (tensor, given, form, layout)
            sm_llm.convert(target, tmp_path / f"back{target.name}", to="hf")
            back = open_hf(tmp_path / f"back{target.name}")
            assert np.abs(logits(back.config, Whole(back.views), ids) - wanted[source]).max() < TOLERANCE


STAGES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 5)]
"""Stages and virtual stages of five layers: 5; 2, 3; 1, 2, 2; …"""
GRID = list(
    product(("F32", "BF16"), (False, True), ("trn1", "trn2"), STAGES, ("fused", "linear", "split", "coalesced"))
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("heads", HEADS)
def test_CV09_CV13_every_cell_of_the_grid_has_its_function_and_comes_back(heads: str, tmp_path: Path) -> None:
    """The whole product of format, tie, order of heads, stages and form, each at every tp; the vocabulary is odd."""
    query, kv = HEADS[heads]
    sizes = {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": 8}
    sizes |= {"num_hidden_layers": 5, "hidden_size": 96}
    models: dict[tuple[str, bool], tuple[Path, np.ndarray]] = {}
    ids = prompt(101)
    for number, (dtype, tied, layout, (pipeline, virtual), form) in enumerate(pick(GRID, 2)):
        if (dtype, tied) not in models:
            source = write_model(
                tmp_path / f"{dtype}{tied}", {**CONFIGS["llama"], **sizes, "tie_word_embeddings": tied}, dtype
            )
            models[dtype, tied] = source, reference(source, ids)
        source, wanted = models[dtype, tied]
        given: dict[str, Any] = {"pipeline_parallel_degree": pipeline, "virtual_pipeline_degree": virtual}
        given |= {"to": "nxd", "qkv": form, "layout": layout, "xser": number % 3 == 0}
        for tensor in VALID[heads]:
            shards, back = tmp_path / f"{number}-{tensor}", tmp_path / f"{number}-{tensor}-back"
            if (form == "split" and tensor > kv) or (form == "coalesced" and query != kv):
                with pytest.raises(ConversionRefused, match=r"cannot copy|as many query heads"):
                    sm_llm.convert(source, shards, tensor_parallel_degree=tensor, **given)
                continue
            sm_llm.convert(source, shards, tensor_parallel_degree=tensor, **given)
            assert np.abs(of_shards(shards, ids) - wanted).max() < TOLERANCE, (tensor, tied, dtype, given)
            sm_llm.convert(shards, back, to="hf")
            held, found = (open_hf(it).views for it in (source, back))
            assert {name: it.array().tobytes() for name, it in held.items()} == {
                name: it.array().tobytes() for name, it in found.items()
            }
            for folder in (shards, back):
                shutil.rmtree(folder)


@pytest.mark.parametrize("family", [it for it in CONFIGS if it != "llama"])
def test_every_family_has_its_function(family: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", CONFIGS[family])
    ids = prompt(101)
    wanted = reference(source, ids)
    for tensor in fitting_degrees(open_hf_config(source)):
        target = tmp_path / f"{tensor}"
        sm_llm.convert(source, target, to="nxd", tensor_parallel_degree=tensor, pipeline_parallel_degree=2)
        assert np.abs(of_shards(target, ids) - wanted).max() < TOLERANCE
    sm_llm.convert(target, tmp_path / "back", to="hf")
    assert np.array_equal(reference(tmp_path / "back", ids), wanted)


def test_the_layout_that_nxd_writes_for_trn2_is_another_function(tmp_path: Path) -> None:
    """Queries in natural order beside key/value heads in trn1's: the check of logits finds it, a round trip cannot."""
    source = write_model(tmp_path / "source", CONFIGS["llama"])
    ids = prompt(101)
    folders = {}
    for layout in ("trn1", "trn2"):
        folders[layout] = tmp_path / layout
        sm_llm.convert(
            source, folders[layout], to="nxd", tensor_parallel_degree=4, qkv="linear", layout=layout, xser=False
        )
    sources = {it: open_shards(find_shards(folder), "(?!)") for it, folder in folders.items()}
    mixed = {
        rank: {
            name: (sources["trn1"] if "weight_k" in name or "weight_v" in name else sources["trn2"]).views[rank][name]
            for name in views
        }
        for rank, views in sources["trn2"].views.items()
    }
    config = open_hf_config(source)
    shards = type(sources["trn1"])(mixed, sources["trn2"].stages, False)
    found = logits(config, Sharded(shards, heads_of(config), 4), ids)
    assert np.abs(found - reference(source, ids)).max() > 0.01


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    """weights_only, mapped or not; .info.pt and the tensors of xser; a .bin that torch.save wrote as a source."""
    import torch

    source = write_model(tmp_path / "source", CONFIGS["llama"], "BF16")
    given: dict[str, Any] = {"to": "nxd", "tensor_parallel_degree": 2}
    for xser in (False, True):
        sm_llm.convert(source, tmp_path / f"{xser}", **given, xser=xser)
    path = tmp_path / "False" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    state = torch.load(path, weights_only=True)
    mapped = torch.load(path, weights_only=True, mmap=True)
    views = open_shards(find_shards(tmp_path / "False"), "(?!)").views[1, 0]
    assert list(state) == list(mapped) == list(views)
    xser_path = tmp_path / "True" / "model" / path.name
    info = torch.load(f"{xser_path}.info.pt", weights_only=True)
    for tid, (name, it) in enumerate(state.items()):
        assert it.view(torch.int16).numpy().tobytes() == views[name].array().tobytes()
        assert torch.equal(it, mapped[name])
        assert torch.equal(it, torch.load(f"{xser_path}.tensors/tensor_{tid}.pt", weights_only=True))
        assert info[tid] == {"dtype": torch.bfloat16, "shape": it.shape, "expert_model_parallel": False}
    from safetensors.torch import load_file

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((source / "config.json").read_bytes())
    whole = load_file(source / "model.safetensors")
    whole["lm_head.weight"] = torch.nn.Parameter(whole["lm_head.weight"].t().contiguous().t())  # columns in memory
    torch.save(whole, tmp_path / "bin" / "pytorch_model.bin")
    sm_llm.convert(tmp_path / "bin", tmp_path / "of_bin", **given)
    found = [json.loads((tmp_path / it / "conversion.json").read_text()) for it in ("True", "of_bin")]
    assert found[0]["files"] == found[1]["files"]
    torch.save(whole, tmp_path / "bin" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ConversionRefused, match=r"torch before 1\.6 must be saved again"):
        sm_llm.convert(tmp_path / "bin", tmp_path / "no", **given)
