"""CRC64NVME."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from sm_llm.storage import checksum
from sm_llm.storage.checksum import CHUNK_BYTES, Crc64, crc64_bytes, crc64_file

if TYPE_CHECKING:
    from pathlib import Path


def test_the_published_check_value() -> None:
    # CRC-64/NVME in the catalogue of parametrised CRC algorithms: check("123456789").
    assert crc64_bytes(b"123456789") == "ae8b14860a799888"
    assert crc64_bytes(b"") == "0" * 16


def test_pieces_and_files_give_the_checksum_of_the_whole(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(2 * CHUNK_BYTES + 17)
    crc = Crc64()
    for start in range(0, len(body), 999_983):
        crc.update(body[start : start + 999_983])
    path = tmp_path / "file"
    path.write_bytes(body)
    assert crc.hexdigest() == crc64_bytes(body) == crc64_file(path) == crc64_file(path, from_disk=True)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 9000, 9999])
def test_pieces_of_a_large_file_join_to_the_checksum_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(checksum, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checksum, "CHUNK_BYTES", 300)
    body = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(body)
    assert crc64_file(tmp_path / "file") == crc64_bytes(body)
