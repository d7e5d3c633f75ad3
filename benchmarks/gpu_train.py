"""Training speed, memory and start-up of several models on GPUs: ours, a bare loop, and ours of another checkout.

``python benchmarks/gpu_train.py [SETTING …] [--against CHECKOUT] [--rounds 3] [--blocks 4] [--json FILE]``

A setting is a model with its lengths and switches (``--list`` shows them). Subjects take turns, each time in fresh
processes under torchrun: the worker's own loop with its loader; what one would write without it (transformers' model
and loss, FSDP2, every layer compiled, torch's fused AdamW), with the same checkpointing; and with ``--against`` the
worker of another checkout. The table has medians over rounds: tokens/s per GPU (of the median step), MFU by the
family's formula, the smallest and largest step, GiB allocated and reserved at the peak and by the card, seconds from
the command to the end of the first step (of a first turn, which compiles, and of later ones, which find its graphs),
and the losses of the first and the last step. Behind sizes of memory is what the plan's estimate says. On a machine
without GPUs ``tiny`` tries it out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.memory_estimate import memory_estimate
from sm_llm.spec.machines.hardware import Card
from sm_llm.spec.tasks import settings

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

WARM_UP = 6
"""Steps that compile and warm up."""
BLOCK = 5
RATE = 1e-4
_BEGAN = "GPU_TRAIN_BEGAN"
TORCHTITAN = "torchtitan"


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    preset: str
    seq_length: int
    batch: int
    """Sequences of a step on each GPU."""
    gpus: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    compile: bool | str = True
    parallelism: dict[str, Any] = field(default_factory=dict)
    compute: str = "bf16"
    micro_batch_size: int | str | None = None
    """None: all of ``batch`` at once."""
    reduce: str = "fp32"

    def task(self) -> dict[str, Any]:
        return {
            "kind": "train",
            "model": {"preset": self.preset, "config": self.config},
            "data": {"format": "synthetic", "seq_length": self.seq_length, "rows": 4096},
            "micro_batch_size": self.micro_batch_size or self.batch,
            "global_batch_size": self.gpus * self.batch,
            "max_steps": 1_000_000,
            "optim": {"learning_rate": RATE, "schedule": "constant"},
            "precision": {"compute": self.compute, "compile": self.compile, "reduce": self.reduce},
            "parallelism": {**NOTHING, **self.parallelism},
            "checkpoint": {"every_steps": 1_000_000, "keep_last": 1},
            "logging": {"every_steps": 1_000_000},
        }


NOTHING = {"activation_checkpointing": "none", "reshard_after_forward": True}
AUTO = dict.fromkeys(NOTHING, "auto")
UNTIED = {"tie_word_embeddings": False}
KEPT = {"reshard_after_forward": False}
BUDGET = {"activation_checkpointing": "budget"}
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
SETTINGS = {
    "tiny": Setting("tiny", 128, 2, compile=False, compute="fp32"),
    "1b": Setting("llama-3.2-1b", 4096, 4, config=UNTIED),
    "1b-tied": Setting("llama-3.2-1b", 4096, 4),
    "1b-fp8": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, compute="fp8"),
    "1b-budget": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, parallelism=BUDGET),
    "1b-full": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, parallelism=FULL),
    "1b-1": Setting("llama-3.2-1b", 4096, 1, config=UNTIED),
    "1b-16": Setting("llama-3.2-1b", 4096, 16, config=UNTIED),
    "1b-8": Setting("llama-3.2-1b", 4096, 8, config=UNTIED),
    "1b-8-budget": Setting("llama-3.2-1b", 4096, 8, config=UNTIED, parallelism=BUDGET),
    "1b-16-budget-fp8": Setting("llama-3.2-1b", 4096, 16, config=UNTIED, parallelism=BUDGET, compute="fp8"),
    "1b-32k": Setting("llama-3.2-1b", 32768, 1, config=UNTIED),
    "3b": Setting("llama-3.2-3b", 8192, 1),
    "qwen3-0.6b": Setting("qwen3-0.6b", 8192, 4),
    "mistral-8-layers": Setting("mistral-7b", 8192, 2, config={"num_hidden_layers": 8}),
    "mixtral-2-layers": Setting("mixtral-8x7b", 4096, 2, config={"num_hidden_layers": 2}),
    "1b-eager": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, compile=False),
    "1b-selective": Setting("llama-3.2-1b", 4096, 4, config=UNTIED, parallelism=SELECTIVE),
    "1b-auto": Setting("llama-3.2-1b", 4096, 4, 1, UNTIED, "auto", AUTO, micro_batch_size="auto"),
    "1b-auto-16": Setting("llama-3.2-1b", 4096, 16, 1, UNTIED, "auto", AUTO, micro_batch_size="auto"),
    "qwen3-8b-8-layers": Setting("qwen3-8b", 8192, 2, config={"num_hidden_layers": 8}),
    "8b-auto": Setting("llama-3.1-8b", 8192, 1, 2, {}, "auto", AUTO, micro_batch_size="auto"),
    "8b-auto-2": Setting("llama-3.1-8b", 8192, 2, 2, {}, "auto", AUTO, micro_batch_size="auto"),
    "8b-auto-fp8-2": Setting("llama-3.1-8b", 8192, 2, 2, {}, "auto", AUTO, "fp8", "auto"),
    "8b-auto-32k": Setting("llama-3.1-8b", 32768, 1, 4, {}, "auto", AUTO, micro_batch_size="auto"),
    "8b-2": Setting("llama-3.1-8b", 8192, 2, 2),
    "8b-kept-2-budget": Setting("llama-3.1-8b", 8192, 2, 2, parallelism={**KEPT, **BUDGET}),
    "8b-kept-fp8": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=KEPT, compute="fp8"),
    "8b-kept-fp8-2": Setting("llama-3.1-8b", 8192, 2, 2, parallelism=KEPT, compute="fp8"),
    "8b-fp8-2": Setting("llama-3.1-8b", 8192, 2, 2, compute="fp8"),
    "8b-kept-reduce-bf16": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=KEPT, reduce="bf16"),
    "8b-full-4": Setting("llama-3.1-8b", 8192, 4, 2, parallelism=FULL),
    "8b-accumulated": Setting("llama-3.1-8b", 8192, 2, 2, micro_batch_size=1),
    "8b-budget": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=BUDGET),
    "8b": Setting("llama-3.1-8b", 8192, 1, 2),
    "8b-kept": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=KEPT),
    "8b-selective": Setting("llama-3.1-8b", 8192, 1, 2, parallelism=SELECTIVE),
    "8b-selective-2": Setting("llama-3.1-8b", 8192, 2, 2, parallelism=SELECTIVE),
}


class Ours:
    """The worker's loop. Checks of free disk space are left out: nothing is saved."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        from loop import Ours as Loop

        from sm_llm.worker.tasks import train

        train.check_space = lambda *_: None  # type: ignore[assignment]
        self._loop = Loop(folder, setting.task())
        device = self._loop.training.strategy.device
        self.device, self.costs = device.torch_device, self._loop.setup.costs(device)
        self.about = {"settings": settings(self._loop.setup.task), "predicted": self._predicted()}

    def _predicted(self) -> dict[str, float]:
        """GiB at the peak, as allocated and by the card."""
        import torch

        setup, process = self._loop.setup, self._loop.training.context.process
        if self.device.type != "cuda":
            return {}
        total = torch.cuda.get_device_properties(self.device).total_memory / 2**30
        card, nodes = Card(torch.cuda.get_device_name(self.device), total), process.local_world_size
        found = memory_estimate(setup.config, setup.task, setup.derived, nodes, card)
        return {"allocated": found.total / 2**30, "by_card": found.by_card / 2**30}

    def saves(self, count: int) -> list[dict[str, float]]:
        """Asynchronous saves, a step after each: how long the loop waited, and until each was published."""
        found = []
        for _ in range(count):
            self.step()
            blocked, began = self._loop.save_began(), time.perf_counter()
            seconds = step_seconds(self, 1, self.device)
            self._loop.training.checkpointer.finish()
            found.append({"blocked": blocked, "published": time.perf_counter() - began, "step": max(seconds)})
        return found

    def step(self) -> None:
        self._loop.block(1)

    def last_loss(self) -> float:
        return self._loop.training.flush()[-1].loss


class Bare:
    """transformers' model and loss under FSDP2."""

    def __init__(self, setting: Setting, _: Path) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from sm_llm.models.families.table import family
        from sm_llm.spec.tasks import TrainTask
        from sm_llm.worker.device import gpu_or_cpu
        from sm_llm.worker.process_info import ProcessInfo
        from sm_llm.worker.strategies.fsdp.memory import wrap_layer
        from sm_llm.worker.strategies.fsdp.mesh import start_process_group
        from sm_llm.worker.strategies.model import build_on_meta, decoder_layers, materialise
        from sm_llm.worker.strategies.table import make_strategy
        from sm_llm.worker.strategies.weights import InitialWeights
        from sm_llm.worker.training.job_setup import set_up

        task, process = TrainTask.model_validate(setting.task(), strict=False), ProcessInfo.read(os.environ)
        device = gpu_or_cpu(process)
        self.device = device.torch_device
        start_process_group(self.device, process)
        setup = set_up(task, make_strategy(task, process, device).layout, process.local_world_size, Path())
        self.costs = setup.costs(device)
        self.model = build_on_meta(setup.config)
        compute = torch.bfloat16 if setting.compute == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        kept = {**NOTHING, **setting.parallelism}["reshard_after_forward"] is not False
        for number, (parent, name) in enumerate(decoder_layers(self.model, setup.config)):
            layer = wrap_layer(parent.get_submodule(name), number, task.parallelism, keep_rng=False)  # type: ignore[arg-type]
            parent.register_module(name, layer)
            if setting.compile:
                layer.compile()
            fully_shard(layer, mp_policy=policy, reshard_after_forward=kept)
        fully_shard(self.model, mp_policy=policy, reshard_after_forward=False)
        weights = InitialWeights(family(setup.config).tensors(setup.config), 0)
        materialise(self.model, self.device, self.device, weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        shape = (64, setting.batch, setting.seq_length)
        vocabulary = int(setup.config["vocab_size"])
        self.rows = torch.randint(0, vocabulary, shape, generator=generator, device=self.device)
        self.done = 0
        self.loss: Any = None
        self.about: dict[str, Any] = {}

    def step(self) -> None:
        import torch

        ids = self.rows[self.done % len(self.rows)]
        self.done += 1
        self.loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def last_loss(self) -> float:
        return float(self.loss.detach())


def measure(subject: str, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """In one of the processes of a subject."""
    import torch

    if options.quick_weights:
        repeat_weights()
    blocks = options.blocks
    kind: Callable[..., Any] = Bare if subject == "bare" else Ours
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        loop = kind(setting, Path(folder))
        loop.step()
        loss = loop.last_loss()
        started = time.time() - float(os.environ[_BEGAN])
        for _ in range(WARM_UP - 1):
            loop.step()
        seconds = step_seconds(loop, blocks, loop.device)
        last = loop.last_loss()
        about = {**loop.about, **memory(loop.device)}
        if options.saves and isinstance(loop, Ours):
            about["saves"] = loop.saves(options.saves)
    taken, peak = statistics.median(seconds), loop.costs.peak_flops
    rate = setting.batch * setting.seq_length / taken
    return {
        "tokens_per_second_per_gpu": rate,
        "mfu": None if peak is None else rate * loop.costs.flops_per_token / peak,
        "flops_formula": loop.costs.flops_formula,
        "steps": [min(seconds), taken, max(seconds)],
        "started": started,
        "losses": [loss, last],
        "torch": torch.__version__,
        **about,
    }


def repeat_weights() -> None:
    """Let initial weights be a block of random numbers over and over: speed does not depend on them, and drawing eight
    billion takes a while."""
    import torch

    from sm_llm.worker.strategies.weights import InitialWeights

    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02

    def read(_: Any, name: str, offsets: Any, sizes: Any) -> torch.Tensor:
        count = math.prod(sizes)
        return torch.ones(sizes) if "norm" in name else block.repeat(-(-count // len(block)))[:count].view(sizes)

    InitialWeights.read = read  # type: ignore[method-assign]


def step_seconds(loop: Any, blocks: int, device: torch.device) -> list[float]:
    """Of every step, by the device's clock where there is one."""
    import torch

    if device.type != "cuda":
        found = []
        for _ in range(blocks * BLOCK):
            began = time.perf_counter()
            loop.step()
            found.append(time.perf_counter() - began)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(blocks * BLOCK + 1)]
    events[0].record()
    for event in events[1:]:
        loop.step()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(events)]


def memory(device: torch.device) -> dict[str, Any]:
    """GiB at the peak; the card's own figure counts what it holds now, which torch's allocator never gave back."""
    import torch

    if device.type != "cuda":
        return {"card": "cpu", "allocated": 0.0, "reserved": 0.0, "by_card": 0.0}
    free, total = torch.cuda.mem_get_info()
    return {
        "card": torch.cuda.get_device_name(),
        "allocated": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
        "by_card": (total - free) / 2**30,
    }


def run(subject: str, name: str, options: argparse.Namespace, cache: Path) -> dict[str, Any] | None:
    """One turn of a subject in processes of its own; None, with its output on stderr, where it failed.

    Compiled graphs are kept below ``cache``, for each subject and setting apart.
    """
    here = Path(__file__).resolve().parents[1]
    tree = options.against if subject == "before" else here
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command.append(f"--nproc-per-node={SETTINGS[name].gpus}")
        if subject == TORCHTITAN:
            command += [str(Path(__file__).with_name("titan.py")), json.dumps(asdict(SETTINGS[name])), str(result)]
        else:
            command += [__file__, name, f"--blocks={options.blocks}", f"--child={subject}", f"--json={result}"]
            command += [f"--saves={options.saves}", *(["--quick-weights"] if options.quick_weights else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / f"{name}-{subject}")}
        environ[_BEGAN] = str(time.time())
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} {subject} failed\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}", file=sys.stderr, flush=True)
            return None
        found: dict[str, Any] = json.loads(result.read_text())
        if subject == TORCHTITAN:
            setting = SETTINGS[name]
            rate = setting.batch * setting.seq_length / found["steps"][1]
            found |= {"tokens_per_second_per_gpu": rate, "mfu": None, "losses": [], "flops_formula": ""}
        return found


def child(options: argparse.Namespace) -> None:
    found = measure(options.child, SETTINGS[options.settings[0]], options)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


HEAD = (
    "| setting | subject | tokens/s per GPU | MFU | step ms (smallest to largest) | allocated (predicted) | reserved "
)
HEAD += "| card (predicted) | "
HEAD += "first step s, new / later | losses |"


def row(name: str, subject: str, turns: list[dict[str, Any]]) -> str:
    """The medians of one subject's turns."""

    def median(read: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(read, turns))

    rates = [it["tokens_per_second_per_gpu"] for it in turns]
    spread = f" ({min(rates):,.0f} to {max(rates):,.0f})" if len(turns) > 1 else ""
    mfu = "" if turns[0]["mfu"] is None else f"{median(lambda it: it['mfu']):.1%}"
    starts = [it["started"] for it in turns]
    later = [statistics.median(starts[1:])] if len(starts) > 1 else []
    low, high = min(it["steps"][0] for it in turns), max(it["steps"][2] for it in turns)
    predicted = turns[0].get("predicted") or {}
    sizes = " | ".join(
        f"{median(lambda it, k=key: it[k]):.1f}" + (f" ({predicted[key]:.1f})" if key in predicted else "")  # type: ignore[misc]
        for key in ("allocated", "reserved", "by_card")
    )
    losses = ", ".join(f"{it:.4f}" for it in turns[0]["losses"])
    return (
        f"| {name} | {subject} | {median(lambda it: it['tokens_per_second_per_gpu']):,.0f}{spread} | {mfu} "
        f"| {median(lambda it: it['steps'][1]) * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f}) | {sizes} "
        f"| {' / '.join(f'{it:.1f}' for it in [starts[0], *later])} | {losses} |"
    )


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as cache:
        take_turns(options, options.cache or Path(cache))


def take_turns(options: argparse.Namespace, cache: Path) -> None:
    subjects = ["ours", *(["before"] if options.against else []), *([] if options.without_bare else ["bare"])]
    subjects += [TORCHTITAN] if options.torchtitan else []
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in options.settings:
        turns = results.setdefault(name, {subject: [] for subject in subjects})
        for turn in range(options.rounds):
            for subject in subjects if turn % 2 == 0 else subjects[::-1]:
                if (found := run(subject, name, options, cache)) is not None:
                    turns[subject].append(found)
                    write(options, results)
                    print(row(name, subject, [found]), file=sys.stderr, flush=True)
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|")
    for name, found_by in results.items():
        for subject, turns_taken in found_by.items():
            print(row(name, subject, turns_taken) if turns_taken else f"| {name} | {subject} | failed |" + " |" * 7)
    first = next((it for by in results.values() for turns in by.values() for it in turns), None)
    if first is not None:
        print(f"\n{first['card']}, torch {first['torch']}; MFU: {first['flops_formula']}; memory in GiB")


def write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """After every turn: a call that is broken off has what it measured."""
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", choices=[*SETTINGS, []], default=["1b"], metavar="SETTING")
    parser.add_argument("--list", action="store_true", help="print the settings")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure the package of another checkout, too")
    parser.add_argument("--without-bare", action="store_true", help="leave the bare loop out")
    parser.add_argument("--torchtitan", action="store_true", help="measure torchtitan, too (titan.py)")
    parser.add_argument("--quick-weights", action="store_true", help="begin with repeated numbers, not drawn ones")
    parser.add_argument("--saves", type=int, default=0, help="measure so many asynchronous saves of ours at the end")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep compiled graphs there for a later call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=4, help=f"of {BLOCK} measured steps a turn")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    if asked.list:
        for key, value in SETTINGS.items():
            print(f"{key}: {value}")
    elif asked.child:
        child(asked)
    else:
        main(asked)
