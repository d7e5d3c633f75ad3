"""Bit-equality with the shards that NxD's own converter wrote, in both directions, and the real xser form."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.convert.files.torch_file import Reference, read_torch_file
from sm_llm.convert.files.views import View
from sm_llm.errors import ConversionError
from sm_llm.models.safetensors_folder import read_header

if TYPE_CHECKING:
    from pathlib import Path

FOLDERS = (
    "gqa_tp2_pp2_m1_qkv",
    "gqa_tp4_pp2_m2_fused",
    "gqa_tp4_pp2_m2_qkv",
    "gqa_tp4_pp2_m2_qkv_xser",
    "mha_tp4_pp3_split",
    "tied_tp4_pp2_m1_qkv",
)
FORMS = {"qkv": "linear", "fused": "fused", "split": "split"}


def degrees(name: str) -> dict[str, Any]:
    """What a folder's name holds."""
    tensor, pipeline = (int(it) for it in re.findall(r"_tp(\d+)_pp(\d+)", name)[0])
    form = FORMS[name.removesuffix("_xser").rpartition("_")[2]]
    found = {"tensor_parallel_degree": tensor, "pipeline_parallel_degree": pipeline, "qkv": form}
    if copies := re.search(r"_m(\d+)", name):
        found["kv_size_multiplier"] = int(copies[1])
    return found


def values(view: View) -> tuple[str, tuple[int, ...], bytes]:
    return view.dtype, view.shape, view.array().tobytes()


def bytes_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> format, shape and bytes of a safetensors file."""
    path = folder / "model.safetensors"
    body = path.read_bytes()
    return {name: (it.dtype, it.shape, body[it.begin : it.end]) for name, it in read_header(path).items()}


@pytest.mark.parametrize("name", FOLDERS)
def test_shards_equal_those_of_nxd(name: str, golden: Path, tmp_path: Path) -> None:
    """Files, names in their order, formats, shapes and bytes; for xser the tensor files and their numbers too."""
    source = golden / f"hf_{name.partition('_')[0]}"
    is_xser = name.endswith("_xser")
    sm_llm.convert(source, tmp_path / "own", to="nxd", xser=is_xser, **degrees(name))
    theirs = {path.relative_to(golden / name): path for path in (golden / name).rglob("*.pt") if path.is_file()}
    ours = {path.relative_to(tmp_path / "own") for path in (tmp_path / "own").rglob("*.pt") if path.is_file()}
    assert ours == set(theirs)
    for file, path in theirs.items():
        wanted, found = read_torch_file(path), read_torch_file(tmp_path / "own" / file)
        if isinstance(wanted, View):
            assert values(wanted) == values(found)
            continue
        assert list(wanted) == list(found)
        for key, it in wanted.items():
            assert values(it) == values(found[key]) if isinstance(it, View) else it == found[key]
    assert is_xser == any(isinstance(it, Reference) for it in read_torch_file(path_of_first(theirs)).values())


def path_of_first(files: dict[Path, Path]) -> Path:
    return next(path for file, path in files.items() if file.name == "dp_rank_00_tp_rank_00_pp_rank_00.pt")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_source_comes_back_from_shards_of_nxd(name: str, golden: Path, tmp_path: Path) -> None:
    source = golden / f"hf_{name.partition('_')[0]}"
    report = sm_llm.convert(golden / name, tmp_path / "back", to="hf", config=source, verify=True)
    assert bytes_of(tmp_path / "back") == bytes_of(source)
    reported = degrees(name)
    assert (report.degrees.tensor, report.degrees.pipeline) == (
        reported["tensor_parallel_degree"],
        reported["pipeline_parallel_degree"],
    )
    assert report.degrees.qkv == reported["qkv"]
    assert "differ by" in report.verified["logits"]


def test_xser_without_info_is_read(golden: Path, tmp_path: Path) -> None:
    """As NxD 0.6 and torch_xla itself write it."""
    shutil.copytree(golden / "gqa_tp4_pp2_m2_qkv_xser", tmp_path / "shards")
    for path in (tmp_path / "shards").rglob("*.info.pt"):
        path.unlink()
    sm_llm.convert(tmp_path / "shards", tmp_path / "back", to="hf", config=golden / "hf_gqa")
    assert bytes_of(tmp_path / "back") == bytes_of(golden / "hf_gqa")
    next((tmp_path / "shards").rglob("tensor_7.pt")).unlink()
    with pytest.raises(ConversionError, match=r"tensor_7\.pt: is missing, and it is model\.layers\.\d\..* of its rank"):
        sm_llm.convert(tmp_path / "shards", tmp_path / "other", to="hf", config=golden / "hf_gqa")


def test_shards_read_in_the_wrong_order_of_heads_are_refused(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"copies of the same part.*--layout trn1"):
        sm_llm.convert(
            golden / "gqa_tp4_pp2_m2_qkv", tmp_path / "back", to="hf", config=golden / "hf_gqa", layout="trn2"
        )
    assert not (tmp_path / "back").exists()
