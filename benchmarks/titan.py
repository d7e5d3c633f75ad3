"""torchtitan's own trainer on a setting of gpu_train.py, for ``gpu_train.py --torchtitan``; runs below torchrun.

``torchrun benchmarks/titan.py SETTING FILE TEXT`` needs ``pip install torchtitan==0.2.2``. It tokenises the text in the
folder TEXT (gpu_text.py) with its own loader, and runs with its defaults but for what the setting asks for:
checkpointing of activations, compilation, length, micro-batch, fp8 (with fp8 all-gather). Writes step times, memory and
losses to FILE as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_text import text_data, text_tokenizer

STEPS = int(os.environ.get("TITAN_STEPS", "26"))
WARM_UP = 6
FLAVORS = {
    # Llama 3.2 1B with an output head of its own; its feed-forward layer is 1.5 x 2/3 x 4 x 2048 = 8192 wide.
    "llama-3.2-1b": ("1B", {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.5}),
    "llama-3.1-8b": ("8B", None),
    "tiny": ("debugmodel", None),
}


def options(setting: dict[str, Any], flavor: str, text: Path, folder: str) -> list[str]:
    """torchtitan's command line for a setting, to write into ``folder``."""
    spread = setting["parallelism"]
    kind = spread.get("activation_checkpointing", "none")
    kind = "selective" if kind == "auto" else kind  # its default
    kept = spread.get("reshard_after_forward", True) is False
    found = ["--model.name=llama3", f"--model.flavor={flavor}", f"--model.hf_assets_path={text_tokenizer(text)}"]
    found += ["--training.dataset=c4_test", f"--training.dataset_path={text_data(text)}", f"--training.steps={STEPS}"]
    found += [
        f"--training.seq_len={setting['seq_length']}",
        f"--training.local_batch_size={setting['batch']}",
    ]
    found.append(f"--activation_checkpoint.mode={'memory_budget' if kind == 'budget' else kind}")
    found.append("--activation_checkpoint.selective_ac_option=op")
    found += [f"--parallelism.fsdp_reshard_after_forward={'never' if kept else 'always'}", "--metrics.log_freq=5"]
    found += ["--lr_scheduler.warmup_steps=2", f"--job.dump_folder={folder}"]
    if setting["compile"]:
        found.append("--compile.enable")
    if setting["compute"] == "fp8":
        found += ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.filter_fqns=output"]
        found.append("--quantize.linear.float8.enable_fsdp_float8_all_gather")
        found.append("--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp")
    return found


def main(setting: dict[str, Any], target: Path, text: Path) -> None:
    flavor, shape = FLAVORS[setting["preset"]]
    with tempfile.TemporaryDirectory() as folder:
        # torchtitan reads them when it is imported.
        sys.argv[1:] = options(setting, flavor, text, folder)
        measure(flavor, shape, target)


def measure(flavor: str, shape: dict[str, Any] | None, target: Path) -> None:
    import torch
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    if shape is not None:
        llama3_args[flavor] = TransformerModelArgs(**shape, rope_theta=500_000)
    found: dict[str, Any] = {}

    class Timed(Trainer):  # type: ignore[misc]
        """Notes the device's clock after every step."""

        events: list[Any]

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            if not hasattr(self, "events"):
                torch.cuda.synchronize()
                found["started"] = time.time() - float(os.environ.get("GPU_TRAIN_BEGAN", time.time()))
                self.events = []
            self.events.append(event)

        def close(self) -> None:
            torch.cuda.synchronize()
            events = self.events[WARM_UP - 1 :]
            seconds = [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(events)]
            free, total = torch.cuda.mem_get_info()
            found["steps"] = [min(seconds), statistics.median(seconds), max(seconds)]
            found["allocated"] = torch.cuda.max_memory_allocated() / 2**30
            found["reserved"] = torch.cuda.max_memory_reserved() / 2**30
            found["by_card"] = (total - free) / 2**30
            found["card"], found["torch"] = torch.cuda.get_device_name(), torch.__version__
            super().close()

    train(Timed)
    if os.environ.get("RANK", "0") == "0":
        target.write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
