"""Memory that two processes take to load pretrained weights: each reads its own slices of the safetensors files.

    python benchmarks/load_weights.py [--megabytes 2000] [--format bf16|fp32] [--folder PLACE]

Makes a bf16 Llama of that size below PLACE (by default a temporary folder), loads it on two processes (gloo) and prints
the anonymous memory of each above what its imports and the process group took, at its highest: while the weights are
read, and with the optimiser's state.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYER = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
SHARD_BYTES = 256 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--format", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        return load(options.load, options.format)
    with tempfile.TemporaryDirectory(dir=options.folder) as location:
        size = write_model(Path(location), options.megabytes * 10**6)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*command, "--load", location, "--format", options.format],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for line in done.stdout.splitlines():
            reported = json.loads(line)
            parts = ", ".join(f"{name} {reported[name] / size:.2f}" for name in ("loading", "with_optimizer"))
            print(f"rank {reported['rank']}: {parts} of the {size / 10**6:.0f} MB ({options.format} masters)")
    return None


def write_model(folder: Path, wanted: int) -> int:
    """A model of about ``wanted`` bytes in bf16, file by file; returns its bytes."""
    import torch
    from safetensors.torch import save_file

    from sm_llm.models.config import both_spellings, normalise
    from sm_llm.models.families.table import family

    layers = max(1, wanted // (2 * (4 * 1024**2 + 3 * 1024 * 4096)))
    config = normalise({"model_type": "llama", "vocab_size": 256, "num_hidden_layers": layers, **LAYER})
    weight_map, pending, filled, total = {}, {}, 0, 0
    tensors = family(config).tensors(config)
    for number, (name, it) in enumerate(tensors.items(), start=1):
        pending[name] = torch.full(it.shape, 0.01, dtype=torch.bfloat16)
        filled += 2 * it.size
        if filled >= SHARD_BYTES or number == len(tensors):
            file = f"shard-{number:05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(pending, file)
            total, pending, filled = total + filled, {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(both_spellings(config)))
    return total


def load(folder: Path, master: str) -> None:
    """One process: what the train task does between its start and its first step."""
    from sm_llm.models.config import model_config
    from sm_llm.models.weights_check import check_weights
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.device import gpu_or_cpu
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.strategies.fsdp import strategy as fsdp
    from sm_llm.worker.strategies.weights import PretrainedWeights

    task = TrainTask.model_validate(
        {
            "data": {"format": "synthetic", "seq_length": 32, "rows": 8},
            "max_steps": 1,
            "precision": {"compute": "bf16", "master": master},
        },
        strict=False,
    )
    process = ProcessInfo.read(os.environ)
    config = model_config(preset=None, path=str(folder), pretrained=None, overrides={})
    strategy = fsdp.FsdpStrategy(task, process, gpu_or_cpu(process))
    strategy.setup()
    fsdp.build_on_meta(config)  # what transformers imports for it belongs to the baseline
    before, reported = anonymous_bytes(), {"rank": int(os.environ["RANK"])}
    build_adamw = fsdp.build_adamw
    with highest() as peak:

        def noted(*arguments: Any) -> Any:
            reported["loading"] = peak() - before
            return build_adamw(*arguments)

        fsdp.build_adamw = noted
        strategy.build(config, PretrainedWeights(folder, check_weights(folder, config)))
        reported["with_optimizer"] = peak() - before
    print(json.dumps(reported), flush=True)
    strategy.close()


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def highest(seconds: float = 0.002) -> Iterator[Any]:
    """A function that tells the highest anonymous memory so far, looked at every few milliseconds."""
    found, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(seconds):
            found[0] = max(found[0], anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield lambda: max(found[0], anonymous_bytes())
    done.set()
    thread.join()


if __name__ == "__main__":
    main()
