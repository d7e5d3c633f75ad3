"""What a destination holds: a complete conversion that is damaged, and nothing where none could begin."""

from __future__ import annotations

import json
import resource
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.convert import work
from sm_llm.errors import ConversionRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANK = "model/dp_rank_00_tp_rank_01_pp_rank_00.pt"


@pytest.mark.parametrize("to", ["nxd", "nxd info", "nxd inline", "hf"])
def test_a_complete_conversion_that_lost_something_is_not_called_unchanged(
    to: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = model(), tmp_path / "target"
    given: dict[str, Any] = {"to": "nxd", "tensor_parallel_degree": 2, "xser": to != "nxd inline"}
    files = {"nxd": f"{RANK}.tensors/tensor_3.pt", "nxd info": f"{RANK}.info.pt", "nxd inline": RANK}
    if to == "hf":
        sm_llm.convert(source, tmp_path / "shards", **given)
        source, given = tmp_path / "shards", {"to": "hf"}
    sm_llm.convert(source, target, **given)
    assert sm_llm.convert(source, target, **given).is_unchanged
    damaged = target / files.get(to, "model.safetensors")
    for file, name in ((damaged, "model"), (target / "config.json", r"config\.json")):
        whole_file = file.read_bytes()
        # The first is cut off, the second lost.
        if file == damaged:
            file.write_bytes(whole_file[:-100])
        else:
            file.unlink()
        with pytest.raises(
            ConversionRefused, match=rf"holds this conversion, but {name}.*damaged\. Remove this folder"
        ):
            sm_llm.convert(source, target, **given)
        file.write_bytes(whole_file)


@pytest.mark.parametrize("lost", ["files", "digest", "tensors"])
def test_a_manifest_that_lost_a_field_is_named(lost: str, model: Callable[..., Path], tmp_path: Path) -> None:
    source, target = model(), tmp_path / "target"
    given: dict[str, Any] = {"to": "nxd", "tensor_parallel_degree": 2}
    sm_llm.convert(source, target, **given)
    content = json.loads((target / "conversion.json").read_text())
    (target / "conversion.json").write_text(json.dumps({key: it for key, it in content.items() if key != lost}))
    with pytest.raises(ConversionRefused, match=r"holds this conversion, but conversion\.json"):
        sm_llm.convert(source, target, **given, verify=True)


def test_a_destination_whose_journal_cannot_be_opened_is_removed(tmp_path: Path) -> None:
    """Without a free descriptor a folder can be made, and no file in it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"), work.Journal(tmp_path / "new", {}).open():
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not (tmp_path / "new").exists()
