"""Checkpoints of torch.distributed.checkpoint to a Hugging Face folder: of a real run of two processes, and hostile."""

from __future__ import annotations

import json
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.convert import dcp_source
from sm_llm.convert.dcp_source import METADATA
from sm_llm.errors import ConversionError, ConversionRefused
from sm_llm.models.config import normalise
from sm_llm.models.families.table import family
from tests.convert.test_golden import bytes_of
from tests.golden.previous_run import unpack

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of a checkpoint that two processes saved, and the config of its model."""
    unpack(tmp_path / "runs")
    commit = json.loads(next((tmp_path / "runs").glob("*/ckpt/commits/step-00000010.json")).read_text())
    prefix = "task.model.config."
    model = commit["meta"]["identity"]["model"]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({name.removeprefix(prefix): it for name, it in model.items() if name.startswith(prefix)})
    )
    return next((tmp_path / "runs").glob("*/ckpt/step-00000010/*/data")), config


def test_a_checkpoint_of_two_processes_becomes_one_folder(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    folder, config = checkpoint
    report = sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config, verify=True)
    wanted = family(normalise(json.loads(config.read_text()))).tensors(normalise(json.loads(config.read_text())))
    found = bytes_of(tmp_path / "hf")
    assert {name: shape for name, (_, shape, _) in found.items()} == {name: it.shape for name, it in wanted.items()}
    assert len({body for _, shape, body in found.values() if len(shape) == 2}) == sum(
        len(it.shape) == 2 for it in wanted.values()
    )
    assert any("a distributed checkpoint of torch" in line for line in report.lines())
    assert report.verified == {"checksums": f"{len(wanted)} tensors equal the joined shards"}


@pytest.mark.integration
def test_the_values_are_those_that_torch_reads(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import FileSystemReader, load

    folder, config = checkpoint
    sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = {f"model.{name}": torch.zeros_like(it) for name, it in found.items()}
    load(wanted, storage_reader=FileSystemReader(folder), no_dist=True)
    for name, it in found.items():
        assert torch.equal(it, wanted[f"model.{name}"])


def test_options_of_shards_and_another_config_are_refused(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    folder, config = checkpoint
    with pytest.raises(ConversionRefused, match=r"--tp\): has no effect"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config, tensor_parallel_degree=2)
    with pytest.raises(ConversionRefused, match=r"has no config\.json.*--config"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf")
    changed = json.loads(config.read_text())
    config.write_text(json.dumps({**changed, "num_hidden_layers": 2}))
    with pytest.raises(ConversionRefused, match=r"lacks model\.layers\.1\.self_attn\.q_proj\.weight.* and \d+ more"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config)
    config.write_text(json.dumps({**changed, "hidden_size": 32}))
    with pytest.raises(ConversionRefused, match=r"embed_tokens\.weight has shape \[\d+, 16\], the config makes it"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config)


class Calls:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize("body", [pickle.dumps(Calls()), b"", b"\x80\x02ctorch\nload\n."])
def test_metadata_that_is_none_runs_nothing(
    body: bytes, checkpoint: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    folder, config = checkpoint
    (folder / METADATA).chmod(0o644)
    (folder / METADATA).write_bytes(body)
    with pytest.raises(ConversionError, match="is not the metadata of a checkpoint"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config)
    assert capsys.readouterr().out == ""


def test_places_outside_of_the_checkpoint_are_refused(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    folder, config = checkpoint
    body = (folder / METADATA).read_bytes()
    (folder / METADATA).chmod(0o644)
    (folder / METADATA).write_bytes(body.replace(b"__1_0.distcp", b"../../x.dcp1"))
    with pytest.raises(ConversionError, match=r"lies in '\.\./\.\./x\.dcp1', expected a file beside it"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config)


def test_a_damaged_or_missing_file_is_named(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    folder, config = checkpoint
    path = folder / "__1_0.distcp"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ConversionError, match=r"__1_0\.distcp: cannot be read as tensors"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config)
    shutil.rmtree(tmp_path / "hf", ignore_errors=True)
    path.unlink()
    with pytest.raises(ConversionError, match=r"names files that are missing: __1_0\.distcp"):
        sm_llm.convert(folder, tmp_path / "hf", to="hf", config=config)


@pytest.mark.parametrize(
    ("blocks", "rows"),
    [
        ([((0, 0), (2, 3)), ((0, 3), (2, 1)), ((2, 0), (2, 4))], [2, 1]),
        ([((2, 0), (2, 4)), ((0, 0), (2, 4))], [1, 1]),
        ([((0, 0), (4, 4)), ((4, 0), (0, 4))], [1]),
        ([((0, 0), (2, 4))], None),
        ([((0, 0), (2, 3)), ((2, 0), (2, 4))], None),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], None),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], None),
    ],
)
def test_chunks_are_rows_of_blocks_or_refused(blocks: list[Any], rows: list[int] | None, tmp_path: Path) -> None:
    """What FSDP (rows), tensor parallelism (columns) and both together write of a 4 x 4 matrix."""
    chunks = tuple(dcp_source._Chunk(offsets, sizes, tmp_path, 0, 0) for offsets, sizes in blocks)
    found = dcp_source._rows(dcp_source._Entry("F32", (4, 4), chunks))
    assert (None if found is None else [len(it) for it in found]) == rows
