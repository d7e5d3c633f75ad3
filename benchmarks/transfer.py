"""CPU, wall time and memory of `sm-llm sync` against `s5cmd sync` and `aws s3 sync`, interleaved, on a local server.

    python benchmarks/transfer.py [--rounds 3] [--slope] [--aws PATH] [--only CASE ...]

Starts SeaweedFS with its data in memory. Each client runs once per case and round in a fresh prefix; what it brought
is compared by size. CPU is user and system time of the client and its children. Only ratios mean something: the server
shares the machine, and a peak below this program's own size is not seen. `--slope` adds 4 GiB down, for what each
further GiB costs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from sm_llm.storage.engines.s5cmd import binary  # noqa: E402
from sm_llm.storage.s3 import S3Store  # noqa: E402
from sm_llm.storage.s3_options import S3Options  # noqa: E402
from tests.fixtures.s3_server import KEY, SECRET, running_server  # noqa: E402

MIB = 1 << 20
CASES = {"1 x 1 GiB": (1, 1024 * MIB), "8 x 128 MiB": (8, 128 * MIB), "1,000 x 256 KiB": (1000, MIB // 4)}
SLOPE = "1 x 4 GiB"
BUCKET, WARM = "transfers", "warm-up"


@dataclass(frozen=True)
class Cost:
    """What one run of one client took; memory in MB."""

    cpu: float
    wall: float
    memory: float


def clients(endpoint: str, aws: str | None) -> dict[str, list[str]]:
    """Command lines that end with source and destination."""
    found = {
        "sm-llm": [sys.executable, "-m", "sm_llm.cli", "sync", "--endpoint-url", endpoint],
        "s5cmd": [str(binary()), "--endpoint-url", endpoint, "sync"],
    }
    if aws:
        found["aws"] = [aws, "s3", "sync", "--only-show-errors", "--endpoint-url", endpoint]
    return found


def run(client: str, argv: list[str], source: str, target: str) -> Cost:
    if client == "s5cmd":  # it takes a bare prefix for an object, and a bare folder for its name
        source = f"{source}/*" if source.startswith("s3://") else f"{source}/"
        target = f"{target}/"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(Path(tempfile.gettempdir(), f"transfer-{os.getpid()}")),
    }
    began = time.perf_counter()
    child = subprocess.Popen([*argv, source, target], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{client} failed: {source} -> {target}")
    return Cost(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1000)


def make(folder: Path, count: int, size: int) -> None:
    folder.mkdir()
    block = os.urandom(min(size, 16 * MIB))
    for number in range(count):
        with (folder / f"file-{number:04d}.bin").open("wb") as stream:
            for _ in range(size // len(block)):
                stream.write(block)


def size_of(folder: Path) -> int:
    return sum(it.stat().st_size for it in folder.rglob("*") if it.is_file())


def measure(endpoint: str, aws: str | None, rounds: int, cases: dict[str, tuple[int, int]], memory: Path) -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    store = S3Store(BUCKET, "", S3Options(endpoint_url=endpoint))
    store.client.create_bucket(Bucket=BUCKET)
    costs: dict[tuple[str, str, str], list[Cost]] = defaultdict(list)
    for case, (count, size) in cases.items():
        source = memory / "source"
        make(source, count, size)
        warm_up(endpoint, source, memory)
        for number in range(rounds):
            order = list(clients(endpoint, aws).items())
            for client, argv in order[number % len(order) :] + order[: number % len(order)]:
                prefix, target = f"{client}-{number}-{size}-{count}", memory / f"target-{client}"
                if case == SLOPE:
                    prefix = WARM
                else:
                    costs[case, "up", client].append(run(client, argv, str(source), f"s3://{BUCKET}/{prefix}"))
                assert sum(it.size for it in store.list(f"{prefix}/")) == count * size, f"{client}: not all is there"
                costs[case, "down", client].append(run(client, argv, f"s3://{BUCKET}/{prefix}", str(target)))
                assert size_of(target) == count * size, f"{client}: not all has come"
                shutil.rmtree(target)
                if case != SLOPE:
                    store.delete(it.key for it in store.list(f"{prefix}/"))
        store.delete(it.key for it in store.list(f"{WARM}/"))
        shutil.rmtree(source)
        report(case, costs)


def warm_up(endpoint: str, source: Path, memory: Path) -> None:
    """One unmeasured run there and back: the first touch of memory is dear, and would be the first client's to pay."""
    argv = clients(endpoint, None)["s5cmd"]
    run("s5cmd", argv, str(source), f"s3://{BUCKET}/{WARM}")
    run("s5cmd", argv, f"s3://{BUCKET}/{WARM}", str(memory / "target-warm"))
    shutil.rmtree(memory / "target-warm")


def report(case: str, costs: dict[tuple[str, str, str], list[Cost]]) -> None:
    for direction in ("down",) if case == SLOPE else ("up", "down"):
        found = {client: runs for (name, way, client), runs in costs.items() if (name, way) == (case, direction)}
        middle = {client: statistics.median(it.cpu for it in runs) for client, runs in found.items()}
        best = min(statistics.median(it.wall for it in runs) for client, runs in found.items() if client != "sm-llm")
        for client, runs in found.items():
            wall, memory = statistics.median(it.wall for it in runs), max(it.memory for it in runs)
            low, high = min(it.cpu for it in runs) / middle["s5cmd"], max(it.cpu for it in runs) / middle["s5cmd"]
            print(
                f"| {case} {direction} | {client} | {middle[client]:.2f} | {middle[client] / middle['s5cmd']:.2f} "
                f"({low:.2f}-{high:.2f}) | {wall / best:.2f} | {memory:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slope", action="store_true", help="4 GiB down too")
    parser.add_argument("--aws", default=shutil.which("aws"), help="the aws program; left out if there is none")
    parser.add_argument("--only", nargs="*", help="names of the cases to run")
    arguments = parser.parse_args()
    cases = {**CASES, **({SLOPE: (1, 4096 * MIB)} if arguments.slope else {})}
    cases = {name: case for name, case in cases.items() if not arguments.only or name in arguments.only}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        running_server(Path(folder)) as server,
    ):
        print(
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {arguments.rounds} rounds, aws: {arguments.aws}"
        )
        print(
            "| case | client | CPU s | CPU to s5cmd (range) | wall to best peer | peak MB |\n|---|---|---|---|---|---|"
        )
        measure(server.endpoint, arguments.aws, arguments.rounds, cases, Path(folder))


if __name__ == "__main__":
    main()
