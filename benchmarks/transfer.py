"""CPU, wall time and memory of `sm-llm sync` against `s5cmd sync` and `aws s3 sync`, interleaved, on a local server.

    python benchmarks/transfer.py [--rounds 5] [--slope] [--aws COMMAND] [--only CASE ...] [--scale 1.0]

Starts SeaweedFS with its data in memory. Every round runs each client once per case and direction, beginning with
another one each time; what it brought is compared by size. CPU is user and system time of the client and its children,
memory the peak of its largest process. Only ratios mean something: the server shares the machine. At any time there is
one copy at the source and one at the target: 2 GiB. `--slope` compares what each further GiB from 1 to 4 costs down,
and takes 8 GiB. `--scale 0.25` makes every file a quarter as large, to look at something on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from sm_llm.storage.engines.s5cmd import binary  # noqa: E402
from tests.fixtures.s3_server import KEY, SECRET, S3Server, running_server  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CASES = {"1 x 1 GiB": (1, 1024 * MIB), "8 x 128 MiB": (8, 128 * MIB), "1,000 x 256 KiB": (1000, MIB // 4)}
NOTHING = "nothing to do"
SLOPE = {"slope from": (1, 1024 * MIB), "slope to": (1, 4096 * MIB)}
CPU_BARS = {"up": 0.8, "down": 2.0}
SMALL_BAR, SLOPE_BAR, WALL_BAR, MEMORY_BAR = 1.0, 1.5, 1.1, 500
"""What is aimed at: CPU to s5cmd, of small files, of each further GiB; wall time to the best peer; peak in MB."""

SPARE = 2 << 30
"""Bytes that must stay free beside what is written."""


@dataclass(frozen=True)
class Cost:
    """What one run of one client took: seconds, MB."""

    cpu: float
    wall: float
    memory: float


@dataclass
class Bench:
    """The server, the folder everything lies in, and the costs by (case, direction, client)."""

    server: S3Server
    folder: Path
    aws: str | None
    costs: dict[tuple[str, str, str], list[Cost]] = field(default_factory=lambda: defaultdict(list))

    @property
    def clients(self) -> dict[str, list[str]]:
        """Command lines that end with source and destination."""
        endpoint = ("--endpoint-url", self.server.endpoint)
        found = {
            "sm-llm": [sys.executable, "-m", "sm_llm.cli", "sync", *endpoint],
            "s5cmd": [str(binary()), *endpoint, "sync"],
        }
        if self.aws:
            found["aws"] = [*shlex.split(self.aws), "s3", "sync", "--only-show-errors", *endpoint]
        return found

    def order(self, number: int) -> list[str]:
        names = list(self.clients)
        return names[number % len(names) :] + names[: number % len(names)]

    def run(self, client: str, source: str, target: str) -> Cost:
        if client == "s5cmd":  # it takes a bare prefix for an object, and a bare folder for its name
            source = f"{source}/*" if source.startswith("s3://") else f"{source}/"
            target = f"{target}/"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environment |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
        environment |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment["XDG_CACHE_HOME"] = str(self.folder / "cache" / uuid.uuid4().hex)  # nothing is remembered
        began = time.perf_counter()
        child = subprocess.Popen([*self.clients[client], source, target], env=environment, stdout=subprocess.DEVNULL)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            raise
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{client} failed: {source} -> {target}")
        return Cost(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1000)

    @contextlib.contextmanager
    def bucket(self) -> Iterator[str]:
        """A fresh bucket; deleting one frees its space at once, deleting objects does not."""
        name, client = f"transfer-{uuid.uuid4().hex[:12]}", self.server.client
        client.create_bucket(Bucket=name)
        yield name
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            client.delete_objects(Bucket=name, Delete={"Objects": [{"Key": it["Key"]} for it in page["Contents"]]})
        client.delete_bucket(Bucket=name)

    def stored(self, bucket: str) -> int:
        pages = self.server.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sum(it["Size"] for page in pages for it in page.get("Contents", ()))

    def measure(self, case: str, count: int, size: int, rounds: int, directions: tuple[str, ...]) -> None:
        source, target = self.folder / "source", self.folder / "target"
        make(source, count, size)
        if "up" in directions:
            self.upload(case, source, count * size, 1, note=False)  # the first touch of memory is dear
            self.upload(case, source, count * size, rounds)
        with self.bucket() as bucket:
            self.run("sm-llm", str(source), f"s3://{bucket}/x")  # with checksums, so that there is something to verify
            shutil.rmtree(source)
            for number in range(-1, rounds):
                for client in self.order(number) if number >= 0 else ["s5cmd"]:
                    cost = self.run(client, f"s3://{bucket}/x", str(target))
                    assert size_of(target) == count * size, f"{client}: not all has come"
                    shutil.rmtree(target)
                    if number >= 0:
                        self.costs[case, "down", client].append(cost)
        for direction in directions:
            self.report(case, direction)

    def upload(self, case: str, source: Path, size: int, rounds: int, note: bool = True) -> None:
        for number in range(rounds):
            for client in self.order(number) if note else ["s5cmd"]:
                with self.bucket() as bucket:
                    cost = self.run(client, str(source), f"s3://{bucket}/x")
                    assert self.stored(bucket) == size, f"{client}: not all is there"
                if note:
                    self.costs[case, "up", client].append(cost)

    def middle(self, case: str, direction: str, client: str, what: str) -> float:
        return statistics.median(getattr(it, what) for it in self.costs[case, direction, client])

    def nothing(self, rounds: int) -> None:
        """What a run takes that finds nothing to do: the start of a client, and one listing."""
        source, targets = self.folder / "source", {client: self.folder / f"target-{client}" for client in self.clients}
        make(source, 1, MIB)
        with self.bucket() as bucket:
            self.run("sm-llm", str(source), f"s3://{bucket}/x")
            for number in range(-1, rounds):
                for client in self.order(number):
                    cost = self.run(client, f"s3://{bucket}/x", str(targets[client]))
                    if number >= 0:
                        self.costs[NOTHING, "down", client].append(cost)
        for folder in (source, *targets.values()):
            shutil.rmtree(folder)
        self.rows(NOTHING, "down")

    def report(self, case: str, direction: str) -> None:
        base, best = self.rows(case, direction)
        bar = SMALL_BAR if case.startswith("1,000") else CPU_BARS[direction]
        self.judge(f"{case} {direction}: CPU", self.middle(case, direction, "sm-llm", "cpu") / base, bar)
        self.judge(f"{case} {direction}: wall", self.middle(case, direction, "sm-llm", "wall") / best, WALL_BAR)
        self.judge(
            f"{case} {direction}: MB", max(it.memory for it in self.costs[case, direction, "sm-llm"]), MEMORY_BAR
        )

    def rows(self, case: str, direction: str) -> tuple[float, float]:
        """Print a row per client; returns the CPU seconds of s5cmd and the wall seconds of the best peer."""
        base = self.middle(case, direction, "s5cmd", "cpu")
        best = min(self.middle(case, direction, peer, "wall") for peer in self.clients if peer != "sm-llm")
        for client in self.clients:
            runs = self.costs[case, direction, client]
            low, high = min(it.cpu for it in runs) / base, max(it.cpu for it in runs) / base
            cpu, wall = self.middle(case, direction, client, "cpu"), self.middle(case, direction, client, "wall")
            print(
                f"| {case} {direction} | {client} | {cpu:.2f} | {cpu / base:.2f} ({low:.2f}-{high:.2f}) "
                f"| {wall:.2f} | {wall / best:.2f} | {max(it.memory for it in runs):.0f} |",
                flush=True,
            )
        return base, best

    def judge(self, what: str, value: float, bar: float) -> None:
        print(f"<!-- {what}: {value:.2f}, bar {bar}: {'kept' if value <= bar else 'MISSED'} -->", flush=True)

    def slope(self) -> None:
        """What each further GiB costs down, by CPU and by wall time, against s5cmd."""
        for what in ("cpu", "wall"):
            steps = {
                client: self.middle("slope to", "down", client, what) - self.middle("slope from", "down", client, what)
                for client in ("sm-llm", "s5cmd")
            }
            self.judge(f"slope: {what}", steps["sm-llm"] / steps["s5cmd"], SLOPE_BAR)


def make(folder: Path, count: int, size: int) -> None:
    folder.mkdir()
    block = os.urandom(min(size, 16 * MIB))
    for number in range(count):
        with (folder / f"file-{number:04d}.bin").open("wb") as stream:
            for start in range(0, size, len(block)):
                stream.write(block[: size - start])


def size_of(folder: Path) -> int:
    return sum(it.stat().st_size for it in folder.rglob("*") if it.is_file())


@contextlib.contextmanager
def work_folder(parent: Path, needed: int) -> Iterator[Path]:
    """A folder that is gone afterwards, whatever ends this program; what one that was killed left goes first."""
    for left in parent.glob("sm-llm-transfer-*"):
        if not Path("/proc", left.name.split("-")[3]).exists():
            shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(parent).free
    if free < needed + SPARE:
        raise SystemExit(f"{parent}: {needed + SPARE:,} bytes are needed and {free:,} are free")

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix=f"sm-llm-transfer-{os.getpid()}-", dir=parent) as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slope", action="store_true", help="only what each further GiB costs down")
    parser.add_argument("--aws", default=shutil.which("aws"), help="command line of aws; left out if there is none")
    parser.add_argument("--only", nargs="*", help="names of the cases to run")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the size of every file")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where all data lie")
    arguments = parser.parse_args()
    cases = SLOPE if arguments.slope else CASES
    cases = {name: case for name, case in cases.items() if not arguments.only or name in arguments.only}
    cases = {name: (count, int(size * arguments.scale)) for name, (count, size) in cases.items()}
    needed = 2 * max(count * size for count, size in cases.values())
    with work_folder(arguments.folder, needed) as folder, running_server(folder) as server:
        bench = Bench(server, folder, None if arguments.slope else arguments.aws)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {arguments.rounds} rounds, {arguments}")
        print("| case | client | CPU s | CPU to s5cmd (range) | wall s | wall to best peer | peak MB |")
        print("|---|---|---|---|---|---|---|")
        if not arguments.slope:
            bench.nothing(arguments.rounds)
        for case, (count, size) in cases.items():
            bench.measure(case, count, size, arguments.rounds, ("down",) if arguments.slope else ("up", "down"))
        if arguments.slope and len(cases) == len(SLOPE):
            bench.slope()


if __name__ == "__main__":
    main()
