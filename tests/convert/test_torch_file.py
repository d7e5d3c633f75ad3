"""Torch's files without torch: hostile pickles run nothing, damaged files are named, large offsets stay inside."""

from __future__ import annotations

import pickle
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.convert.files import torch_writer
from sm_llm.convert.files.appended_file import AppendedFile
from sm_llm.convert.files.torch_file import read_torch_file
from sm_llm.convert.files.torch_writer import ALIGNMENT, Plain, TorchFile, state_pickle
from sm_llm.convert.files.views import View
from sm_llm.errors import ConversionError

if TYPE_CHECKING:
    from pathlib import Path


def archive(path: Path, body: bytes, records: dict[str, bytes] | None = None, **changes: Any) -> Path:
    with zipfile.ZipFile(path, "w", **changes) as file:
        file.writestr("x/data.pkl", body)
        for name, content in (records or {}).items():
            file.writestr(f"x/{name}", content)
    return path


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    plain = {name: Plain("F32", it.shape) for name, it in tensors.items()}
    file = TorchFile(path, path.stem, state_pickle(list(plain.items())))
    for key, it in enumerate(tensors.values()):
        file.tensor(key, it.nbytes, iter([memoryview(it.tobytes())]), lambda _: None)
    assert file.close() == path.stat().st_size
    return path


def test_a_file_comes_back(tmp_path: Path) -> None:
    wanted = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}
    path = write(tmp_path / "a.pt", wanted)
    found = read_torch_file(path)
    assert list(found) == list(wanted)
    for name, it in wanted.items():
        assert np.array_equal(found[name].array().view(np.float32), it)
        assert found[name].offset % ALIGNMENT == 0
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None  # checksums
        records = file.infolist()
    # Behind each record too, as torch has them, for readers that begin at the front.
    body = path.read_bytes()
    ends = [*(it.header_offset for it in records[1:]), body.index(b"PK\x01\x02")]
    for it, end in zip(records, ends, strict=True):
        assert struct.unpack("<4s3I", body[end - 16 : end]) == (b"PK\x07\x08", it.CRC, it.file_size, it.file_size)


class Calls:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def hostile() -> dict[str, bytes]:
    system = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
    return {
        "a function": pickle.dumps(Calls(), protocol=2),
        "os.system": system,
        "a module's attribute": b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
        "torch.load": b"\x80\x02ctorch\nload\n.",
        "state of a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x05\x00\x00\x00_callK\x01sb.",
        "a slot of a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x05\x00\x00\x00_callK\x01s\x86b.",
        "nothing": b"",
        "cut off": pickle.dumps({"a": 1}, protocol=2)[:-3],
        "a reference without number": b"\x80\x02ctorch_xla.utils.serialization\nTensorReference\n)\x81.",
        "a storage that is not there": state_pickle([("a", Plain("F32", (2,)))]),
    }


@pytest.mark.parametrize("name", hostile())
def test_what_is_not_a_state_dict_is_refused_and_not_run(name: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ConversionError, match=r"cannot be read as tensors"):
        read_torch_file(archive(tmp_path / "x.pt", hostile()[name]))
    assert capsys.readouterr().out == ""


def test_a_pickle_changes_no_class(tmp_path: Path) -> None:
    body = b"\x80\x02ctorch_xla.utils.serialization\nTensorReference\nN}X\x03\x00\x00\x00tidK\x07s\x86b."
    with pytest.raises(ConversionError, match="changes a value"):
        read_torch_file(archive(tmp_path / "x.pt", body))
    with pytest.raises(ConversionError):
        read_torch_file(archive(tmp_path / "y.pt", hostile()["a reference without number"]))


@pytest.mark.parametrize(
    ("shape", "records"),
    [((4, 4), {"data/0": b"1" * 60}), ((2**40,), {"data/0": b"1234"})],
)
def test_tensors_stay_inside_their_storage(shape: tuple[int, ...], records: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"storage 0 has"):
        read_torch_file(archive(tmp_path / "x.pt", state_pickle([("a", Plain("F32", shape))]), records))


def test_strides_that_reach_beyond_are_refused(tmp_path: Path) -> None:
    body = state_pickle([("a", Plain("F32", (2, 2)))]).replace(
        b"(J\x02\x00\x00\x00J\x01\x00\x00\x00t", b"(J\x00\x01\x00\x00J\x01\x00\x00\x00t"
    )
    with pytest.raises(ConversionError, match=r"reaches beyond its storage"):
        read_torch_file(archive(tmp_path / "x.pt", body, {"data/0": b"1" * 16}))


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ConversionError, match=r"is not a file of torch\.save"):
        read_torch_file(tmp_path / "a.pt")
    compressed = archive(tmp_path / "b.pt", state_pickle([]), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ConversionError, match=r"is compressed"):
        read_torch_file(compressed)
    big = archive(tmp_path / "c.pt", state_pickle([]), {"byteorder": b"big"})
    with pytest.raises(ConversionError, match=r"not little-endian"):
        read_torch_file(big)


def test_300_random_damages_never_escape(tmp_path: Path) -> None:
    """Each is read, or refused by name."""
    body = write(tmp_path / "a.pt", {"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float32)}).read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(body)
        for location in random.integers(0, len(body), 3):
            damaged[location] = random.integers(0, 256)
        path = tmp_path / "d.pt"
        path.write_bytes(
            damaged[: random.integers(len(body) // 2, len(body) + 1)] if random.random() < 0.3 else damaged
        )
        try:
            for it in read_torch_file(path).values():
                if isinstance(it, View):
                    it.array().sum()
        except (ConversionError, AttributeError) as error:
            refused += isinstance(error, ConversionError)
    assert refused > 50


class Sparse(AppendedFile):
    """Large blocks become holes in the file."""

    def write(self, piece: bytes | memoryview) -> None:
        if len(piece) < 1 << 20:
            return super().write(piece)
        self._is_direct = self._set_direct(False)
        self._write_out()
        self._written += len(piece)
        return None


@pytest.mark.integration
def test_sizes_beyond_4_gib_are_written_as_zip64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse record: the numbers in the headers and behind it, read by Python's zipfile."""
    monkeypatch.setattr(torch_writer, "AppendedFile", Sparse)
    size = (1 << 32) + 64
    file = TorchFile(tmp_path / "a.pt", "a", state_pickle([("a", Plain("F32", (size // 4,)))]))
    block = memoryview(bytes(1 << 24))
    pieces = [block] * (size // len(block)) + [block[: size % len(block)]]
    file.tensor(0, size, iter(pieces), lambda _: None)
    file.close()
    view = read_torch_file(tmp_path / "a.pt")["a"]
    assert view.size == size
    with zipfile.ZipFile(tmp_path / "a.pt") as found:
        assert found.getinfo("a/data/0").file_size == size
        assert found.read("a/version") == b"3\n"
