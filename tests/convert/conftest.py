"""Shards that NxD's own converter wrote (``golden/nxd.tar.xz``), and small random models of every supported family."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.convert.models import CONFIGS, write_model

GOLDEN = Path(__file__).parents[1] / "golden" / "nxd.tar.xz"


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hf_*`` are sources, the other folders their shards; the names hold model, tp, pp, multiplier and form."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    return folder / "nxd"


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """``model(family, **config)`` writes a random model and returns its folder."""

    def make(family: str = "llama", dtype: str = "F32", **changes: Any) -> Path:
        return write_model(tmp_path / "source", {**CONFIGS[family], **changes}, dtype)

    return make
