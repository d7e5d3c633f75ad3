"""What publishing to a throttled store costs the training loop, beside the local save that comes before it.

``python benchmarks/publish.py [--rounds 7] [--steps 60] [--rate 50e6] [--config JSON]``

Rounds come in pairs, in turns: steps, one asynchronous save, more steps while it is published to a contract double of
S3 that takes ``rate`` bytes per second; and the same with a save that is written and sealed and then thrown away.
Told are: how much longer a save blocks the loop because of publication, as a share of the time between two saves
(bar: 1%), the ratio of the median steps while a publication is under way and without one (bar: 3%), and how long it
took. On a GPU each step waits for the device, so that its duration is the device's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from loop import Ours, interval, small_task

from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.worker.checkpoint.checkpoint import Checkpointer
from sm_llm.worker.training import random_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.worker.publishing.publisher import Sealed


@contextlib.contextmanager
def sink(rate: float) -> Iterator[str]:
    """The address of a store that takes so many bytes per second."""
    command = [sys.executable, str(Path(__file__).with_name("s3_sink.py")), str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Thrown(Checkpointer):
    """Seals saves, and publishes none."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._publisher.offer = self._throw  # type: ignore[method-assign]

    @staticmethod
    def _throw(sealed: Sealed, _: object) -> None:
        shutil.rmtree(sealed.folder)
        sealed.done.set_result(None)


class Rounds:
    """Both ways of saving, in the same training job."""

    def __init__(self, ours: Ours, endpoint: str, steps: int) -> None:
        self.training, self.ours, self.steps = ours.training, ours, steps
        store = S3Store("bucket", "run", S3Options(endpoint_url=endpoint))
        arguments = (
            ours.training.context,
            store,
            ours.setup.task.checkpoint,
            ours.training.control,
            ours.training.strategy.device,
        )
        self.ways: dict[str, Checkpointer] = {"published": Checkpointer(*arguments), "thrown": Thrown(*arguments)}

    def step(self) -> float:
        began = time.perf_counter()
        self.ours.block(1)
        if self.training.strategy.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def take(self, way: str) -> dict[str, float]:
        """Steps, a save, steps until so many were taken and the save has ended."""
        checkpointer = self.ways[way]
        private = {"random": random_state.capture(self.training.strategy.device), "stream": {}}
        began = time.perf_counter()
        self.step()
        blocked = checkpointer.save(self.ours.step, self.training.strategy.state_dict(), private, {"plateau": {}})
        assert checkpointer._writing is not None
        while not checkpointer._writing.done():
            self.step()
        beside: list[float] = []
        done = checkpointer._writing.result().done
        published = time.perf_counter()
        while len(beside) < self.steps:
            if way == "published" and done.done():
                break
            beside.append(self.step())
        checkpointer.check()
        checkpointer.finish()
        return {
            "blocked": blocked,
            "median_step": statistics.median(beside),
            "steps": len(beside),
            "seconds": time.perf_counter() - began,
            "publication": time.perf_counter() - published,
        }

    def close(self) -> None:
        for checkpointer in self.ways.values():
            checkpointer.__exit__(None)


def measure(rounds: int, steps: int, rate: float, precision: str, config: dict[str, Any]) -> dict[str, Any]:
    environ = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ.update(environ)
    with (
        sink(rate) as endpoint,
        tempfile.TemporaryDirectory(dir=os.environ.get("SCRATCH")) as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        bench = Rounds(Ours(Path(folder), small_task(precision, steps, config)), endpoint, steps)
        for way in bench.ways:
            bench.take(way)  # warms up: staging buffers, the agent's process
        taken: list[dict[str, dict[str, float]]] = []
        for number in range(rounds):
            order = ("published", "thrown") if number % 2 else ("thrown", "published")
            taken.append({way: bench.take(way) for way in order})
        bench.close()
        bench.training.context.agent.end()
        bench.training.batches.close()
    return summary(taken)


def summary(taken: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    extra = [(it["published"]["blocked"] - it["thrown"]["blocked"]) / it["published"]["seconds"] for it in taken]
    ratios = [it["published"]["median_step"] / it["thrown"]["median_step"] for it in taken]
    return {
        "rounds": len(taken),
        "blocked_share": statistics.median(extra),
        "blocked_share_interval": list(interval(extra)),
        "step_ratio": statistics.median(ratios),
        "step_ratio_interval": list(interval(ratios)),
        "published_blocked_seconds": statistics.median(it["published"]["blocked"] for it in taken),
        "thrown_blocked_seconds": statistics.median(it["thrown"]["blocked"] for it in taken),
        "seconds_between_saves": statistics.median(it["published"]["seconds"] for it in taken),
        "publication_seconds": statistics.median(it["published"]["publication"] for it in taken),
        "median_step_seconds": statistics.median(it["thrown"]["median_step"] for it in taken),
        "steps_beside_a_publication": sum(it["published"]["steps"] for it in taken),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=50e6, help="bytes per second that the store takes")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: overrides of the model's config")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.rounds, options.steps, options.rate, options.precision, options.config)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
