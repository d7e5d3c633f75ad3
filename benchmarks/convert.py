"""Memory and time of converting a Hugging Face model to shards of neuronx-distributed and back, beside a copy.

    python benchmarks/convert.py [--model 1b|7b] [--rounds 3] [--workers N] [--folder PLACE]

Writes a bf16 Llama below PLACE (1b: 2.2 GB of random bits; 7b: a sparse file of 13 GB, which is only converted) and
converts it to tp 8, to tp 32 pp 2 with 4 copies, and back from both, with cp and fsync of the source before each of
the four. What is read is in the page cache each time. Each conversion is a process of its own. Prints its anonymous
memory above what its imports took, wall and CPU time of each round, and the ratio of the medians. Needs three times the
model's size on the disk, and as much memory that is free for the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from sm_llm.models.config import normalise
from sm_llm.models.families.table import family

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
MODELS = {"1b": (2048, 5632, 22, 32, 8, 32_000), "7b": (4096, 11_008, 32, 32, 8, 32_000)}
WAYS = {
    "tp 8": {"tensor_parallel_degree": 8},
    "tp 32 pp 2": {"tensor_parallel_degree": 32, "pipeline_parallel_degree": 2},
}
_BLOCK = 1 << 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--xser", action="store_true", help="a file per tensor instead of one per rank")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--convert", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert is not None:
        return convert(json.loads(options.convert))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size = write_model(Path(folder) / "source", options.model)
        print(f"{options.model}: {size / 1e9:.2f} GB in bf16")
        measure(Path(folder), options, size)
    return None


def measure(folder: Path, options: argparse.Namespace, size: int) -> None:
    seconds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, degrees in WAYS.items():
            shards, back = folder / "shards", folder / "back"
            for way, given in (
                (
                    f"to nxd, {name}",
                    {
                        "source": str(folder / "source"),
                        "destination": str(shards),
                        "to": "nxd",
                        "xser": options.xser,
                        **degrees,
                    },
                ),
                (f"to hf, {name}", {"source": str(shards), "destination": str(back), "to": "hf"}),
            ):
                if options.model == "1b":
                    seconds.setdefault("cp + fsync", []).append(copy(folder / "source", folder / "copy"))
                    read_all(Path(given["source"]))
                result = run({**given, "workers": options.workers})
                seconds.setdefault(way, []).append(result["seconds"])
                ratio = result["written"] / size
                print(
                    f"{way}: {result['seconds']:.2f} s wall, {result['cpu_seconds']:.2f} s CPU, "
                    f"{result['files']} files, {ratio:.2f} x the model written, "
                    f"{result['anonymous'] / 2**20:.1f} MiB anonymous above the imports",
                    flush=True,
                )
            shutil.rmtree(shards)
            shutil.rmtree(back)
        # Both share the machine with whatever else runs there: a ratio means little without it.
        print(f"load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", flush=True)
    plain = statistics.median(seconds.get("cp + fsync", [float("nan")]))
    for way, found in seconds.items():
        middle = statistics.median(found)
        print(f"{way}: median {middle:.2f} s ({middle / plain:.2f} of cp); rounds {[round(it, 2) for it in found]}")


def copy(source: Path, target: Path) -> float:
    began = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *(str(it) for it in target.iterdir())], check=True)
    took = time.monotonic() - began
    shutil.rmtree(target)
    return took


def read_all(folder: Path) -> None:
    """Bring the files into the page cache, where what ``cp`` reads is too."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(_BLOCK):
                    pass


def run(given: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--convert", json.dumps(given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def convert(given: dict[str, Any]) -> None:
    """One conversion in this process; prints what it took as JSON."""
    import sm_llm
    import sm_llm.convert.api
    from sm_llm.storage.checksum import crc64_bytes

    crc64_bytes(b"")  # the library behind it is loaded on first use
    before = peak = anonymous()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, worked = time.monotonic(), time.process_time()
    report = sm_llm.convert(given.pop("source"), given.pop("destination"), **given)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - worked
    is_over.set()
    watcher.join()
    result = {"seconds": seconds, "cpu_seconds": cpu_seconds, "anonymous": peak - before}
    print(json.dumps({**result, "files": report.files, "written": report.size}))


def anonymous() -> int:
    """Bytes of this process that no file backs (Linux)."""
    # Not from smaps_rollup: the kernel walks every mapped page for it, which kept one of two processors busy.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line RssAnon")


def write_model(folder: Path, name: str) -> int:
    """A model of random bits, or of zeros that take no room; returns its bytes."""
    folder.mkdir()
    config = normalise({"model_type": "llama", **dict(zip(_SIZES, MODELS[name], strict=True)), "dtype": "bfloat16"})
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for tensor, it in family(config).tensors(config).items():
        header[tensor] = {"dtype": "BF16", "shape": list(it.shape), "data_offsets": [offset, offset + 2 * it.size]}
        offset += 2 * it.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(_BLOCK)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if name != "1b":
            file.truncate(8 + len(text) + offset)
            return offset
        for begin in range(0, offset, _BLOCK):
            # Shifted, so that no two blocks are the same.
            file.write((block[begin // _BLOCK :] + block[: begin // _BLOCK])[: offset - begin])
        os.fsync(file.fileno())
    return offset


if __name__ == "__main__":
    main()
