"""Training speed, memory and start-up of several models on GPUs: ours, a bare loop, and ours of another checkout.

``python benchmarks/gpu_train.py [SETTING …] [--against CHECKOUT] [--rounds 3] [--blocks 4] [--json FILE]``
``python benchmarks/gpu_train.py --suite 8b --seconds 560 --quick-weights --json FILE``

A setting is a model with its lengths and switches, a suite a list of turns (``--list`` shows both; gpu_settings.py).
Subjects take turns, each time in fresh processes under torchrun and on the same text (gpu_text.py): the worker's own
loop with its loader; what one would write without it (transformers' model and loss, FSDP2, every layer compiled,
torch's fused AdamW), with the same checkpointing; with ``--against`` the worker of another checkout; and torchtitan.
The table has medians over rounds: tokens/s per GPU (of the median step), MFU by the family's formula, the smallest and
largest step, GiB allocated and reserved at the peak and by the card, seconds from the command to the end of the first
step (of a first turn, which compiles, and of later ones, which find its graphs), and the losses of the first and the
last step. Behind sizes of memory is what the plan's estimate says. What each turn has found is printed at once and
written to ``--json``, which gpu_report.py reads; a call ends within ``--seconds``. On a machine without GPUs
``--suite tiny`` tries it out.
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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_report import row, tables
from gpu_settings import BARE, BEFORE, NOTHING, OURS, RATE, SETTINGS, SUITES, TORCHTITAN
from gpu_text import text_rows, write_text

from sm_llm.contract.memory_estimate import memory_estimate
from sm_llm.models.config import model_config
from sm_llm.models.families.table import family
from sm_llm.runs.events.events import read_events
from sm_llm.spec.machines.hardware import Card, peak_flops
from sm_llm.spec.tasks import settings

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from gpu_report import Turns
    from gpu_settings import Setting

WARM_UP = 6
"""Steps that compile and warm up."""
BLOCK = 5
_BEGAN = "GPU_TRAIN_BEGAN"


class Ours:
    """The worker's loop. Checks of free disk space are left out: nothing is saved."""

    def __init__(self, setting: Setting, folder: Path, rows: str) -> None:
        from loop import Ours as Loop

        from sm_llm.worker.tasks import train

        train.check_space = lambda *_: None  # type: ignore[assignment]
        self._loop = Loop(folder, setting.task(rows))
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

    def started(self) -> dict[str, Any]:
        """After the first step, of rank 0: its phases, what was compiled, and what attention and collectives use."""
        found = {it["kind"]: it for it in read_events(self._loop.training.context.run.events)}
        return {
            "phases": found.get("start_measured", {}).get("phases"),
            "layers_compiled": found.get("layers_compiled"),
            "attention": found.get("attention_chosen", {}).get("attention"),
            "collectives": found.get("collectives_chosen", {}).get("collectives"),
        }

    def overhead(self, blocks: int) -> list[float]:
        """The share that the loop takes more than its engine alone (passes and update of one batch), in pairs."""
        from sm_llm.worker.training.batch_transfer import global_targets, loss_share

        training, shares = self._loop.training, []
        batches, layout = training.next_batches(), training.strategy.layout
        targets = global_targets(batches, padded=False, layout=layout, device=training.strategy.device)

        def engine() -> None:
            training.strategy.forward_backward(batches, loss_share(layout, targets))
            training.strategy.update(RATE, 1.0, targets)

        for number in range(blocks):
            times = {}
            for step in (self.step, engine) if number % 2 else (engine, self.step):
                times[step] = statistics.median(step_seconds(step, 1, self.device))
            shares.append(times[self.step] / times[engine] - 1)
        return shares

    def saves(self, count: int) -> list[dict[str, float]]:
        """Asynchronous saves, a step after each; the last one begins while the one before it is being written.

        Seconds: how long the loop waited behind the steps that were queued, until a save was on disk and published, and
        what the step beside it took.
        """
        from sm_llm.worker.inputs.space import own_bytes

        training = self._loop.training
        checkpointer, found = training.checkpointer, []
        for number in range(count + 1):
            self.step()
            if number == count:
                self._loop.save_began()
                self.step()
            training.strategy.device.wait()
            blocked, began = self._loop.save_began(), time.perf_counter()
            seconds = step_seconds(self.step, 1, self.device)
            checkpointer.finish()
            about = {"blocked": blocked, "published": time.perf_counter() - began, "step": max(seconds)}
            written = {"bytes": own_bytes(training.strategy.state_dict()), "written": checkpointer._writer.seconds}
            found.append(about | written | {"overlaps": number == count})
        return found

    def step(self) -> None:
        self._loop.block(1)

    def last_loss(self) -> float:
        return self._loop.training.flush()[-1].loss


class Bare:
    """transformers' model and loss under FSDP2."""

    def __init__(self, setting: Setting, _: Path, rows: str) -> None:
        import numpy as np
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from sm_llm.data.loader import open_source
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

        task, process = TrainTask.model_validate(setting.task(rows), strict=False), ProcessInfo.read(os.environ)
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
        source = open_source(task.data, "train", int(setup.config["vocab_size"]), 0)
        chosen = (dist.get_rank() + np.arange(64 * setting.batch)) % source.count
        ids = torch.from_numpy(source.rows(chosen).input_ids).to(self.device)
        self.rows = ids.view(64, setting.batch, setting.seq_length)
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
    kind: Callable[..., Any] = Bare if subject == BARE else Ours
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        loop = kind(setting, Path(folder), options.rows)
        loop.step()
        loss = loop.last_loss()
        started = time.time() - float(os.environ[_BEGAN])
        begun = loop.started() if isinstance(loop, Ours) else {}
        for _ in range(WARM_UP - 1):
            loop.step()
        seconds = step_seconds(loop.step, blocks, loop.device)
        last = loop.last_loss()
        about = {**loop.about, **begun, **memory(loop.device)}
        if options.overhead and isinstance(loop, Ours):
            about["overhead"] = loop.overhead(options.overhead)
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


def step_seconds(step: Callable[[], object], blocks: int, device: torch.device) -> list[float]:
    """Of every step, by the device's clock where there is one."""
    import torch

    if device.type != "cuda":
        found = []
        for _ in range(blocks * BLOCK):
            began = time.perf_counter()
            step()
            found.append(time.perf_counter() - began)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(blocks * BLOCK + 1)]
    events[0].record()
    for event in events[1:]:
        step()
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


def run(subject: str, name: str, options: argparse.Namespace, cache: Path, seconds: float) -> dict[str, Any] | None:
    """One turn of a subject in processes of its own; None, with its output on stderr, where it failed.

    It is ended after so many ``seconds``, if they are finite. The text, and compiled graphs, for each subject and
    setting apart, are kept below ``cache``.
    """
    text = cache / "text"
    if not text.exists():
        write_text(text)
    here = Path(__file__).resolve().parents[1]
    tree = options.against if subject == BEFORE else here
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command.append(f"--nproc-per-node={SETTINGS[name].gpus}")
        if subject == TORCHTITAN:
            setting = json.dumps(asdict(SETTINGS[name]))
            command += [str(Path(__file__).with_name("titan.py")), setting, str(result), str(text)]
        else:
            command += [__file__, name, f"--blocks={options.blocks}", f"--child={subject}", f"--json={result}"]
            command += [f"--saves={options.saves}", f"--overhead={options.overhead}"]
            command.append(f"--rows={text_rows(text, SETTINGS[name].seq_length)}")
            command += [*(["--quick-weights"] if options.quick_weights else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / f"{name}-{subject}")}
        environ |= {"TITAN_STEPS": str(WARM_UP + options.blocks * BLOCK), _BEGAN: str(time.time())}
        output = Path(folder) / "output.txt"
        with output.open("wb") as stream:
            process = subprocess.Popen(command, env=environ, stdout=stream, stderr=stream)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds if math.isfinite(seconds) else None)
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers
                process.wait()
        if process.returncode:
            print(f"{name} {subject} failed\n{output.read_text(errors='replace')[-4000:]}", file=sys.stderr, flush=True)
            return None
        found: dict[str, Any] = json.loads(result.read_text())
        if subject == TORCHTITAN:
            found |= {"losses": [], **rates(SETTINGS[name], found)}
        return found


def rates(setting: Setting, found: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s and MFU of torchtitan's steps, by the formula that ours have."""
    config = model_config(preset=setting.preset, path=None, pretrained=None, overrides=setting.config)
    kind, peak = family(config), peak_flops(found["card"])
    rate = setting.batch * setting.seq_length / found["steps"][1]
    mfu = None if peak is None else rate * kind.flops_per_token(config, setting.seq_length) / peak
    return {"tokens_per_second_per_gpu": rate, "mfu": mfu, "flops_formula": kind.flops_formula}


def child(options: argparse.Namespace) -> None:
    found = measure(options.child, SETTINGS[options.settings[0]], options)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(options: argparse.Namespace) -> None:
    """Take turns, and print what they have found."""
    with tempfile.TemporaryDirectory() as cache:
        results = take_turns(options, options.cache or Path(cache))
    print("\n".join(tables(results)))


def planned(options: argparse.Namespace) -> tuple[list[tuple[str, str]], int]:
    """The turns of a round, and the number of rounds."""
    if options.suite:
        suite = SUITES[options.suite]
        return list(suite.turns), options.rounds or suite.rounds
    subjects = [OURS, *([BEFORE] if options.against else []), *([] if options.without_bare else [BARE])]
    subjects += [TORCHTITAN] if options.torchtitan else []
    names = options.settings or ["1b"]
    return [(name, subject) for name in names for subject in subjects], options.rounds or 3


def take_turns(options: argparse.Namespace, cache: Path) -> Turns:
    """Round after round, every second one backwards: what ends early has whole rounds, and no subject is always first.

    A turn is not begun that would last longer than there is time, by the longest of its kind so far, or the shortest of
    any.
    """
    turns, rounds = planned(options)
    results: Turns = {}
    lasted: dict[tuple[str, str], float] = {}
    end = time.monotonic() + options.seconds
    for name, subject in turns:
        results.setdefault(name, {}).setdefault(subject, [])
    for number in range(rounds):
        for name, subject in turns if number % 2 == 0 else turns[::-1]:
            left = end - time.monotonic()
            if left <= lasted.get((name, subject), min(lasted.values(), default=0.0)):
                print(f"{name} {subject}: no time left for round {number + 1}", file=sys.stderr, flush=True)
                continue
            began = time.monotonic()
            found = run(subject, name, options, cache, left)
            lasted[name, subject] = max(lasted.get((name, subject), 0.0), time.monotonic() - began)
            if found is not None:
                results[name][subject].append(found)
                print(row(name, subject, [found]), file=sys.stderr, flush=True)
            if options.json:
                # After every turn: a call that is broken off has what it measured.
                options.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", choices=[*SETTINGS, []], default=[], metavar="SETTING")
    parser.add_argument("--suite", choices=SUITES, help="turns that belong together, in place of settings")
    parser.add_argument("--list", action="store_true", help="print the settings and the suites")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end within them, with the turns taken so far")
    parser.add_argument("--overhead", type=int, default=0, help="measure the loop against its engine in so many pairs")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure the package of another checkout, too")
    parser.add_argument("--without-bare", action="store_true", help="leave the bare loop out")
    parser.add_argument("--torchtitan", action="store_true", help="measure torchtitan, too (titan.py)")
    parser.add_argument("--quick-weights", action="store_true", help="begin with repeated numbers, not drawn ones")
    parser.add_argument("--saves", type=int, default=0, help="measure so many asynchronous saves of ours at the end")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep compiled graphs there for a later call")
    parser.add_argument("--rounds", type=int, help="3, or those of the suite")
    parser.add_argument("--blocks", type=int, default=4, help=f"of {BLOCK} measured steps a turn")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    if asked.list:
        for key, value in [*SETTINGS.items(), *SUITES.items()]:
            print(f"{key}: {value}")
    elif asked.child:
        child(asked)
    else:
        main(asked)
