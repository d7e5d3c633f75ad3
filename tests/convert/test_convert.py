"""Whole conversions of small models: public fault reports by their ids, interruption, several workers, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import sm_llm
from sm_llm.convert import work
from sm_llm.convert.files.torch_file import read_torch_file
from sm_llm.convert.files.torch_writer import TorchFile, state_pickle
from sm_llm.convert.files.views import chunks, whole
from sm_llm.convert.hf_source import clean_names
from sm_llm.convert.nxd_source import find_shards, open_shards
from sm_llm.errors import ConversionError, ConversionRefused
from sm_llm.models.safetensors_folder import stored_tensors
from tests.convert.models import CONFIGS, write_model, write_safetensors
from tests.fixtures.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def contents(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Tensor -> format, shape and bytes of a Hugging Face folder."""
    stored, faults = stored_tensors(folder)
    assert not faults
    return {name: (it.dtype, it.shape, it.file.read_bytes()[it.begin : it.end]) for name, it in sorted(stored.items())}


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "conversion.json").read_text())
    return found


def to_nxd(source: Path, folder: Path, tensor: int, **given: Any) -> Path:
    sm_llm.convert(source, folder, to="nxd", tensor_parallel_degree=tensor, **given)
    return folder


def shard(folder: Path, tensor: int, pipeline: int = 0) -> Path:
    return folder / "model" / f"dp_rank_00_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def change(path: Path, name: str) -> None:
    """Change a bit of one tensor in a shard."""
    with path.open("r+b") as file:
        file.seek(read_torch_file(path)[name].offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_CV01_CV07_the_folder_is_complete(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    shards = to_nxd(source, tmp_path / "shards", 2, pipeline_parallel_degree=2)
    sm_llm.convert(shards, tmp_path / "back", to="hf")
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*names, "conversion.json"}
    for name in names - {"model.safetensors"}:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert contents(tmp_path / "back") == contents(source)


def test_CV03_ranks_are_ordered_by_number_and_missing_ones_named(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(num_attention_heads=12, num_key_value_heads=12, head_dim=8)
    shards = to_nxd(source, tmp_path / "shards", 12)
    sm_llm.convert(shards, tmp_path / "back", to="hf")
    assert contents(tmp_path / "back") == contents(source)
    shard(shards, 3).unlink()
    with pytest.raises(ConversionRefused, match=r"1 of 12 ranks is missing: tp 3 pp 0"):
        sm_llm.convert(shards, tmp_path / "again", to="hf")


def test_the_last_ranks_missing_without_a_manifest(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden / "mha_tp4_pp3_split", tmp_path / "shards")
    for tensor in (2, 3):
        for pipeline in range(3):
            shard(tmp_path / "shards", tensor, pipeline).unlink()
    with pytest.raises(ConversionRefused, match=r"it is 1/4 of the whole, so these may be files of tp 4"):
        sm_llm.convert(tmp_path / "shards", tmp_path / "back", to="hf", config=golden / "hf_mha")
    with pytest.raises(ConversionRefused, match=r"6 of 12 ranks are missing: tp 2 pp 0"):
        sm_llm.convert(
            tmp_path / "shards", tmp_path / "back", to="hf", config=golden / "hf_mha", tensor_parallel_degree=4
        )


@pytest.mark.parametrize("pipeline", [1, 2])
def test_CV05_SF03_a_tied_head_is_stored_and_rolled_back(
    pipeline: int, model: Callable[..., Path], tmp_path: Path
) -> None:
    source = model(tie_word_embeddings=True)
    shards = to_nxd(source, tmp_path / "shards", 2, pipeline_parallel_degree=pipeline, xser=False)
    held = read_torch_file(shard(shards, 1, pipeline - 1))
    table = read_torch_file(shard(shards, 1, 0))["model.embed_tokens.weight"]
    assert held["lm_head.weight"].array().tobytes() == table.array().tobytes()
    sm_llm.convert(shards, tmp_path / "back", to="hf", verify=True)
    assert contents(tmp_path / "back") == contents(source)
    change(shard(shards, 1, pipeline - 1), "lm_head.weight")
    with pytest.raises(ConversionError, match=r"lm_head\.weight.* differ\. Set tie_word_embeddings: false"):
        sm_llm.convert(shards, tmp_path / "other", to="hf")


def test_CV10_CV12_two_round_trips_of_a_padded_vocabulary(model: Callable[..., Path], tmp_path: Path) -> None:
    source = wanted = model(vocab_size=1001)
    for trip in range(2):
        shards = tmp_path / f"shards{trip}"
        report = sm_llm.convert(source, shards, to="nxd", tensor_parallel_degree=4)
        assert (report.vocabulary, report.padded_vocabulary) == (1001, 1004)
        assert any("1001 rows padded with zero rows to 1004" in line for line in report.lines())
        source = tmp_path / f"back{trip}"
        report = sm_llm.convert(shards, source, to="hf")
        assert any("1001 rows trimmed from 1004" in line for line in report.lines())
    assert contents(source) == contents(wanted)


@pytest.mark.parametrize("xser", [True, False])
def test_ranks_of_padding_alone_have_the_number_format_of_their_tensor(
    xser: bool, model: Callable[..., Path], tmp_path: Path
) -> None:
    """9 rows over 8 ranks: those from the fifth on hold zeros only. The head is fp32, everything else bf16."""
    source = model(dtype="BF16", vocab_size=9)
    held = contents(source)
    _, shape, body = held["lm_head.weight"]
    held["lm_head.weight"] = ("F32", shape, (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).tobytes())
    write_safetensors(source / "model.safetensors", held)
    shards = to_nxd(source, tmp_path / "shards", 8, xser=xser)
    views = open_shards(find_shards(shards), "(?!)").views
    for name, dtype in (("lm_head.weight", "F32"), ("model.embed_tokens.weight", "BF16")):
        assert {views[rank, 0][name].dtype for rank in range(8)} == {dtype}
    sm_llm.convert(shards, tmp_path / "back", to="hf")
    assert contents(tmp_path / "back") == contents(source)


def test_CV13_copies_that_differ_are_refused(model: Callable[..., Path], tmp_path: Path) -> None:
    shards = to_nxd(model(), tmp_path / "shards", 4, xser=False)
    assert not list(sm_llm.convert(shards, tmp_path / "same", to="hf").notes)
    change(shard(shards, 2), "model.layers.1.self_attn.qkv_proj.weight_qkv")
    # The bit is of a query, which nobody else holds: only the record of the source shows it.
    [note] = sm_llm.convert(shards, tmp_path / "back", to="hf").notes
    assert note.startswith("warning: 1 of ")
    assert "(model.layers.1.self_attn.q_proj.weight)" in note
    path = shard(shards, 2)
    change(path, "model.norm.weight")
    with pytest.raises(ConversionError, match=r"model\.norm\.weight of tp rank 0 and .* of tp rank 2 must be copies"):
        sm_llm.convert(shards, tmp_path / "other", to="hf")


def test_stages_of_two_checkpoints_in_one_folder_are_refused(model: Callable[..., Path], tmp_path: Path) -> None:
    """The last stage of a checkpoint of two in the folder of one of one stage: the same layer lies in both."""
    source = model()
    one, two = (to_nxd(source, tmp_path / f"pp{pp}", 2, pipeline_parallel_degree=pp) for pp in (1, 2))
    for path in (two / "model").glob("*pp_rank_01*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, one / "model" / path.name)
    (one / "conversion.json").unlink()
    with pytest.raises(ConversionRefused, match=r"lies in pp ranks 0 and 1: files of two checkpoints are mixed"):
        sm_llm.convert(one, tmp_path / "back", to="hf", config=source / "config.json")


def test_CV14_words_of_wrappers_are_left_out_and_collisions_refused() -> None:
    names = [
        "_orig_mod.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight",
        "module.model.norm.weight",
    ]
    found, faults = clean_names({name: name for name in names}, "SRC")
    assert list(found) == ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    assert not faults
    _, faults = clean_names({"a": 1, "_orig_mod.a": 2}, "SRC")
    assert "a and _orig_mod.a are the same tensor" in str(faults[0])


def test_CV16_the_index_counts_and_not_the_names_of_files(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole", CONFIGS["llama"])
    parts = write_model(tmp_path / "parts", CONFIGS["llama"], files=3)
    for source in (whole, parts):
        to_nxd(source, tmp_path / f"shards_{source.name}", 2)
    found = [manifest(tmp_path / f"shards_{it}") for it in ("whole", "parts")]
    assert found[0]["tensors"] == found[1]["tensors"]
    assert found[0]["files"] == found[1]["files"]


def test_CV17_other_architectures_are_refused_first(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    shards = to_nxd(source, tmp_path / "shards", 2)
    other = tmp_path / "config.json"
    other.write_text(json.dumps({"model_type": "gpt_neox"}))
    with pytest.raises(ConversionRefused, match=r"model_type.*no layout.*'gpt_neox'.*llama, mistral, qwen2, qwen3"):
        sm_llm.convert(shards, tmp_path / "back", to="hf", config=other)
    shutil.copy(other, source)
    with pytest.raises(ConversionRefused, match="gpt_neox"):
        to_nxd(source, tmp_path / "other", 2)
    (tmp_path / "mistral").mkdir()
    config = json.loads((shards / "config.json").read_text()) | {"model_type": "mistral", "architectures": None}
    other.write_text(json.dumps(config))
    with pytest.raises(ConversionRefused, match=r"was written for a llama model, the config is of mistral"):
        sm_llm.convert(shards, tmp_path / "back", to="hf", config=other)


def test_CV20_missing_and_unknown_tensors_are_named(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    shards = to_nxd(source, tmp_path / "shards", 1, xser=False)
    path = shard(shards, 0)
    views = read_torch_file(path)
    missing = views.pop("model.layers.1.mlp.down_proj.weight")
    write_views(path, {**views, "model.layers.1.mlp.other.weight": missing})
    with pytest.raises(ConversionRefused) as found:
        sm_llm.convert(shards, tmp_path / "back", to="hf")
    assert "lacks model.layers.1.mlp.down_proj.weight" in str(found.value)
    assert "holds model.layers.1.mlp.other.weight" in str(found.value)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConversionRefused, match=r"SRC: .*lacks model\.layers\.2.*3 layers, the weights have 2"):
        to_nxd(source, tmp_path / "other", 1)


def write_views(path: Path, views: dict[str, Any]) -> None:
    """Write a file of torch from tensors in another one, or in itself."""
    from sm_llm.convert.files.torch_writer import Plain

    fresh = path.with_name("fresh")
    plain = {name: Plain(it.dtype, it.shape) for name, it in views.items()}
    file = TorchFile(fresh, path.stem, state_pickle(list(plain.items())))
    for key, (name, it) in enumerate(views.items()):
        file.tensor(key, plain[name].size, chunks([whole(it)], 0), lambda _: None)
    file.close()
    fresh.replace(path)


def test_SF01_no_xser_is_a_switch(model: Callable[..., Path], tmp_path: Path) -> None:
    done = command("convert", str(model()), str(tmp_path / "a"), "--to", "nxd", "--tp", "2", "--no-xser", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["xser"] is False
    assert {it.suffix for it in (tmp_path / "a" / "model").iterdir()} == {".pt"}
    assert not list((tmp_path / "a" / "model").glob("*.tensors"))


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sm_llm.cli", *argv], capture_output=True, text=True, timeout=300)


def test_SF02_explicit_head_sizes(model: Callable[..., Path], tmp_path: Path) -> None:
    """Heads of 32 channels in a model 64 wide: NxD's converter takes 64 / 8."""
    source = model(head_dim=32)
    shards = to_nxd(source, tmp_path / "shards", 4, verify=True)
    sm_llm.convert(shards, tmp_path / "back", to="hf")
    assert contents(tmp_path / "back") == contents(source)


def test_SF04_folders_of_several_namings_are_ambiguous(model: Callable[..., Path], tmp_path: Path) -> None:
    shards = to_nxd(model(), tmp_path / "shards", 2, xser=False)
    old = shards / "model" / "tp_rank_00_pp_rank_00"
    old.mkdir()
    shutil.copy(shard(shards, 0), old / "checkpoint.pt")
    with pytest.raises(ConversionRefused, match=r"shards of several namings: dp_rank_DD.*\(2 files\); tp_rank_TT"):
        sm_llm.convert(shards, tmp_path / "back", to="hf")


@pytest.mark.parametrize(
    "naming", ["tp_rank_{:02d}_pp_rank_00/checkpoint.pt", "dp_rank_00_ep_rank_00_tp_rank_{:02d}_pp_rank_00.pt"]
)
def test_every_naming_of_nxd_is_read(naming: str, model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    shards = to_nxd(source, tmp_path / "shards", 2, xser=False)
    for tensor in range(2):
        target = tmp_path / "other" / "model" / naming.format(tensor)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(shard(shards, tensor), target)
    sm_llm.convert(tmp_path / "other", tmp_path / "back", to="hf", config=source)
    assert contents(tmp_path / "back") == contents(source)


def test_SF08_a_checkpoint_without_done_is_incomplete(model: Callable[..., Path], tmp_path: Path) -> None:
    tag = to_nxd(model(), tmp_path / "checkpoints" / "step_20", 2)
    shutil.copytree(tag, tag.with_name("step_3"))
    (tag / "checkpoint").write_text("1")
    with pytest.raises(ConversionRefused, match=r"incomplete checkpoint: it has the marker checkpoint and no done"):
        sm_llm.convert(tag, tmp_path / "back", to="hf")
    for it in (tag, tag.with_name("step_3")):
        (it / "done").write_text("1")
    with pytest.raises(ConversionRefused, match=r"2 checkpoints: step_20, step_3; the latest complete one is step_20"):
        sm_llm.convert(tag.parent, tmp_path / "back", to="hf")
    sm_llm.convert(tag, tmp_path / "back", to="hf")


@pytest.mark.parametrize("xser", [True, False])
def test_several_workers_write_what_one_does(xser: bool, model: Callable[..., Path], tmp_path: Path) -> None:
    source = model("llama_biases", "BF16")
    found = []
    for workers in (1, 8):
        shards = to_nxd(source, tmp_path / f"{workers}", 4, pipeline_parallel_degree=2, workers=workers, xser=xser)
        found.append({k: v for k, v in manifest(shards).items() if k in ("tensors", "files", "digest")})
        files = {it.relative_to(shards): it.read_bytes() for it in (shards / "model").rglob("*.pt") if it.is_file()}
        found[-1]["bytes"] = {str(name): body for name, body in files.items()}
    assert found[0] == found[1]


KILLED = """
import os, signal, sys, sm_llm
def progress(done, total):
    if done > total * 0.9:
        os.kill(os.getpid(), signal.SIGKILL)
sm_llm.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], tensor_parallel_degree=int(sys.argv[4]) or None, workers=2,
               progress=progress)
"""


@pytest.mark.parametrize("to", ["nxd", "hf"])
def test_a_killed_conversion_is_continued(
    to: str, model: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    source = model(num_hidden_layers=4)
    if to == "hf":
        source = to_nxd(source, tmp_path / "shards", 4)
    given = {"to": to, "tensor_parallel_degree": 4 if to == "nxd" else None}
    sm_llm.convert(source, tmp_path / "whole", **given)
    argv = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "killed"), to, str(4 if to == "nxd" else 0)]
    done = subprocess.run(argv, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "conversion.json").exists()
    report = sm_llm.convert(source, tmp_path / "killed", **given, verify=True)
    assert report.reused > 0 or to == "hf"
    assert manifest(tmp_path / "killed") == manifest(tmp_path / "whole")
    wanted, found = (
        {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}
        for folder in (tmp_path / "whole", tmp_path / "killed")
    )
    assert found == wanted
    assert sm_llm.convert(source, tmp_path / "killed", **given).is_unchanged


def test_an_unfinished_conversion_of_other_settings_is_kept(model: Callable[..., Path], tmp_path: Path) -> None:
    source, target = model(), tmp_path / "shards"
    argv = [sys.executable, "-c", KILLED, str(source), str(target), "nxd", "4"]
    assert subprocess.run(argv, timeout=300).returncode == -signal.SIGKILL
    with pytest.raises(ConversionRefused, match=r"holds an unfinished conversion of other weights or with other"):
        to_nxd(source, target, 2)
    to_nxd(source, target, 4)


def test_a_destination_is_never_overwritten(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(ConversionRefused, match=r"DST: .*full is not empty \(thesis\.txt\)"):
        to_nxd(source, tmp_path / "full", 2)
    shards = to_nxd(source, tmp_path / "shards", 2)
    with pytest.raises(ConversionRefused, match="is not empty"):
        to_nxd(source, shards, 4)


def test_one_process_at_a_time(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    refused = []

    def progress(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(ConversionRefused) as found:
                to_nxd(source, tmp_path / "shards", 2)
            refused.append(str(found.value))

    to_nxd(source, tmp_path / "shards", 2, workers=1, progress=progress)
    assert "is being written by another process" in refused[0]


def test_the_disk_is_checked_first(model: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(work.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 10**5, 10**5))
    with pytest.raises(ConversionRefused, match=r"no space: .* 0\.00 GiB free"):
        to_nxd(model(), tmp_path / "shards", 2)
    assert not (tmp_path / "shards").exists()


def test_verify_finds_what_changed_on_the_disk(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    shards = to_nxd(source, tmp_path / "shards", 2, xser=False, verify=True)
    change(shard(shards, 1), "model.layers.0.self_attn.o_proj.weight")
    with pytest.raises(ConversionError, match=r"1 tensor differs from the source.*layers\.0\.self_attn\.o_proj"):
        to_nxd(source, shards, 2, xser=False, verify=True)


def test_pickled_weights_are_read_like_safetensors(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model(dtype="BF16")
    to_nxd(source, tmp_path / "one", 2)
    views = open_shards(find_shards(to_nxd(source, tmp_path / "whole", 1, qkv="split")), "(?!)").views[0, 0]
    (tmp_path / "bin").mkdir()
    shutil.copy(source / "config.json", tmp_path / "bin")
    names = [it for it in views if "gate_up" not in it]
    halves = {}
    for name in set(views) - set(names):
        view, rows = views[name], views[name].shape[0] // 2
        for index, part in enumerate(("gate_proj", "up_proj")):
            offset = view.offset + index * rows * view.shape[1] * 2
            halves[name.replace("gate_up_proj", part)] = type(view)(view.file, "BF16", (rows, 64), (64, 1), offset)
    held = {f"module.{it}": views[it] for it in names} | halves
    write_views(tmp_path / "bin" / "pytorch_model.bin", held)
    to_nxd(tmp_path / "bin", tmp_path / "two", 2)
    files = {name: f"pytorch_model-{number % 2 + 1:05d}-of-00002.bin" for number, name in enumerate(held)}
    (tmp_path / "bins").mkdir()
    shutil.copy(source / "config.json", tmp_path / "bins")
    (tmp_path / "bins" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        write_views(tmp_path / "bins" / file, {it: view for it, view in held.items() if files[it] == file})
    to_nxd(tmp_path / "bins", tmp_path / "three", 2)
    one, two, three = (manifest(tmp_path / it)["files"] for it in ("one", "two", "three"))
    assert one == two == three
    (tmp_path / "bins" / file).unlink()
    with pytest.raises(ConversionRefused, match=rf"names files that are missing: {file}"):
        to_nxd(tmp_path / "bins", tmp_path / "four", 2)


def test_verify_finds_a_bit_of_padding_and_of_a_copy(model: Callable[..., Path], tmp_path: Path) -> None:
    """No source has these bits; a padded row takes part in the softmax."""
    source = model(vocab_size=1001)
    padded = to_nxd(source, tmp_path / "padded", 4, xser=False)
    path = shard(padded, 3)
    held = read_torch_file(path)["lm_head.weight"]
    with path.open("r+b") as file:
        file.seek(held.offset + held.size - 1)
        file.write(b"\x40")
    with pytest.raises(
        ConversionError, match=r"1 tensor differs .*lm_head\.weight in model/.*tp_rank_03.*Convert again"
    ):
        to_nxd(source, padded, 4, xser=False, verify=True)
    copied = to_nxd(source, tmp_path / "copied", 4, xser=False)
    change(shard(copied, 1), "model.norm.weight")
    with pytest.raises(ConversionError, match=r"model\.norm\.weight.*they differ\. Convert again"):
        to_nxd(source, copied, 4, xser=False, verify=True)


def test_ranks_that_were_exchanged_are_damage_where_a_manifest_knows_the_order(
    model: Callable[..., Path], tmp_path: Path
) -> None:
    shards = to_nxd(model(), tmp_path / "shards", 4, xser=False)
    bodies = [shard(shards, rank).read_bytes() for rank in (1, 2)]
    for rank, body in zip((2, 1), bodies, strict=True):
        shard(shards, rank).write_bytes(body)
    with pytest.raises(ConversionError, match=r"must be copies .*Copy the checkpoint again"):
        sm_llm.convert(shards, tmp_path / "back", to="hf")


def test_ranks_of_two_checkpoints_are_not_joined(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    shards = to_nxd(source, tmp_path / "shards", 4, xser=False)
    other = to_nxd(source, tmp_path / "two", 2, xser=False)
    whole_file = shard(shards, 1).read_bytes()
    shutil.copy(shard(other, 1), shard(shards, 1))
    with pytest.raises(ConversionRefused, match=r"embed_tokens.* of tp rank 1 has shape \[51, 64\]"):
        sm_llm.convert(shards, tmp_path / "back", to="hf")
    xser = to_nxd(source, tmp_path / "xser", 4)
    shard(xser, 1).write_bytes(whole_file)
    with pytest.raises(ConversionRefused, match="two checkpoints are mixed"):
        sm_llm.convert(xser, tmp_path / "back", to="hf")
    shard(xser, 1).unlink()
    to_nxd(source, tmp_path / "again", 4)
    folder = tmp_path / "again" / "model" / f"{shard(xser, 1).name}.tensors"
    shutil.copy(folder / "tensor_4.pt", folder / "tensor_3.pt")
    with pytest.raises(ConversionRefused, match=r"has shape \[64\], the config makes it \[64, 24\] with tp 4\. Give"):
        sm_llm.convert(tmp_path / "again", tmp_path / "back", to="hf")


@pytest.mark.parametrize("moment", sample([0.02, 0.1, 0.3, 0.5, 0.7, 0.95], 1))
def test_a_conversion_that_was_killed_continues_only_as_itself(
    moment: float, model: Callable[..., Path], tmp_path: Path
) -> None:
    """Other options, and a source that was changed in between, are refused; what is there stays as it is."""
    source, target = model(num_hidden_layers=4), tmp_path / "killed"
    given: dict[str, Any] = {"pipeline_parallel_degree": 2, "qkv": "linear", "xser": False}
    to_nxd(source, tmp_path / "whole", 4, **given)
    code = KILLED.replace("0.9", str(moment)).replace("workers=2", f"workers=2, **{given!r}")
    assert subprocess.run([sys.executable, "-c", code, *map(str, (source, target, "nxd", 4))]).returncode == -9
    weights = source / "model.safetensors"
    for changed in ({"qkv": "fused"}, {"layout": "trn2"}, {"xser": True}, {"pipeline_parallel_degree": 1}):
        with pytest.raises(ConversionRefused, match="unfinished conversion of other weights or with other settings"):
            to_nxd(source, target, 4, **{**given, **changed})
    body, dates = weights.read_bytes(), weights.stat()
    weights.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(ConversionRefused, match="unfinished conversion of other weights or with other settings"):
        to_nxd(source, target, 4, **given)
    weights.write_bytes(body)
    os.utime(weights, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    to_nxd(source, target, 4, **given, workers=1, verify=True)
    wanted, found = (
        {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}
        for folder in (tmp_path / "whole", target)
    )
    assert found == wanted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"source": "hf://org/name"}, r"SRC: must be a folder here or in S3.*Copy it first: sm-llm fetch hf://org/name"),
    ({"scratch": "/tmp"}, r"scratch \(--scratch\): has no effect"),
    ({"source": "hf://org/name"}, r"Copy it first: sm-llm fetch hf://org/name"),
    ({"destination": "hf://org/x"}, r"DST: must be a folder here or in S3"),
    ({"source": "nowhere"}, r"SRC: must be a folder \(got 'nowhere'\)"),
    ({"to": "onnx"}, r"must be nxd or hf"),
    ({"workers": 0}, r"must be a whole number from 1 to 64"),
    ({"workers": "4"}, r"must be a whole number from 1 to 64 \(got '4'\)"),
    ({"workers": 1.5}, r"must be a whole number from 1 to 64"),
    ({"tensor_parallel_degree": None}, r"tensor_parallel_degree \(--tp\): is required"),
    ({"config": "x"}, r"config \(--config\): has no effect with --to nxd"),
    ({"to": "hf"}, r"holds no shards"),
    ({"xser": "no"}, r"xser \(--xser\): must be True or False \(got 'no'\)"),
    ({"verify": 1}, r"verify \(--verify\): must be True or False \(got 1\)"),
    ({"to": "hf", "xser": True}, r"has no effect with --to hf"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], message: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    given = {"source": model(), "destination": tmp_path / "x", "to": "nxd", "tensor_parallel_degree": 2, **changes}
    with pytest.raises(ConversionRefused, match=message):
        sm_llm.convert(given.pop("source"), given.pop("destination"), **given)
    assert not (tmp_path / "x").exists()


def test_options_must_agree_with_the_manifest(model: Callable[..., Path], tmp_path: Path) -> None:
    shards = to_nxd(model(), tmp_path / "shards", 4, qkv="linear")
    for given in ({"tensor_parallel_degree": 2}, {"qkv": "fused"}, {"layout": "trn2"}, {"kv_size_multiplier": 1}):
        with pytest.raises(ConversionRefused, match=r"contradicts .*conversion\.json, which has"):
            sm_llm.convert(shards, tmp_path / "back", to="hf", **given)


def test_the_command_line_refuses_with_code_2_and_reports(model: Callable[..., Path], tmp_path: Path) -> None:
    source = str(model())
    done = command("convert", source, str(tmp_path / "x"), "--to", "nxd", "--tp", "3")
    assert done.returncode == 2
    assert "Use one of 1, 2, 4, 8" in done.stderr
    done = command("convert", source, str(tmp_path / "x"), "--to", "nxd", "--tp", "4", "--layout", "trn2", "--verify")
    assert done.returncode == 0, done.stderr
    for words in (
        "kv multiplier 2",
        "layout trn2",
        "none missing, none extra",
        "joined again equal the source",
        "wrote 4 files",
    ):
        assert words in done.stdout


def test_a_file_that_lost_its_bytes_is_written_again(model: Callable[..., Path], tmp_path: Path) -> None:
    """After a crash of the machine the name and size of a file may be there, and zeros in place of its content."""
    source, target = model(), tmp_path / "shards"
    argv = [sys.executable, "-c", KILLED, str(source), str(target), "nxd", "4"]
    assert subprocess.run(argv, timeout=300).returncode == -signal.SIGKILL
    entries = [json.loads(it) for it in (target / ".conversion.jsonl").read_text().splitlines()]
    done = [it["unit"] for it in entries if it.get("unit", "").startswith("model/")]
    assert done
    changed, *others = done
    tensor = target / f"{changed}.tensors" / "tensor_5.pt"
    with tensor.open("r+b") as file:
        file.seek(read_torch_file(tensor).offset)
        file.write(b"\xff")
    if others:
        lost = target / f"{others[0]}.tensors" / "tensor_6.pt"
        lost.write_bytes(bytes(lost.stat().st_size))
    report = sm_llm.convert(source, target, to="nxd", tensor_parallel_degree=4, verify=True)
    assert report.reused == len(done) - len([changed, *others[:1]])


def test_a_file_in_the_way_is_named(model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConversionError, match=r"file/shards.*Check the permissions"):
        to_nxd(model(), tmp_path / "file" / "shards", 2)


def test_a_link_to_nothing_is_no_destination(model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConversionRefused, match="DST: must be a folder"):
        to_nxd(model(), tmp_path / "link", 2)


def test_a_folder_without_weights_is_named(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model()
    (source / "model.safetensors").rename(source / "consolidated.00.pth")
    with pytest.raises(ConversionRefused, match=r"no weights of a Hugging Face model .*consolidated.*_model\.bin"):
        to_nxd(source, tmp_path / "shards", 2)
